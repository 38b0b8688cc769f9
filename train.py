"""
Train a K3.

    python train.py config/shakespeare.py              settings from a file of `name = value` lines
    python train.py config/shakespeare.py --lr=2e-3    and from the command line, which wins
    python train.py config/shakespeare.py --resume     go on from the last checkpoint; on the same
                                                       CPU the result is the same bit for bit
    python train.py --init_from=FOLDER --data=mine     fine-tune released weights (weights.py),
                                                       whose sizes are the folder's
    torchrun --nproc_per_node=8 train.py config/gpu_small.py --expert_parallel=8
    python train.py --help                             what every setting means

A setting is a field of Settings, below, or of K3Config in sizes.py. A run writes checkpoints and
metrics.jsonl to out/NAME/ (checkpoint.py). On Ctrl-C, SIGTERM or a lost terminal it finishes the
step, saves and leaves. Everything random is a function of the seed and of `step`, the number of
finished updates; the learning rate, checkpoints and the choice of data go by `step` as well.
"""
import contextlib
import ctypes
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import checkpoint
import cli
from data import prepare, tokenizer
from data.images import Images
from model import K3
from ops import casting_once
from parallel import Ranks, counted
from sizes import K3Config


@dataclass
class Settings:
    data: str = "shakespeare"     # the folder in data/ that prepare.py made
    out_dir: str = ""             # the run's folder; "": out/ and the name of the config file
    init_from: str = ""           # a folder of released weights to start from; "": random weights
    resume: bool = False          # go on with the run in out_dir
    seed: int = 1                 # of the weights and of the choice of data
    # a step, which is what all processes do together
    batch_size: int = 16          # sequences in a micro-batch
    context: int = 256            # tokens in a sequence
    grad_accum: int = 1           # micro-batches in a step
    context_stages: tuple = ()    # (part of the run done, context) pairs, ((0.0, 64), (0.5, 256));
                                  # a step keeps its number of tokens. (): context throughout
    # the update
    steps: int = 1000             # updates in all
    lr: float = 4e-3              # the highest learning rate, after 1% of the steps
    min_lr: float = 0.0           # the last one, as a part of lr
    schedule: str = "cosine"      # or "wsd", for study: constant, then linear over the last fifth
    optimizer: str = "muon"       # or, for study, "whole" (no cuts into heads) or "adamw"
    weight_decay: float = 0.1     # decoupled; of matrices and embeddings
    grad_clip: float = 1.0        # the largest norm of all gradients together; 0: no limit
    # log and checkpoints
    log_every: int = 10           # steps between lines on the screen
    eval_every: int = 250         # steps between evaluations; a checkpoint is written before each
    eval_batches: int = 16        # of batch_size, spread over a split; a smaller one is read whole
    tensorboard: bool = False     # write its event files to out_dir
    wandb: bool = False           # log to Weights & Biases, project nanoK3
    # the machine
    device: str = "auto"          # cuda, mps or cpu
    dtype: str = "auto"           # bfloat16 (by autocast) or float32; auto: bfloat16 if a GPU can
    compile: bool = False         # torch.compile; needs a C++ compiler
    checkpoint_layers: bool = False  # of a layer keep only the input, and run it again in backward
    # several processes, started by torchrun
    expert_parallel: int = 1      # number of processes that share the experts of every layer
    balance_ranks: bool = False   # lend experts so that all of them compute as many tokens
    context_parallel: int = 1     # number of processes that share every sequence
    timeout: int = 600            # seconds without word from another process, then the run ends


# ------------------------------------------------------------------------------------------------
# data

def get_batch(tokens, batch_size, context, key):
    """
    Random windows of tokens (n) → x, y (batch_size, context) int64; y is x moved on by one token.
    key: a tuple of int; the same key gives the same windows.
    """
    return get_windows(tokens, random_starts(tokens, batch_size, context, key), context)


def random_starts(tokens, batch_size, context, key):
    return np.random.default_rng(key).integers(0, len(tokens) - context, batch_size)


def get_windows(tokens, starts, context):
    """The windows that begin at starts (batch) → x, y (batch, context) int64."""
    rows = [tokens[i:i + context + 1].astype(np.int64) for i in starts]    # copied out of the file
    windows = torch.from_numpy(np.stack(rows))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def current_context(settings, step):
    """→ context, sequences in a micro-batch; their product is the same at every stage."""
    context = settings.context
    for begin, length in settings.context_stages:
        if step >= begin * settings.steps:
            context = length
    return context, settings.batch_size * settings.context // context


def learning_rate(settings, step):
    """Learning-rate multiplier for the next update, after `step` finished ones."""
    warmup = max(1, settings.steps // 100)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, settings.steps - warmup))
    if settings.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * done))
    else:
        height = min(1.0, 5 * (1 - done))
    return settings.min_lr + (1 - settings.min_lr) * height


# ------------------------------------------------------------------------------------------------
# the loop

def train(arguments, ranks=None):
    """One run, from the words on the command line to its last checkpoint."""
    with Run(arguments, ranks or Ranks()) as run:
        loop(run)


