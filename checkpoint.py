"""
What a run's folder holds, and how it is written and read.

    ckpt_00002000.pt    after that many updates: weights, optimizer, random states, settings and
                        tokenizer. The last two are kept
    metrics.jsonl       a line for every line on the screen

A file with any other name, such as ckpt_best.pt, is the user's: it is never deleted, and never
taken for the newest checkpoint. An expected failure is a ValueError or an OSError of one line that
says what to do.
"""
import contextlib
import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import torch

from cli import first_line, hold, is_out_of_memory
from data import tokenizer
from model import K3
from sizes import K3Config

CONTENT = {"model", "optimizer", "step", "config", "settings", "tokenizer", "data"}


def step_of(path):
    """ckpt_00002000.pt → 2000; None for any other name."""
    found = re.fullmatch(r"ckpt_(\d{8,})\.pt", path.name)
    return int(found[1]) if found else None


def checkpoints(out_dir):
    """The checkpoints that a run wrote to its folder, oldest first."""
    found = [path for path in Path(out_dir).glob("ckpt_*.pt") if step_of(path) is not None]
    return sorted(found, key=step_of)


# ------------------------------------------------------------------------------------------------
# writing

def save_checkpoint(out_dir, step, content):
    """
    To a temporary file, then renamed: whatever happens meanwhile, the earlier ones stay whole. This
    one and the one before are kept. Errors: OSError, if it could not be written.
    """
    path = Path(out_dir) / f"ckpt_{step:08d}.pt"
    temporary = path.with_suffix(".tmp")
    clear_up(out_dir, step)                       # what a kill in the last lines here left behind
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:      # RuntimeError: how torch reports a full disk
        temporary.unlink(missing_ok=True)
        kept = ", ".join(p.name for p in checkpoints(out_dir)) or "none"
        reason = getattr(error, "strerror", None) or first_line(error)
        raise OSError(f"could not write {path} ({reason}). Kept: {kept}. "
                      f"Make room and go on with --resume --out_dir={out_dir}") from None
    clear_up(out_dir, step)


def clear_up(out_dir, step):
    """Delete all but the last two checkpoints up to this step."""
    for old in [path for path in checkpoints(out_dir) if step_of(path) <= step][:-2]:
        with contextlib.suppress(OSError):        # Windows deletes no file that somebody reads
            old.unlink()


def prepare_folder(out_dir, fresh, num_params):
    """
    Make the run's folder and hold it for this process → the lock, to be kept until the run ends.
    Errors: ValueError, if another run writes there or if checkpoints would not fit on the disk.
    """
    out_dir = Path(out_dir)
    if out_dir.is_file() or out_dir.suffix == ".pt":
        raise ValueError(f"out_dir = {str(out_dir)!r}: expected a run's folder, not a checkpoint; "
                         f"give its folder, --out_dir={out_dir.parent}")
    out_dir.mkdir(parents=True, exist_ok=True)
    held = lock(out_dir)
    for rest in out_dir.glob("ckpt_*.tmp"):       # of a run that was killed while it wrote
        if step_of(rest.with_suffix(".pt")) is not None:
            rest.unlink()
    size = num_params * 4 * 3                     # weights and two moments in fp32
    there = 0 if fresh else len(checkpoints(out_dir)[:2])
    need = size * (3 - there)                     # three files, while the newest is written
    if shutil.disk_usage(out_dir).free < need:
        raise ValueError(f"{out_dir}: checkpoints will need {need / 1e6:.0f} MB of disk, which are "
                         "not free; make room or give another --out_dir")
    return held


def move_aside(out_dir, held):
    """
    Give an earlier run in this folder a new one of its own → its new folder, or None if there is
    none, and the lock of this folder, so far `held`.
    """
    out_dir, number = Path(out_dir), 1
    if not list(out_dir.glob("ckpt_*.pt")):
        return None, held
    while out_dir.with_name(f"{out_dir.name}.{number}").exists():
        number += 1
    held.close()         # Windows renames no folder in which a file is open
    earlier = out_dir.rename(out_dir.with_name(f"{out_dir.name}.{number}"))
    out_dir.mkdir()
    return earlier, lock(out_dir)


