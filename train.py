"""
Train a K3.

    python train.py config/shakespeare.py                       settings from a file, plain `name = value` lines
    python train.py config/shakespeare.py --lr=2e-3 --steps=500     and from the command line, which wins
    python train.py config/shakespeare.py --resume              go on where the last checkpoint stopped, bit for bit on the same CPU
    torchrun --nproc_per_node=8 train.py config/gpu_small.py --expert_parallel=8        on 8 GPUs (or CPU processes)
    python train.py --init_from=FOLDER --data=mine --lr=1e-3    fine-tune released weights (weights.py); the sizes are the folder's
    python train.py --help                                      all settings and their defaults

Settings are the fields of Settings (below) and of K3Config (model.py), in one flat list. A run writes out/NAME/:

    ckpt_00002000.pt      after that many updates: weights, optimizer, random states, settings, tokenizer. The last two are kept
    metrics.jsonl         a line for every line on the screen

Ctrl-C and SIGTERM finish the step, save and leave. Everything random is a function of the seed and of the number of finished updates,
`step`, which is also what schedule, checkpoints and data positions count.
"""
import ast
import contextlib
import ctypes
import difflib
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from data import prepare, tokenizer
from model import K3, K3Config
from parallel import Ranks


@dataclass
class Settings:
    # what to train on, and where to
    data: str = "shakespeare"          # a folder in data/ that prepare.py made
    out_dir: str = ""                  # "": out/ and the name of the config file
    init_from: str = ""                # a folder of released weights to start from; "": anew. Data: --tokenizer=FOLDER/tiktoken.model
    seed: int = 1
    # a step: grad_accum micro-batches of batch_size sequences of `context` tokens. With several processes this is what all do together
    batch_size: int = 16
    context: int = 256
    grad_accum: int = 1
    context_stages: tuple = ()         # ((0.0, 64), (0.5, 128), (0.9, 256)): from that part of the run on, that context, and
                                       # proportionally more or fewer sequences. () trains on `context` throughout
    # the rate: warm-up over the first 1% of the steps, then a cosine down to min_lr · lr
    steps: int = 1000
    lr: float = 4e-3
    min_lr: float = 0.0
    schedule: str = "cosine"           # or "wsd": lr stays, and falls in a line over the last fifth (for study)
    optimizer: str = "muon"            # or "whole": without cuts into heads, or "adamw" (both for study)
    weight_decay: float = 0.1
    grad_clip: float = 1.0             # global norm; 0: none
    # looking at it
    log_every: int = 10                # steps
    eval_every: int = 250              # steps; a checkpoint is written before each evaluation
    eval_batches: int = 16             # of batch_size, spread evenly over the split; a split with fewer windows is read once, whole
    tensorboard: bool = False
    wandb: bool = False
    # the machine
    device: str = "auto"               # cuda, mps or cpu
    dtype: str = "auto"                # bfloat16 (autocast) or float32. auto: bfloat16 on GPUs that have it
    compile: bool = False              # torch.compile
    resume: bool = False
    # several processes (torchrun)
    expert_parallel: int = 1           # so many processes share out the experts of every layer between them; the others hold copies
    balance_ranks: bool = False        # lend experts so that each of them computes the same number of tokens
    context_parallel: int = 1          # so many processes share out every sequence between them
    timeout: int = 600                 # seconds without word from another process, then the run ends


# What a resumed run may change; anything else would make it another run.
FREE = ("out_dir", "steps", "log_every", "eval_every", "eval_batches", "tensorboard", "wandb", "device", "dtype", "compile", "resume",
        "expert_parallel", "balance_ranks", "context_parallel", "timeout")
TYPES = {f.name: f.type for f in (*fields(Settings), *fields(K3Config))}


# ----------------------------------------------------------------------------------------------------------------------
# settings