def loop(run):
    """Updates, until the last one, a signal, or a change of the data set."""
    settings, ranks, model, optimizer = run.settings, run.ranks, run.model, run.optimizer
    stopped = data_changed = False
    while run.step < settings.steps and not stopped:
        data_changed = ranks.sum(run.data.changed())[0] > 0
        if data_changed:
            break
        began = time.perf_counter()
        lr = settings.lr * learning_rate(settings, run.step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1)

        # forward and backward: the mean over all micro-batches of all processes
        parts = run.gradients()
        means, norm, stopped = ranks.sum_gradients(model, parts.sum(0), bool(run.signals))
        loss, mtp_loss = means
        if not math.isfinite(loss + norm):
            raise FloatingPointError(what_is_not_finite(run, loss, norm, parts))

        # the update: the router biases, then Muon and AdamW
        run.between_steps = False                 # an error from here on must not save
        ranks.sum_counts(model)
        run.log.count(model.update_router_bias())
        if 0 < settings.grad_clip < norm:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            torch._foreach_mul_(grads, settings.grad_clip / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.step += 1
        run.between_steps = True
        run.seconds += time.perf_counter() - began

        # log, checkpoint, evaluation
        if run.step == run.first_step + 1:        # only now is an earlier run moved aside
            run.take_folder()
        last = run.step == settings.steps
        if run.step % settings.log_every == 0 or last:
            if model.mtp:                         # the log has both apart
                loss -= run.config.mtp_weight * mtp_loss
            run.log.training(run, loss, lr, norm, mtp_loss)
        if run.step % settings.eval_every == 0 or last:
            run.save()                            # first: the evaluation may fail or take long
            run.log.evaluation(run, run.evaluate())
    run.finish(stopped, data_changed)


def gradients(run):
    """
    Forward and backward over this rank's micro-batches → of each, its part of the mean loss and
    that of MTP's own, (micro-batches, 2). Nothing here waits for a GPU.
    """
    ranks, parts = run.ranks, []
    micros = ranks.micro_batches(run.settings.grad_accum)
    with casting_once(run.device):
        for micro in micros:
            x, y, images, weight = run.batch(run.step, micro)
            # ranks exchange gradients once a step, in the backward pass of the last micro-batch
            later = ranks.world_size > 1 and micro != micros[-1]
            with run.wrapped.no_sync() if later else contextlib.nullcontext():
                with run.autocast:
                    loss = run.wrapped(x, y, images=images)[1] * weight / len(micros)
                loss.backward()
            loss = loss.detach()
            mtp_loss = run.model.mtp_loss * weight / len(micros) if run.model.mtp else 0 * loss
            parts.append(torch.stack([loss, mtp_loss]))
    return torch.stack(parts)


@torch.no_grad()
def evaluate(model, tokens, settings, device, autocast, ranks=None, images=None):
    """The model's own loss alone, of `losses`."""
    return losses(model, tokens, settings, device, autocast, ranks, images)[0]


@torch.no_grad()
def losses(model, tokens, settings, device, autocast, ranks=None, images=None):
    """
    The model's own loss, and MTP's (0 without it).

    Mean loss in nats per target over evenly spread windows, shared out over the ranks. A split of
    at most eval_batches · batch_size windows is read whole, its last one padded with targets of −1.
    images: those of the split, if it has any.
    """
    ranks = ranks or Ranks()
    model.eval()
    context, batch_size = settings.context, settings.batch_size
    windows, most = (len(tokens) - 1) / context, settings.eval_batches * batch_size
    if int(windows) <= most:
        starts = np.arange(math.ceil(windows)) * context
        missing = len(starts) * context + 1 - len(tokens)
        tokens = np.pad(tokens.astype(np.int64), (0, missing), constant_values=-1)
    else:
        windows = most
        starts = np.linspace(0, len(tokens) - context - 1, most).astype(np.int64)
    total = mtp_total = read = 0.0
    for i in range(0, len(starts), batch_size):
        ours = starts[i:i + batch_size][ranks.data_rank::ranks.data_ranks]
        # a rank without a window computes along: others may need its experts
        begins, seen = ours if len(ours) else starts[:1], None
        if images:
            x, y, rows = images.windows(tokens, begins, context)
            seen = to_device(images.load([n for row in rows for n in row]), device)
        else:
            x, y = get_windows(tokens, begins, context)
        x, y = ranks.stretch(x).to(device), ranks.stretch(y).to(device)
        share = (y != -1).sum().item() / y.shape[1] if len(ours) else 0        # in windows
        with autocast:
            loss = model(x.clamp(min=0), y, images=seen)[1].item()
        total += loss * share if share else 0
        if share and getattr(model, "mtp", None):
            mtp_total += model.mtp_loss.item() * share
        read += share
    model.train()
    total, mtp_total, read = ranks.sum(total, mtp_total, read)
    count = read if images else ranks.context_ranks * windows
    return [total / count, mtp_total / count]


def pinned(x):
    """In memory that a GPU copies from by itself, if there is a GPU."""
    return x.pin_memory() if torch.cuda.is_available() else x


def to_device(images, device):
    return images and (images[0].to(device, non_blocking=True), images[1])


# ------------------------------------------------------------------------------------------------
# what the loop works with

class Run:
    """Settings, data, model and optimizer of a run, how far it is, and its folder."""

    def __init__(self, arguments, ranks):
        self.ranks = ranks
        given, stem = read_arguments(arguments)
        out_dir = given.get("out_dir") or f"out/{stem or given.get('data', Settings.data)}"
        saved = checkpoint.load_checkpoint(out_dir) if given.get("resume") else None
        if saved:
            given = resumed_settings(given, saved, out_dir)
        self.data = Data(given.get("data", Settings.data))
        model = None
        if given.get("init_from") and not saved:
            model = load_released(given["init_from"], given, self.data.enc)
            given = {**given, **asdict(model.config)}
        self.settings, self.config = make_settings({**given, "out_dir": out_dir}, self.data.enc)
        self.batches = Batches(self.settings, self.data, ranks)
        self.log = Log(self.settings, speaks=ranks.rank == 0)
        self.set_up(model, saved)

    def set_up(self, model, saved):
        """All that does not depend on what is learned from, here or in post.py."""
        settings, ranks = self.settings, self.ranks
        self.out_dir = Path(settings.out_dir)
        ranks.way_back = f"--resume --out_dir={settings.out_dir}"
        ranks.check(settings, self.config)
        self.data.check(settings, self.config, saved)
        self.device, self.dtype, self.peak = set_up_machine(settings)
        self.autocast = torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32)
        ranks.start(self.device, settings.timeout)
        self.build(model, saved)

    def gradients(self):
        return gradients(self)

    def evaluate(self):
        return {split: losses(self.model, self.data.tokens(split), self.settings, self.device,
                              self.autocast, self.ranks, self.data.images[split])
                for split in ("train", "val")}

    def also_saved(self):
        """What other kinds of runs keep in a checkpoint beside the rest. On all ranks."""
        return {}

    def what_now(self):
        tokens = self.step * tokens_per_step(self.settings)
        return f", {tokens:,} tokens; sample with: python sample.py --out_dir={self.out_dir}"

    def build(self, model, saved):
        """Model and optimizer: new ones, released weights, or those of a checkpoint."""
        settings, ranks = self.settings, self.ranks
        torch.manual_seed(settings.seed)
        model = (model or K3(self.config)).train()
        if ranks.experts:
            model.share_experts(ranks.experts, settings.balance_ranks)
        if ranks.context:
            model.share_context(ranks.context)
        model.checkpoint_layers = settings.checkpoint_layers
        model.to(self.device)
        self.model = model
        self.optimizer = model.configure_optimizers(settings.lr, settings.weight_decay,
                                                    ranks.everyone, ranks.replicas,
                                                    settings.optimizer)
        self.step, self.seconds = 0, 0.0          # finished updates, and the time spent on them
        if saved:
            ranks.load_state(model, self.optimizer, saved["model"], saved["optimizer"])
            torch.set_rng_state(saved["random"]["torch"])
            if self.device == "cuda" and "cuda" in saved["random"]:
                torch.cuda.set_rng_state(saved["random"]["cuda"])
            self.step, self.seconds = saved["step"], saved["seconds"]
        self.first_step = self.saved_at = self.step
        self.between_steps = True                 # not in the middle of an update: fit to be saved
        self.signals = []                         # received since the start
        self.earlier = None                       # where an earlier run was moved
        ranks.agree(step=self.step, **self.data.identity, **asdict(settings), **asdict(self.config))
        size = model.num_params()
        self.lock = ranks.first(lambda: checkpoint.prepare_folder(self.out_dir, not saved, size))
        if settings.compile:
            model.compile()                       # in place: parameters keep their names
        self.wrapped = ranks.wrap(model)

    def batch(self, step, micro):
        """This rank's part of a micro-batch, on its device → x, y, images, weight."""
        x, y, images, weight = self.batches.get(step, micro)
        x, y = (ids.to(self.device, non_blocking=True) for ids in (x, y))
        return x, y, to_device(images, self.device), weight

    def __enter__(self):
        """From now on Ctrl-C, SIGTERM and a lost terminal are only noted, for the loop to see."""
        self.log.start(self)
        numbers = [signal.SIGINT, signal.SIGTERM]
        hang_up = getattr(signal, "SIGHUP", None)                # Windows has none
        if hang_up and signal.getsignal(hang_up) != signal.SIG_IGN:        # nohup
            numbers.append(hang_up)
        self.handlers = {number: signal.signal(number, self.note_signal) for number in numbers}
        return self

    def note_signal(self, number, frame):
        self.signals.append(number)
        if len(self.signals) == 1:
            self.signalled = time.monotonic()
            if self.log.speaks:
                with contextlib.suppress(OSError):    # not print, which this may have interrupted
                    os.write(2, b"\nfinishing the step, then saving; Ctrl-C again leaves at once\n")
        elif number == signal.SIGINT:
            # torchrun hands on, within a second, the Ctrl-C that the terminal has sent already
            if self.ranks.world_size == 1 or time.monotonic() > self.signalled + 1:
                os._exit(128 + number)

    def take_folder(self):
        """Now that a step has succeeded: move an earlier run aside and open the log."""
        if self.first_step == 0:
            moved = self.ranks.first(lambda: checkpoint.move_aside(self.out_dir, self.lock))
            self.earlier, self.lock = moved or (None, None)
        if self.earlier:
            self.log.say(f"moved the earlier run in {self.out_dir} to {self.earlier} "
                         f"(to go on with it: --resume --out_dir={self.earlier})")
        self.log.open(self.out_dir, self.first_step)

    def save(self):
        self.saved_at = self.step
        self.optimizer.zero_grad(set_to_none=True)
        for counts in counted(self.model)[0]:     # those of an unfinished step
            counts.zero_()
        random = {"torch": torch.get_rng_state()}
        if self.device == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        weights, moments = self.ranks.whole_state(self.model, self.optimizer)
        content = dict(model=weights, optimizer=moments, step=self.step, seconds=self.seconds,
                       random=random, config=asdict(self.config), settings=asdict(self.settings),
                       tokenizer=tokenizer.to_dict(self.data.enc), data=self.data.identity,
                       **self.also_saved())
        self.ranks.first(lambda: checkpoint.save_checkpoint(self.out_dir, self.step, content))

    def finish(self, stopped, data_changed):
        """After the last step: save what is not saved yet, and say how it ended."""
        begun = self.step > self.first_step
        if self.saved_at != self.step:
            self.save()
        self.log.close()
        if self.ranks.world_size > 1:
            dist.destroy_process_group()
        saved = f"after {self.step} updates, saved in {self.out_dir}"
        if data_changed:
            raise ValueError(f"data/{self.settings.data} was replaced while this run trained on "
                             f"it; stopped {saved if begun else 'before the first step'}. Prepare "
                             "the earlier text again and --resume, or train anew")
        if stopped:
            # without a signal here, another rank got it
            number = self.signals[0] if self.signals else signal.SIGTERM
            other = f", or with the earlier run: --out_dir={self.earlier}" if self.earlier else ""
            self.log.say(f"stopped by {signal.Signals(number).name} {saved}; "
                         f"go on with --resume --out_dir={self.out_dir}{other}")
            sys.exit(128 + number)
        if begun:
            self.log.say(f"done: {self.step} updates in {self.seconds:.0f} s{self.what_now()}")
        else:
            self.log.say(f"nothing to do: the run in {self.out_dir} has {self.step} updates "
                         f"already; give more than --steps={self.settings.steps}")

    def __exit__(self, kind, error, traceback):
        """Whatever ends a run: save the last update, if it is whole, and let go of everything."""
        self.log.close()
        failed = isinstance(error, Exception) and not isinstance(error, FloatingPointError)
        ours = self.ranks.world_size == 1 and not self.lock.closed
        if failed and ours and self.between_steps and self.saved_at != self.step:
            with contextlib.suppress(OSError, RuntimeError, MemoryError):
                self.save()
                self.log.say(f"saved {self.step} updates in {self.out_dir} before the error")
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.batches.close()
        self.data.close()
        if self.lock:
            self.lock.close()