def lock(out_dir):
    """Hold a folder for as long as the returned file is open: at most until this process ends."""
    file = open(Path(out_dir) / ".lock", "w")
    if not hold(file):
        file.close()
        raise ValueError(f"another run is writing to {out_dir}; wait until it has ended, or give "
                         "another --out_dir")
    return file


# ------------------------------------------------------------------------------------------------
# reading

def load_checkpoint(path, device="cpu"):
    """
    A checkpoint file, or the newest of a run's folder → its content, a dict. Nothing in the file is
    executed. Errors: ValueError, which says whether it is cut short or of another version.
    """
    path = Path(path)
    if path.is_dir() or not path.exists():
        found = checkpoints(path)
        if not found:
            raise ValueError(f"no checkpoint in {path}: expected ckpt_00002000.pt or such, as "
                             "train.py writes them; train first, or give another --out_dir")
        path = found[-1]
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be opened ({error.strerror or error}); give access to it, "
                         "or name another checkpoint") from None
    except Exception as error:    # torch.load has a dozen ways to say that a file is cut short
        if is_out_of_memory(error):
            raise
        what = "damaged" if zipfile.is_zipfile(path) else "truncated"
        raise ValueError(f"{path} cannot be read: {path.stat().st_size} bytes, {what} or no "
                         f"checkpoint of nanoK3 ({first_line(error)}){way_out(path)}") from None
    try:
        lacking = CONTENT - content.keys()
        if lacking:
            raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
        K3Config(**content["config"])
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: it is whole, but no checkpoint of nanoK3 or one "
                         f"of another version ({error}); use the version that wrote it") from None
    if step_of(path) not in (None, content["step"]):
        raise ValueError(f"{path} holds update {content['step']}, so it is a copy under another "
                         "one's name; rename it, for example to ckpt_copy.pt")
    return content


def way_out(path):
    """What to do about a checkpoint that cannot be read: words for the end of the message."""
    number = step_of(path)
    for earlier in reversed(checkpoints(path.parent)):
        if number is not None and step_of(earlier) < number:
            with contextlib.suppress(Exception):
                torch.load(earlier, weights_only=True, mmap=True)
                return f"; {earlier.name} is good: to go on from it, move {path.name} elsewhere"
    return ""


def load_model(path, device="cpu"):
    """A run's folder or checkpoint file → K3 in eval mode, tiktoken.Encoding."""
    content = load_checkpoint(path)
    model = K3(K3Config(**content["config"]))
    load_weights(model, content["model"])
    model.tokenizer = tokenizer.from_dict(content["tokenizer"])
    if device == "cuda":
        model.bfloat16()          # half the bytes to read for every token
    return model.to(device).eval(), model.tokenizer


def load_weights(model, state):
    """model.load_state_dict(state). Errors: ValueError, if the tensors are another version's."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError("the checkpoint's weights are those of another version of nanoK3 "
                         f"({reason}); use the version that wrote it") from None


def read_metrics(out_dir):
    """The lines of metrics.jsonl, a dict each, but for those that were cut short; [] without it."""
    path, lines = Path(out_dir) / "metrics.jsonl", []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            figures = json.loads(line)
            if isinstance(figures, dict) and isinstance(figures.get("step"), int):
                lines.append(figures)
    return lines


def open_metrics(out_dir, step):
    """metrics.jsonl, to be written on after `step` updates: the lines up to there stay."""
    path = Path(out_dir) / "metrics.jsonl"
    kept = [line for line in read_metrics(out_dir) if step and line["step"] <= step]
    path.with_suffix(".tmp").write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(path.with_suffix(".tmp"), path)
    return open(path, "a", buffering=1, encoding="utf-8")