def read_config_file(path):
    """`name = value` lines → dict. Parsed, never executed: a value is a literal."""
    if not os.path.isfile(path):
        near = difflib.get_close_matches(path, [str(p) for p in Path("config").glob("*.py")], 1)
        raise ValueError(f"no config file {path}" + (f"; did you mean {near[0]}?" if near else "; those that come with nanoK3 are in config/"))
    try:
        lines = ast.parse(Path(path).read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}; a config file is plain `name = value` lines") from None
    if lines and isinstance(lines[0], ast.Expr) and isinstance(lines[0].value, ast.Constant):
        lines = lines[1:]                                                  # a docstring
    values = {}
    for line in lines:
        try:
            (name,) = line.targets
            values[name.id] = ast.literal_eval(line.value)
        except (AttributeError, ValueError):
            raise ValueError(f"{path}, line {line.lineno}: expected `name = value` with a plain value") from None
    return values


def read_arguments(arguments):
    """sys.argv[1:] → ({name: value} as given by file and command line, the checked types included, name of the config file)."""
    given, stem = {}, ""
    for argument in arguments:
        if not argument.startswith("--"):
            stem = Path(argument).stem
            values = read_config_file(argument)
        else:
            name, equals, text = argument[2:].partition("=")
            try:
                value = ast.literal_eval(text) if equals else True         # --resume alone means --resume=True
            except (ValueError, SyntaxError):
                value = text                                               # a bare word is a str
            values = {name: text if TYPES.get(name) is str else value}
        for name, value in values.items():
            if name not in TYPES:
                near = difflib.get_close_matches(name, TYPES, 1)
                raise ValueError(f"unknown setting {name}" + (f"; did you mean {near[0]}?" if near else "; see python train.py --help"))
            if TYPES[name] is float and type(value) is int:
                value = float(value)
            if TYPES[name] is tuple and type(value) is list:
                value = tuple(value)
            if type(value) is not TYPES[name] and not (name in ("situ_beta", "situ_linear_beta") and value is None):
                raise ValueError(f"{name} = {value!r}: expected {TYPES[name].__name__}, got {type(value).__name__}")
            given[name] = value
    return given, stem


def make_settings(given, enc):
    """→ Settings, K3Config, checked. The vocabulary is the tokenizer's; a larger one only pads it."""
    settings = Settings(**{k: v for k, v in given.items() if k in {f.name for f in fields(Settings)}})
    model = {k: v for k, v in given.items() if k not in asdict(settings)}
    config = K3Config(**{"vocab_size": enc.n_vocab, **model})
    if config.vocab_size < enc.n_vocab:
        raise ValueError(f"vocab_size = {config.vocab_size}: the tokenizer of data/{settings.data} has {enc.n_vocab} tokens; leave vocab_size out, "
                         "or give at least that many")
    for name in ("batch_size", "context", "grad_accum", "steps", "log_every", "eval_every", "eval_batches", "timeout"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} = {getattr(settings, name)}: must be at least 1")
    if settings.lr <= 0 or not 0 <= settings.min_lr <= 1 or settings.weight_decay < 0 or settings.grad_clip < 0:
        raise ValueError("expected lr > 0, 0 ≤ min_lr ≤ 1, weight_decay ≥ 0, grad_clip ≥ 0")
    for name, words in dict(schedule=("cosine", "wsd"), optimizer=("muon", "whole", "adamw")).items():
        if getattr(settings, name) not in words:
            raise ValueError(f"{name} = {getattr(settings, name)!r}: expected {' or '.join(words)}")
    pairs = all(type(stage) is tuple and len(stage) == 2 and type(stage[1]) is int and stage[1] > 0 and 0 <= stage[0] < 1 for stage in settings.context_stages)
    begins = [stage[0] for stage in settings.context_stages] if pairs else []
    if settings.context_stages and (not pairs or begins[0] != 0 or sorted(set(begins)) != begins or settings.context_stages[-1][1] != settings.context
                                    or any(settings.batch_size * settings.context % length for _, length in settings.context_stages)):
        raise ValueError(f"context_stages = {settings.context_stages}: expected (part of the run, context) pairs that start at 0 and ascend, "
                         f"each context dividing batch_size · context = {settings.batch_size * settings.context}, the last one context = {settings.context}")
    return settings, config