def tokens_per_step(settings):
    return settings.batch_size * settings.context * settings.grad_accum


class Batches:
    """This rank's parts of the micro-batches. A thread makes each while the one before is used."""

    def __init__(self, settings, data, ranks):
        self.settings, self.data, self.ranks = settings, data, ranks
        self.thread, self.next = ThreadPoolExecutor(1), {}

    def get(self, step, micro):
        """→ x, y, images or None, and the weight of their mean loss, by their number of targets."""
        making = self.next.pop((step, micro), None) or self.thread.submit(self.make, step, micro)
        batch = making.result()
        micros = [*self.ranks.micro_batches(self.settings.grad_accum)]
        i = micros.index(micro) + 1
        following = (step, micros[i]) if i < len(micros) else (step + 1, micros[0])
        if following[0] < self.settings.steps:
            self.next = {following: self.thread.submit(self.make, *following)}
        return batch

    def make(self, step, micro):
        settings, part = self.settings, self.ranks.part
        context, batch_size = current_context(settings, step)
        tokens, images = self.data.tokens("train"), self.data.images["train"]
        key = settings.seed, step, micro
        if not images:
            x, y = get_batch(tokens, batch_size, context, key)
            return pinned(part(x)), pinned(part(y)), None, 1
        starts = random_starts(tokens, batch_size, context, key)
        x, y, rows = images.windows(tokens, starts, context)
        mine = self.ranks.rows(torch.arange(batch_size)).tolist()
        seen = images.load([number for row in mine for number in rows[row]])
        targets, all_targets = (part(y) != -1).sum().item(), (y != -1).sum().item()
        weight = targets / max(1, all_targets) * y.numel() / part(y).numel()
        seen = seen and (pinned(seen[0]), seen[1])
        return pinned(part(x)), pinned(part(y)), seen, weight

    def close(self):
        self.thread.shutdown(cancel_futures=True)


class Data:
    """A prepared data set, read as it was when the run began, even if it is replaced meanwhile."""

    def __init__(self, name):
        self.folder = prepare.HERE / name
        self.stamp = self.look()                  # first, so that no change goes unnoticed
        self.meta, self.enc = prepare.load_meta(self.folder)
        self.files = {split: open(self.folder / f"{split}.bin", "rb") for split in ("train", "val")}
        self.images = {split: Images(self.folder, split, self.meta, self.enc)
                       if "patch" in self.meta else None for split in self.files}
        self.identity = {key: self.meta[key] for key in ("sha256", "train_tokens", "val_tokens")}

    def check(self, settings, config, saved):
        """Whether it is what a resumed run began with, and long enough. Errors: ValueError."""
        if saved and (saved["data"] != self.identity
                      or saved["tokenizer"] != tokenizer.to_dict(self.enc)):
            raise ValueError(f"data = {settings.data!r} is not what {settings.out_dir} was trained "
                             "on (another text, tokenizer or split); prepare that again. To train "
                             f"its weights on new data: python weights.py {settings.out_dir} "
                             "FOLDER, then --init_from=FOLDER (docs/weights.md)")
        longest = max([settings.context, *(length for _, length in settings.context_stages)])
        for split in ("train", "val"):
            count = self.meta[f"{split}_tokens"]
            if count < longest + 1:
                raise ValueError(f"context = {longest}: {self.folder}/{split}.bin has only {count} "
                                 "tokens; give more text or a shorter context")
        if "patch" in self.meta:
            self.check_images(settings, config)

    def check_images(self, settings, config):
        patch = self.meta["patch"]
        if not config.vit_layers or config.vit_patch != patch:
            raise ValueError(f"data/{settings.data} has images in patches of {patch} pixels, but "
                             f"vit_layers = {config.vit_layers} and vit_patch = "
                             f"{config.vit_patch}; give --vit_layers=4 --vit_patch={patch}")
        shortest = min([settings.context, *(length for _, length in settings.context_stages)])
        for split, images in self.images.items():
            longest = max(images.ends - images.begins, default=0)
            if longest > shortest:
                raise ValueError(f"context = {shortest}: {self.folder}/{split}.bin has an image of "
                                 f"{longest} tokens; give a context of at least that")

    def told(self, settings):
        return (f"data/{settings.data}: {self.meta['train_tokens']:,} tokens, "
                f"{tokens_per_step(settings):,} a step")

    def tokens(self, split):
        """
        Token ids (n), a map of the file. Make it anew for each step: pages touched through a map
        that stays count as resident memory.
        """
        return prepare.map_tokens(self.files[split], self.meta)

    def look(self):
        """Size and time of the token files, which change when prepare.py writes them anew."""
        with contextlib.suppress(OSError):        # None, if they are gone
            stats = [(self.folder / f"{split}.bin").stat() for split in ("train", "val")]
            return [(stat.st_size, stat.st_mtime_ns) for stat in stats]

    def changed(self):
        return self.look() != self.stamp

    def close(self):
        for file in (*self.files.values(), *filter(None, self.images.values())):
            file.close()