def load_released(folder, given, enc):
    """The model of --init_from, in fp32. Its sizes are the folder's: a setting that says otherwise is refused, and so is another tokenizer."""
    config = K3Config.from_released(folder)
    training = {k: v for k, v in given.items() if k in ("qat", "balance", "router_bias_ema")}
    layers = {k: v for k, v in given.items() if k in ("mla_every", "full_attn_layers")}                # two ways to say the same
    theirs = asdict(config) | dict.fromkeys(layers, [i + 1 for i in range(config.n_layer) if config.is_mla(i)])
    for name, value in given.items():
        if name in layers:
            other = replace(config, **{"full_attn_layers": (), **layers})
            value = [i + 1 for i in range(config.n_layer) if other.is_mla(i)]
        if name in theirs and name not in training and value != theirs[name]:
            raise ValueError(f"{name} = {given[name]!r}, but the weights in {folder} have {theirs[name]!r}; leave it out")
    model = K3.from_pretrained(folder, torch.float32, **training)
    kinds = [tokenizer.to_dict(x) for x in (enc, model.tokenizer or enc)]
    if any(kinds[0][key] != kinds[1][key] for key in ("pattern", "ranks", "special")):
        raise ValueError(f"the data were prepared with tokenizer {enc.name}, not with that of {folder}; prepare them with "
                         f"--tokenizer={folder}/tiktoken.model")
    return model


# ----------------------------------------------------------------------------------------------------------------------
# data

def get_batch(tokens, batch_size, context, key):
    """Random windows, the same ones for the same key, a tuple of int → x, y (batch_size, context) int64; y is x moved by one token."""
    starts = np.random.default_rng(key).integers(0, len(tokens) - context, batch_size)
    return get_windows(tokens, starts, context)


def get_windows(tokens, starts, context):
    windows = torch.from_numpy(np.stack([tokens[i:i + context + 1].astype(np.int64) for i in starts]))   # copied out of the map
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def current_context(settings, step):
    """→ context and sequences of a micro-batch; their product is the same in every stage."""
    context = settings.context
    for begin, length in settings.context_stages:
        if step >= begin * settings.steps:
            context = length
    return context, settings.batch_size * settings.context // context


def learning_rate(settings, step):
    """Of the update after `step` finished ones, as a multiple of lr: 1% linear warm-up, then a cosine (or stay and fall) to min_lr."""
    warmup = max(1, settings.steps // 100)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, settings.steps - warmup))
    height = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else min(1.0, 5 * (1 - done))
    return settings.min_lr + (1 - settings.min_lr) * height


@torch.no_grad()
def evaluate(model, tokens, settings, device, autocast, ranks=None):
    """Mean loss in nats per token over evenly spread windows, shared out over the ranks."""
    ranks = ranks or Ranks()
    model.eval()
    T, B = settings.context, settings.batch_size
    windows = (len(tokens) - 1) // T
    starts = np.arange(windows) * T if windows <= settings.eval_batches * B else \
        np.linspace(0, len(tokens) - T - 1, settings.eval_batches * B).astype(np.int64)
    total = 0.0
    for i in range(0, len(starts), B):
        ours = starts[i:i + B][ranks.data::ranks.data_ranks]
        x, y = get_windows(tokens, ours if len(ours) else starts[:1], T)   # who has none computes along, as the others may need its experts
        x, y = (ranks.stretch(z).to(device) for z in (x, y))
        with autocast:
            total += model(x, y)[1].item() * len(ours)
    model.train()
    return ranks.sum(total)[0] / ranks.C / len(starts)


# ----------------------------------------------------------------------------------------------------------------------
# checkpoints

def checkpoints(out_dir):
    """Oldest first."""
    return sorted(Path(out_dir).glob("ckpt_*.pt"))


def save_checkpoint(out_dir, step, content):
    """To a temporary file, then renamed: whatever happens meanwhile, the earlier ones stay whole. Keeps the last two."""
    def clear_up():
        for old in checkpoints(out_dir)[:-2]:
            old.unlink(missing_ok=True)
    path = Path(out_dir) / f"ckpt_{step:08d}.pt"
    temporary = path.with_suffix(".tmp")
    clear_up()                                                             # after a kill that came between the renaming and this at the end
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:                               # RuntimeError: how torch's writer reports a full disk
        temporary.unlink(missing_ok=True)
        kept = ", ".join(p.name for p in checkpoints(out_dir)) or "none"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise OSError(f"could not write {path} ({reason}). Kept: {kept}. Make room and go on with --resume") from None
    clear_up()


def load_checkpoint(path, device="cpu"):
    """A checkpoint file, or the newest of a folder → its content, a dict. Nothing in the file is executed. Errors: ValueError."""
    path = Path(path)
    if path.is_dir() or not path.exists():
        found = checkpoints(path)
        if not found:
            raise ValueError(f"no checkpoint in {path}: expected ckpt_*.pt as train.py writes them; train first, or give another --out_dir")
        path = found[-1]
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        missing = {"model", "optimizer", "step", "config", "settings", "tokenizer", "data"} - content.keys()
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except Exception as error:                                             # torch.load has a dozen ways to say that a file is cut short
        others = [p.name for p in checkpoints(path.parent) if p != path]
        raise ValueError(f"{path} cannot be read ({str(error).splitlines()[0][:100]}): it is truncated or no checkpoint of nanoK3; "
                         + (f"delete it to go on from {others[-1]}" if others else "train anew")) from None
    return content


# ----------------------------------------------------------------------------------------------------------------------
# the machine

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "3090": 71e12}     # bf16, dense


def keep_memory():
    """On Linux: let malloc keep what is freed. Otherwise every large tensor of every step comes as fresh pages, 5 to 10% of a CPU run."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)                                          # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)                                    # M_TRIM_THRESHOLD


def find_device(name):
    """"auto" or a name → "cuda", "mps" or "cpu"."""
    mps = torch.backends.mps.is_available()
    device = name if name != "auto" else "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if device not in ("cpu", "cuda", "mps") or (device == "cuda" and not torch.cuda.is_available()) or (device == "mps" and not mps):
        raise ValueError(f"device = {device!r}: not here; expected auto, cpu" + ", cuda" * torch.cuda.is_available() + ", mps" * mps)
    return device


def set_up_machine(settings):
    """→ device, dtype, peak FLOP/s or None."""
    device = find_device(settings.device)
    if settings.dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype = {settings.dtype!r}: expected auto, float32 or bfloat16")
    dtype = "bfloat16" if settings.dtype == "auto" and device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else settings.dtype
    peak = None
    if device == "cuda":
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
    elif device == "cpu":
        keep_memory()
    return device, torch.bfloat16 if dtype == "bfloat16" else torch.float32, peak


def where_it_began(model, x, y, autocast):
    """After a loss or gradient that is not finite: the first place in the forward pass, else in the gradients, that is not."""
    found = []

    def check(name):
        def hook(module, inputs, output):
            y = output[0] if isinstance(output, tuple) else output
            if not found and not y.isfinite().all():
                found.append(f"the output of {name}")
        return hook
    parts = {name: m for name, m in model.named_modules() if name == "embed" or name.endswith((".attn", ".mlp", "lm_head"))}
    hooks = [module.register_forward_hook(check(name)) for name, module in parts.items()]
    with torch.no_grad(), autocast:
        model.eval()(x, y)                                                 # on every rank, whatever it finds: the others may need its experts
    for hook in hooks:
        hook.remove()
    bad = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if bad:
        return f"the weights of {bad[0]}"
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    return found[0] if found else f"the gradient of {bad[-1]}" if bad else "the loss"


# ----------------------------------------------------------------------------------------------------------------------

def train(arguments, ranks=None):
    ranks = ranks or Ranks()
    given, stem = read_arguments(arguments)

    # a resumed run starts from its own settings, and keeps them
    saved = None
    if given.get("resume"):
        out_dir = given.get("out_dir") or f"out/{stem or given.get('data', Settings.data)}"
        saved = load_checkpoint(out_dir)
        for name, value in given.items():
            before = {**saved["settings"], **saved["config"]}.get(name)
            if name not in FREE and before != value:
                raise ValueError(f"{name} = {value!r}, but the run in {out_dir} has {before!r}; leave it out to resume, or start a new run")
        given = {**saved["settings"], **saved["config"], **{k: v for k, v in given.items() if k in FREE}, "out_dir": out_dir}
    folder = prepare.HERE / given.get("data", Settings.data)
    meta, enc = prepare.load_meta(folder)
    model = load_released(given["init_from"], given, enc) if given.get("init_from") and not saved else None
    settings, config = make_settings({**given, **asdict(model.config)} if model else given, enc)
    ranks.check(settings, config)
    identity = dict(sha256=meta["sha256"], train_tokens=meta["train_tokens"], val_tokens=meta["val_tokens"])
    if saved and (saved["data"] != identity or saved["tokenizer"] != tokenizer.to_dict(enc)):
        raise ValueError(f"data = {settings.data!r} is not what {given['out_dir']} was trained on (another text, tokenizer or split); prepare that "
                         "again, or start a new run")
    for split in ("train", "val"):
        if meta[f"{split}_tokens"] < settings.context + 1:
            raise ValueError(f"context = {settings.context}: {folder}/{split}.bin has only {meta[f'{split}_tokens']} tokens; give more text or a "
                             "shorter context")

    # model and optimizer
    device, dtype, peak = set_up_machine(settings)
    autocast = torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32)
    ranks.start(device, settings.timeout)
    torch.manual_seed(settings.seed)
    model = (model or K3(config)).train()
    if ranks.experts:
        model.share_experts(ranks.experts, settings.balance_ranks)
    if ranks.context:
        model.share_context(ranks.context)
    model.to(device)
    optimizer = model.configure_optimizers(settings.lr, settings.weight_decay, ranks.everyone, ranks.replicas, settings.optimizer)
    step, seconds, saved_at, fresh = 0, 0.0, -1, not saved                                   # finished updates; time spent on them; the update last saved
    out_dir = Path(settings.out_dir or f"out/{stem or settings.data}")
    if saved:
        ranks.load_state(model, optimizer, saved["model"], saved["optimizer"])
        torch.set_rng_state(saved["random"]["torch"])
        if device == "cuda" and "cuda" in saved["random"]:
            torch.cuda.set_rng_state(saved["random"]["cuda"])
        step, seconds = saved["step"], saved["seconds"]
        saved = None                                                       # a second copy of everything
    ranks.agree(step=step, **identity, **asdict(settings), **asdict(config))
    ranks.first(lambda: prepare_folder(out_dir, fresh, model.num_params()))
    if settings.compile:
        model.compile()                                                    # in place: names of parameters stay as they are
    running = ranks.wrap(model)
    log = Log(out_dir, settings, step) if ranks.rank == 0 else None
    tokens_per_step = settings.batch_size * settings.context * settings.grad_accum
    if log:
        print(f"{model.num_params():,} parameters, {model.num_active_params():,} active; data/{settings.data}: {meta['train_tokens']:,} tokens, "
              f"{tokens_per_step:,} a step; {device}, {str(dtype)[6:]}" + (f", {ranks.N} processes, experts over {ranks.M}, context over {ranks.C}"
                                                                         if ranks.N > 1 else "") + f"; {out_dir}")

    stop = []                                                              # the signal that asked to leave, if any
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))

    def save():
        nonlocal saved_at
        random = dict(torch=torch.get_rng_state(), **({"cuda": torch.cuda.get_rng_state()} if device == "cuda" else {}))
        weights, moments = ranks.whole_state(model, optimizer)
        ranks.first(lambda: save_checkpoint(out_dir, step, dict(
            model=weights, optimizer=moments, step=step, seconds=seconds, random=random, config=asdict(config),
            settings=asdict(settings), tokenizer=tokenizer.to_dict(enc), data=identity)))
        saved_at = step

    # ---- the loop
    violation, dead, load, last_log, stopped = 0.0, 0, {}, (step, seconds), False
    model.train()
    while step < settings.steps and not stopped:
        began = time.perf_counter()
        factor = learning_rate(settings, step)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * factor * group.get("lr_scale", 1)
        context, batch_size = current_context(settings, step)
        train_tokens = prepare.open_tokens(folder, "train", meta)
        loss, bad, micros = 0.0, None, ranks.micro_batches(settings.grad_accum)
        for micro in micros:
            x, y = (ranks.part(z).to(device) for z in get_batch(train_tokens, batch_size, context, (settings.seed, step, micro)))
            with running.no_sync() if ranks.N > 1 and micro != micros[-1] else contextlib.nullcontext():   # gradients travel once per step
                with autocast:
                    micro_loss = running(x, y)[1] / len(micros)
                micro_loss.backward()
            loss += micro_loss.item()
            bad = (x, y) if bad is None and not math.isfinite(loss) else bad
        loss, norm, stopped = ranks.sum_gradients(model, loss, bool(stop))
        if not math.isfinite(loss + norm):
            began_in = where_it_began(model, *(bad or (x, y)), autocast)
            raise FloatingPointError(f"step {step + 1}: loss {loss}, gradient norm {norm}; it began in {began_in}. Nothing was updated; "
                                     f"the last good checkpoint is {(checkpoints(out_dir) or ['none'])[-1]}. A lower lr may help")
        if settings.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), settings.grad_clip, torch.tensor(norm, device=device))
        ranks.sum_counts(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for figures in model.update_router_bias():
            violation, dead = max(violation, figures["max_violation"]), max(dead, figures["dead"])
            load[figures["layer"]] = load.get(figures["layer"], 0) + figures["load"]
        step += 1
        seconds += time.perf_counter() - began

        if log and (step % settings.log_every == 0 or step == settings.steps):
            speed = tokens_per_step * (step - last_log[0]) / (seconds - last_log[1])
            flops = speed * model.flops_per_token(context)
            log.line(step=step, loss=loss, lr=settings.lr * factor, grad_norm=norm, tokens_per_s=speed, seconds=seconds,
                     max_violation=violation, dead_experts=dead, **({"mfu": flops / peak / ranks.N} if peak else {}),
                     load={i: [round(x, 3) for x in (n / n.float().mean()).tolist()] for i, n in load.items()})        # of a fair share
            violation, dead, load, last_log = 0.0, 0, {}, (step, seconds)
        if step % settings.eval_every == 0 or step == settings.steps:
            save()                                                         # before the evaluation: that may fail or take long
            losses = {split: evaluate(model, prepare.open_tokens(folder, split, meta), settings, device, autocast, ranks) for split in ("train", "val")}
            bits = {split: loss / math.log(2) * meta[f"{split}_tokens"] / meta[f"{split}_bytes"] for split, loss in losses.items()}
            if log:
                log.evaluation(step=step, train_loss=losses["train"], val_loss=losses["val"], train_bits_per_byte=bits["train"],
                               val_bits_per_byte=bits["val"], seconds=seconds)
    if log:
        log.close()
    if stopped and saved_at != step:
        save()
    if ranks.N > 1:
        dist.destroy_process_group()
    if stopped:
        number = stop[0] if stop else signal.SIGTERM                       # none here: another rank got it
        if log:
            print(f"stopped by {signal.Signals(number).name} after {step} updates, saved in {out_dir}; go on with --resume")
        sys.exit(128 + number)
    if log:
        print(f"done: {step} updates in {seconds:.0f} s, {step * tokens_per_step:,} tokens; sample with: python sample.py --out_dir={out_dir}")


def prepare_folder(out_dir, fresh, num_params):
    """Make the run's folder: what stands in the way is moved aside or refused. Errors: ValueError, if checkpoints would not fit."""
    if fresh and checkpoints(out_dir):                                     # an earlier run is moved aside, never overwritten
        number = next(i for i in range(1, 10**6) if not out_dir.with_name(f"{out_dir.name}.{i}").exists())
        out_dir.rename(out_dir.with_name(f"{out_dir.name}.{number}"))
        print(f"moved the earlier run in {out_dir} to {out_dir}.{number} (to go on with it: --resume)")
    out_dir.mkdir(parents=True, exist_ok=True)
    for rest in out_dir.glob("ckpt_*.tmp"):                                # of a run that was killed while it wrote
        rest.unlink()
    need = 3 * 4 * num_params * (3 - len(checkpoints(out_dir)))            # files of weights and two moments; three while the newest is written
    if shutil.disk_usage(out_dir).free < need:
        raise ValueError(f"{out_dir}: checkpoints will need {need / 1e6:.0f} MB of disk, which are not free; make room or give another --out_dir")