def what_is_not_finite(run, loss, norm, parts):
    """
    The message for a loss or gradient that is not finite, with the place where it began: in the
    first micro-batch of which `parts` (gradients) is not finite, or else the last.
    """
    micros = run.ranks.micro_batches(run.settings.grad_accum)
    bad = [micro for micro, part in zip(micros, parts.tolist()) if not math.isfinite(part[0])]
    *batch, _ = run.batch(run.step, bad[0] if bad else micros[-1])
    place = where_it_began(run.model, *batch, run.autocast)
    good = checkpoint.checkpoints(run.out_dir) if run.step else []
    return (f"step {run.step + 1}: loss {loss}, gradient norm {norm}; it began in {place}. Nothing "
            f"was updated; the last good checkpoint is {good[-1] if good else 'none'}. A lower lr "
            "may help")


def where_it_began(model, x, y, images, autocast):
    """The first place that is not finite, in the forward pass or else in the backward pass."""
    found = []

    def look(name, output):
        output = output[0] if isinstance(output, tuple) else output
        if not found and not output.isfinite().all():
            found.append(f"the output of {name}")
    hooks = [module.register_forward_hook(lambda m, i, output, name=name: look(name, output))
             for name, module in model.named_modules()
             if name in ("embed", "vision") or name.endswith((".attn", ".mlp", "lm_head"))]
    with torch.no_grad(), autocast:
        model.eval()(x, y, images=images)      # on every rank: the others may need its experts
    for hook in hooks:
        hook.remove()
    parameters = list(model.named_parameters())
    weights = [f"the weights of {name}" for name, p in parameters if not p.isfinite().all()]
    gradients = [f"the gradient of {name}" for name, p in reversed(parameters)
                 if p.grad is not None and not p.grad.isfinite().all()]
    return (weights + found + gradients + ["the loss"])[0]