class Log:
    """Lines on the screen (one that renews itself on a terminal), in metrics.jsonl, and in tensorboard or wandb if asked for."""

    def __init__(self, out_dir, settings, step):
        self.steps, self.live = settings.steps, sys.stdout.isatty()
        path = Path(out_dir) / "metrics.jsonl"
        lines = path.read_text().splitlines() if step and path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]       # not what was cut short, nor a second curve
        path.with_suffix(".tmp").write_text("".join(line + "\n" for line in kept))
        os.replace(path.with_suffix(".tmp"), path)
        self.file = open(path, "a", buffering=1)
        self.board = self.wandb = None
        try:
            if settings.tensorboard:
                from torch.utils.tensorboard import SummaryWriter
                self.board = SummaryWriter(str(out_dir))
            if settings.wandb:
                import wandb
                self.wandb = wandb.init(project="nanoK3", name=Path(out_dir).name, config=asdict(settings))
        except ImportError as error:
            raise ValueError(f"{error.name} was asked for and is not installed: pip install {error.name}, or leave the setting out") from None

    def write(self, text, figures, end):
        print(("\r" if self.live else "") + text, end=end, flush=True)
        self.file.write(json.dumps(figures) + "\n")
        figures = {name: value for name, value in figures.items() if name != "load"}                   # the boards take single numbers
        for name, value in figures.items():
            if self.board and name != "step":
                self.board.add_scalar(name, value, figures["step"])
        if self.wandb:
            self.wandb.log(figures, step=figures["step"])

    def line(self, **f):
        left = f["seconds"] / f["step"] * (self.steps - f["step"])
        mfu = f"  MFU {f['mfu']:.1%}" if "mfu" in f else ""
        self.write(f"step {f['step']:>6}/{self.steps}  loss {f['loss']:.4f}  {f['tokens_per_s']:>8,.0f} tokens/s{mfu}  {left / 60:>5.1f} min left  "
                   f"max violation {f['max_violation']:.2f}" + (f"  {f['dead_experts']} dead experts" if f["dead_experts"] else ""),
                   f, "" if self.live else "\n")

    def evaluation(self, **f):
        if self.live:
            print()
        self.write(f"step {f['step']:>6}  train {f['train_loss']:.4f}  val {f['val_loss']:.4f} nats per token  = "
                   f"{f['val_bits_per_byte']:.4f} bits per byte  ({f['seconds']:.0f} s)", f, "\n")

    def close(self):
        if self.live:
            print()
        self.file.close()
        if self.board:
            self.board.close()
        if self.wandb:
            self.wandb.finish()


if __name__ == "__main__":
    if "--help" in sys.argv:
        print(__doc__.strip() + "\n\nSettings:")
        for f in (*fields(Settings), *fields(K3Config)):
            print(f"    --{f.name}={f.default!r}")
        sys.exit()
    ranks = Ranks()
    try:
        train(sys.argv[1:], ranks)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(ranks.last_words(error))
    except RuntimeError as error:
        if ranks.N == 1:
            raise
        sys.exit(ranks.last_words(error))
    except KeyboardInterrupt:                                              # before the loop; in it, Ctrl-C saves first
        sys.exit("stopped before the first step")