# ------------------------------------------------------------------------------------------------
# the log

class Log:
    """
    Lines on the screen (on a terminal, one that renews itself), in metrics.jsonl, and in
    tensorboard or wandb if asked for. Only rank 0 speaks. What cannot be written costs a warning,
    never the run.
    """

    def __init__(self, settings, speaks):
        self.settings, self.speaks = settings, speaks
        self.live = speaks and sys.stdout.isatty()
        self.on_live_line = self.warned = False
        self.file = self.board = self.wandb = None
        for name in ("tensorboard", "wandb"):
            spec = find_spec(name)                # without origin it is a folder of that name
            if speaks and getattr(settings, name) and not (spec and spec.origin):
                raise ValueError(f"{name} = True, but it is not installed: pip install {name}, or "
                                 "leave the setting out")

    def start(self, run):
        """The first line."""
        self.begin(run)
        model, settings, ranks = run.model, run.settings, run.ranks
        processes = (f", {ranks.world_size} processes, experts over {ranks.expert_ranks}, "
                     f"context over {ranks.context_ranks}" if ranks.world_size > 1 else "")
        self.say(f"{model.num_params():,} parameters, {model.num_active_params():,} active; "
                 f"{run.data.told(settings)}; {run.device}, {str(run.dtype)[6:]}"
                 f"{processes}; {run.out_dir}")
        if self.speaks and settings.wandb:
            import wandb
            self.wandb = wandb.init(project="nanoK3", name=run.out_dir.name,
                                    config=asdict(settings))

    def begin(self, run):
        """What is counted from one line to the next."""
        self.last_step, self.last_seconds = run.step, run.seconds
        self.violation, self.dead, self.load = 0.0, 0, {}

    def open(self, out_dir, step):
        """metrics.jsonl, after `step` updates: of an earlier file the lines up to there stay."""
        if not self.speaks:
            return
        try:
            self.file = checkpoint.open_metrics(out_dir, step)
        except OSError as error:
            self.warn(error)
        if self.settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(str(out_dir))

    def count(self, figures):
        """The routers' figures of a step, from model.update_router_bias."""
        for layer in figures:
            self.violation = max(self.violation, layer["max_violation"])
            self.dead = max(self.dead, layer["dead"])
            self.load[layer["layer"]] = self.load.get(layer["layer"], 0) + layer["load"]

    def training(self, run, loss, lr, norm, mtp_loss):
        """The line for the steps since the last line. loss, lr, … are those of this step."""
        settings, step = run.settings, run.step
        tokens = tokens_per_step(settings) * (step - self.last_step)
        speed = tokens / (run.seconds - self.last_seconds)
        minutes = run.seconds / step * (settings.steps - step) / 60
        figures = dict(step=step, loss=loss, lr=lr, grad_norm=norm, tokens_per_s=speed,
                       seconds=run.seconds, max_violation=self.violation, dead_experts=self.dead)
        ahead = ""
        if run.model.mtp:
            figures["mtp_loss"], ahead = mtp_loss, f"  MTP {mtp_loss:.4f}"
        text = f"step {step:>6}/{settings.steps}  loss {loss:.4f}{ahead}  {speed:>8,.0f} tokens/s"
        if run.peak:
            context, _ = current_context(settings, step - 1)
            flops = speed * run.model.flops_per_token(context)
            figures["mfu"] = flops / run.peak / run.ranks.world_size
            text += f"  MFU {figures['mfu']:.1%}"
        text += f"  {minutes:>5.1f} min left  max violation {self.violation:.2f}"
        if self.dead:
            text += f"  {self.dead} dead experts"
        shares = {i: (load / load.float().mean()).tolist() for i, load in self.load.items()}
        figures["load"] = {i: [round(share, 3) for share in layer] for i, layer in shares.items()}
        self.write(text, figures, live=self.live)
        self.begin(run)

    def evaluation(self, run, losses):
        """losses: {"train": [nats per token, MTP's], "val": …}."""
        meta, figures = run.data.meta, dict(step=run.step, seconds=run.seconds)
        for split, (loss, mtp_loss) in losses.items():
            targets = meta[f"{split}_tokens"] - meta.get(f"{split}_pads", 0)
            bits = loss / math.log(2) * targets / meta[f"{split}_bytes"]
            figures |= {f"{split}_loss": loss, f"{split}_bits_per_byte": bits}
            figures |= {f"{split}_mtp_loss": mtp_loss} if run.model.mtp else {}
        ahead = f"; MTP {figures['val_mtp_loss']:.4f}" if run.model.mtp else ""
        train, val = figures["train_loss"], figures["val_loss"]
        self.write(f"step {run.step:>6}  train {train:.4f}  val {val:.4f} nats per token  = "
                   f"{figures['val_bits_per_byte']:.4f} bits per byte{ahead}  "
                   f"({run.seconds:.0f} s)", figures)

    def write(self, text, figures, live=False):
        """A line on the screen, and its figures for the files."""
        self.say(text, live)
        numbers = {name: value for name, value in figures.items() if name not in ("step", "load")}
        try:
            if self.file:
                self.file.write(json.dumps(figures) + "\n")
            if self.board:
                for name, value in numbers.items():
                    self.board.add_scalar(name, value, figures["step"])
            if self.wandb:
                self.wandb.log(numbers, step=figures["step"])
        except Exception as error:                # a full disk, or what the boards come up with
            self.warn(error)

    def say(self, text, live=False):
        """A line on the screen; with live, the next one takes its place."""
        if not self.speaks:
            return
        if live:                  # over all of the earlier line, and no longer than the terminal
            width = shutil.get_terminal_size().columns - 1
            text = "\r" + re.sub(" {3,}", "  ", text)[:width].ljust(width)
        elif self.on_live_line:
            text = "\n" + text
        self.on_live_line = live
        try:
            print(text, end="" if live else "\n", flush=True)
        except OSError as error:
            cli.discard_output()
            self.warn(error)

    def warn(self, error):
        """Once: that lines are lost."""
        if not self.warned:
            self.warned = True
            with contextlib.suppress(OSError):
                print("\n" * self.on_live_line + "warning: a line of the log cannot be written "
                      f"({cli.first_line(error)}); the run goes on without", file=sys.stderr)

    def close(self):
        """The files; what is said from now on only goes to the screen."""
        if self.on_live_line:
            self.on_live_line = False
            self.say("")
        with contextlib.suppress(OSError):
            for sink in filter(None, (self.file, self.board)):
                sink.close()
        if self.wandb:
            self.wandb.finish()
        self.file = self.board = self.wandb = None


# ------------------------------------------------------------------------------------------------
# settings

# What a resumed run may change; anything else would make it another run.
FREE = {"out_dir", "steps", "log_every", "eval_every", "eval_batches", "tensorboard", "wandb",
        "device", "dtype", "compile", "checkpoint_layers", "resume", "expert_parallel",
        "balance_ranks", "context_parallel", "timeout"}
TYPES = {f.name: f.type for f in (*fields(Settings), *fields(K3Config))}


def read_arguments(arguments):
    """Words of a command line → {name: value} of settings, and the name of the config file."""
    given, stem = cli.read_settings(arguments, TYPES, ("situ_beta", "situ_linear_beta"))
    for name in given.keys() & {"out_dir", "init_from"}:
        given[name] = os.path.expanduser(given[name])     # few shells do so after an equals sign
    return given, stem


def resumed_settings(given, saved, out_dir, types=TYPES):
    """The settings of a run that goes on: its own, but for those that it may change."""
    own = {**saved["settings"], **saved["config"]}
    odd = (own.keys() - types.keys()) | ({"random", "seconds"} - saved.keys())
    if odd:
        raise ValueError(f"the checkpoint in {out_dir} is of another version of nanoK3, which "
                         f"differs in {', '.join(sorted(odd))}; use the version that wrote it")
    for name, value in given.items():
        if name not in FREE and own.get(name) != value:
            raise ValueError(f"{name} = {value!r}, but the run in {out_dir} has {own.get(name)!r}; "
                             "leave it out to resume, or start a new run")
    return own | {name: value for name, value in given.items() if name in FREE}


def make_settings(given, enc):
    """→ Settings, K3Config, checked. The vocabulary is the tokenizer's; a larger one pads it."""
    names = {f.name for f in fields(Settings)}
    s = Settings(**{name: value for name, value in given.items() if name in names})
    sizes = {name: value for name, value in given.items() if name not in names}
    media, pad = tokenizer.media_ids(enc), {}
    if sizes.get("vit_layers") and "media_pad" not in sizes:
        if not media:
            raise ValueError(f"vit_layers = {sizes['vit_layers']}: the tokenizer of "
                             f"data/{s.data} has no tokens for images; prepare data with "
                             "images, or leave vit_layers out")
        pad = {"media_pad": media[-1]}
    config = K3Config(**{"vocab_size": enc.n_vocab, **pad, **sizes})
    if config.vocab_size < enc.n_vocab:
        raise ValueError(f"vocab_size = {config.vocab_size}: the tokenizer of data/{s.data} has "
                         f"{enc.n_vocab} tokens; leave vocab_size out, or give as many")
    check(s)
    return s, config


def check(s, also=()):
    """also: more (name, whether its value fits, what was expected). Errors: ValueError."""
    counts = ("batch_size", "context", "grad_accum", "steps", "log_every", "eval_every",
              "eval_batches", "timeout")
    for name, fits, expected in [
            *((name, getattr(s, name) >= 1, "at least 1") for name in counts),
            ("seed", 0 <= s.seed < 2 ** 64, "0 ≤ seed < 2**64"),
            ("lr", s.lr > 0, "lr > 0"),
            ("min_lr", 0 <= s.min_lr <= 1, "0 ≤ min_lr ≤ 1"),
            ("weight_decay", s.weight_decay >= 0, "weight_decay ≥ 0"),
            ("grad_clip", s.grad_clip >= 0, "grad_clip ≥ 0"),
            ("schedule", s.schedule in ("cosine", "wsd"), "cosine or wsd"),
            ("optimizer", s.optimizer in ("muon", "whole", "adamw"), "muon, whole or adamw"),
            ("context_stages", stages_fit(s),
             "(part of the run, context) pairs that start at 0 and ascend, each context dividing "
             f"batch_size · context = {s.batch_size * s.context}, the last one being {s.context}"),
            *also]:
        if not fits:
            raise ValueError(f"{name} = {getattr(s, name)!r}: expected {expected}")


def stages_fit(settings):
    stages, tokens = settings.context_stages, settings.batch_size * settings.context
    for stage in stages:
        types = [type(x) for x in stage] if type(stage) is tuple else []
        if types not in ([int, int], [float, int]) or stage[1] < 1 or tokens % stage[1]:
            return False
    begins = [begin for begin, _ in stages]
    return not stages or (begins[0] == 0 and begins[-1] < 1 and begins == sorted(set(begins))
                          and stages[-1][1] == settings.context)


def load_released(folder, given, enc):
    """
    The model of --init_from, in fp32. Its sizes are the folder's. Errors: ValueError, if a setting
    says otherwise or if the data were prepared with another tokenizer.
    """
    config = K3Config.from_released(folder)
    own, asked = asdict(config), dict(given)
    free = ["qat", "balance", "router_bias_ema", "mtp_weight"]
    free += [] if config.mtp_layers else ["mtp_layers"]         # that layer may start fresh
    training = {name: asked.pop(name) for name in free if name in asked}
    layers = {name: given[name] for name in ("mla_every", "full_attn_layers") if name in given}
    if layers:                    # two ways to say which layers are MLA: compared by what they mean
        mla = lambda config: [i + 1 for i in range(config.n_layer) if config.is_mla(i)]
        same = replace(config, **{"full_attn_layers": (), **layers})
        own |= dict.fromkeys(layers, mla(config))
        asked |= dict.fromkeys(layers, mla(same))
    for name, value in asked.items():
        if name in own and value != own[name]:
            raise ValueError(f"{name} = {given[name]!r}, but the weights in {folder} have "
                             f"{own[name]!r}; leave it out")
    model = K3.from_pretrained(folder, torch.float32, **training)
    prepared, released = (tokenizer.to_dict(x) for x in (enc, model.tokenizer or enc))
    if any(prepared[key] != released[key] for key in ("pattern", "ranks", "special")):
        raise ValueError(f"the data were prepared with tokenizer {enc.name}, not with that of "
                         f"{folder}; prepare them with --tokenizer={folder}/tiktoken.model")
    return model


# ------------------------------------------------------------------------------------------------
# the machine

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12,
              "3090": 71e12}      # bf16, dense


def set_up_machine(settings):
    """→ device, dtype, peak FLOP/s or None."""
    device = cli.find_device(settings.device)
    if settings.dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype = {settings.dtype!r}: expected auto, float32 or bfloat16")
    dtype, peak = settings.dtype, None
    if device == "cuda":
        if dtype == "auto" and torch.cuda.is_bf16_supported(including_emulation=False):
            dtype = "bfloat16"
        gpu = torch.cuda.get_device_name()
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), None)
    elif device == "cpu":
        keep_memory()
    return device, torch.bfloat16 if dtype == "bfloat16" else torch.float32, peak


def keep_memory():
    """
    On Linux: let malloc keep what is freed. Otherwise every large tensor of every step comes as
    fresh pages, 5 to 10% of a CPU run.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)                 # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)           # M_TRIM_THRESHOLD


def main(arguments, learn=train):
    ranks = Ranks()
    try:
        learn(arguments, ranks)
    except (ValueError, OSError, FloatingPointError, RuntimeError, MemoryError) as error:
        message = what_to_change(error)
        if not message and isinstance(error, RuntimeError) and ranks.world_size == 1:
            raise
        sys.exit(ranks.last_words(message or error))
    except KeyboardInterrupt:                     # in the loop, Ctrl-C saves first
        sys.exit("stopped before the first step")


def what_to_change(error):
    """One line for a failure of the machine that a setting can avoid, else None."""
    reason = cli.first_line(error)
    if cli.is_out_of_memory(error):
        return (f"out of memory ({reason}); a smaller --batch_size with a larger --grad_accum, or "
                "a shorter --context, needs less")
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return (f"torch.compile failed ({reason}); it needs a C++ compiler, and triton on a GPU: "
                "install what is missing, or leave --compile out")


if __name__ == "__main__":
    cli.run(main, __doc__.strip() + cli.describe(Settings, K3Config))
