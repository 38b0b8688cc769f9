"""
The laptop speedrun: seconds of training on two CPU threads until tiny Shakespeare's validation loss
is what nanoGPT reaches on an A100 in three minutes, 1.4697 nats per character.

    python data/prepare.py path/to/tinyshakespeare.txt --name=shakespeare_char --tokenizer=bytes
    python -m lab.speedrun                      config/shakespeare_char.py, three seeds
    python -m lab.speedrun --seeds=1            a quick try
    python -m lab.speedrun config/mine.py --lr=1e-2       another config file, other settings

The rules:

    data         tiny Shakespeare, characters as bytes: the first 90% for training, nothing else
    validation   the last 10%, read whole in windows of 256 characters, nanoGPT's context: every
                 character but the first is predicted once, from those before it in its window
    model        everything that K3 has: KDA and Gated MLA, Block AttnRes, MoE in a latent with its
                 norm, SiTU-GLU's two limits, Quantile Balancing, Per-Head Muon
    seeds        1, 2 and 3, none picked: each is trained until its validation loss is at or below
                 1.4697. The loss is looked at every 20 updates, from half of the steps on
    time         of training, two CPU threads; validation does not count
    the record   a ratio: mean seconds to the bar over the seconds that a yardstick takes, so that
                 machines compare. The yardstick is 50 steps of nanoGPT's CPU model, in the same
                 process, before and after each run. It never changes

Use an idle machine: the yardstick evens out how fast a machine is, not what else it does. Each
finished run is a line of out/speedrun.jsonl, so a stopped speedrun goes on after its last whole
run; lines of other sources or settings do not count. Records: docs/records.md.
"""
import contextlib
import dataclasses
import hashlib
import math
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

import cli
import train
from data import prepare
from lab import study
from lab.study import PlainGPT, Run
from model import K3Config

BAR = 1.4697                                   # nats per character
TEXT = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"      # sha256
RUNS = Path("out/speedrun.jsonl")
LOOK_EVERY = 20                                # updates
SOURCE = hashlib.sha256((study.SOURCE + Path(train.__file__).read_text(encoding="utf-8"))
                        .encode()).hexdigest()[:12]


def main(arguments):
    mine = [argument for argument in arguments if argument.startswith("--seeds")]
    seeds = cli.options(mine, dict(seeds=3))[0]["seeds"]
    if seeds < 1:
        raise ValueError("expected --seeds of at least 1; a record has three")
    given = read_settings([argument for argument in arguments if argument not in mine])
    torch.set_num_threads(2)
    train.keep_memory()
    try:
        lines = [finished(given, seed) or run(given, seed) for seed in range(1, seeds + 1)]
    except KeyboardInterrupt:
        sys.exit("\nstopped; a speedrun goes on after its last finished run")
    report(lines)


# --------------------------------------------------------------------------------------------------
# One run

def run(given, seed):
    """Train with this seed until the bar is reached → a line, which is added to RUNS."""
    before = yardstick()
    steps, seconds, loss = to_the_bar(Run({**given, "seed": seed}), seed)
    after = yardstick()
    if max(before, after) > 1.1 * min(before, after):
        print(f"the yardstick took {before:.2f} s before and {after:.2f} s after this run: is the "
              "machine idle?")
    beside = (before + after) / 2
    line = dict(seed=seed, reached=loss <= BAR, val_loss=loss, steps=steps, seconds=seconds,
                yardstick=[before, after], ratio=seconds / beside, machine=machine(),
                torch=torch.__version__, source=SOURCE, spec=given)
    study.append_line(RUNS, line)
    print(f"seed {seed}: {'' if line['reached'] else 'not '}reached, {loss:.4f} nats per character "
          f"after {steps} updates and {seconds:.1f} s, {line['ratio']:.1f} yardsticks", flush=True)
    return line


def to_the_bar(trained, seed):
    """Train until the bar or the last step → updates, seconds of training, validation loss."""
    seconds, steps = 0.0, trained.settings.steps
    for step in range(1, steps + 1):
        began = time.perf_counter()
        loss, norm, _ = trained.step(step - 1)
        seconds += time.perf_counter() - began
        if not math.isfinite(loss + norm):
            raise ValueError(f"seed {seed}, step {step}: loss {loss}, gradient norm {norm}; "
                             "a lower lr may help")
        if step == steps or step % LOOK_EVERY == 0 and step >= steps / 2:
            loss = validation_loss(trained)
            print(f"seed {seed}, {step} updates, {seconds:.1f} s: {loss:.4f}", flush=True)
            if loss <= BAR:
                break
    return step, seconds, loss


def validation_loss(trained):
    """Nats per character over the whole last 10%, in windows of 256, whatever was trained on."""
    val = prepare.open_tokens(trained.folder, "val", trained.meta)
    whole = dataclasses.replace(trained.settings, context=256, batch_size=16,
                                context_stages=(), eval_batches=len(val))
    return train.evaluate(trained.model, val, whole, trained.device, trained.autocast)


def yardstick(steps=50):
    """Seconds for nanoGPT's CPU setting: 4 layers of 128, 12 × 64 characters a step, AdamW."""
    torch.manual_seed(0)
    model = PlainGPT(K3Config(vocab_size=65, n_layer=4, n_embd=128, n_head=4), 64, hidden=512)
    idx = torch.randint(0, 65, (12, 65))
    optimizer = model.configure_optimizers(1e-3)
    x, y = idx[:, :-1].contiguous(), idx[:, 1:].contiguous()
    for step in range(-5, steps):
        if step == 0:                          # the first five only warm up
            began = time.perf_counter()
        model(x, y)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def machine():
    """The name of this machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def finished(given, seed):
    """The line of that run, if it was made here before by the same sources, or None."""
    key = dict(seed=seed, spec=study.as_stored(given), source=SOURCE, torch=torch.__version__,
               machine=machine())
    for line in study.read_lines(RUNS):
        if key.items() <= line.items():
            return line
    return None


# --------------------------------------------------------------------------------------------------
# All runs

def report(lines):
    """The record, or why there is none, and its row for docs/records.md."""
    missed = [line for line in lines if not line["reached"]]
    if missed:
        losses = ", ".join(f"{line['val_loss']:.4f} with seed {line['seed']}" for line in missed)
        print(f"no record: the bar of {BAR} was not reached, but {losses}")
        return
    ratios, seconds = ([line[name] for line in lines] for name in ("ratio", "seconds"))
    ratio, mean = study.with_spread(ratios, 1), statistics.mean(seconds)
    words = "" if len(lines) >= 3 else "; a record has three seeds"
    print(f"{ratio} yardsticks over seeds 1 to {len(lines)}, {mean:.0f} s of training{words}\n"
          f"| | {ratio} | {mean:.0f} | {lines[0]['machine']}, torch {lines[0]['torch']} | | |")


def read_settings(arguments):
    """Config file and --name=value → a flat dict of settings, checked against the rules."""
    has_file = any(not argument.startswith("-") for argument in arguments)
    given, _ = train.read_arguments(arguments if has_file
                                    else ["config/shakespeare_char.py", *arguments])
    asked, _ = train.read_arguments([a for a in arguments if a.startswith("-")])
    used = study.USED | {"steps"} | K3Config.__dataclass_fields__.keys()
    for name in asked:
        if name not in used or name in ("device", "eval_batches"):
            raise ValueError(f"--{name}: a speedrun does not use that setting")
    given = {name: value for name, value in given.items() if name in used}
    given = {"data": "shakespeare_char", **given, "device": "cpu", "eval_batches": 1}
    folder = prepare.HERE / given["data"]
    meta, enc = prepare.load_meta(folder)
    if meta["sha256"] != TEXT or enc.n_vocab != 257:
        raise ValueError(f"{folder} is not tiny Shakespeare by bytes; python -m lab.speedrun "
                         "--help says how to prepare it")
    settings, config = train.make_settings({"seed": 1, **given}, enc)
    check_model(settings, config)
    return given


def check_model(settings, config):
    """That all of K3 is there. Errors: ValueError."""
    is_mla = [config.is_mla(i) for i in range(config.n_layer)]
    rules = {
        "both KDA and MLA layers": any(is_mla) and not all(is_mla),
        "kda_gate=sigmoid": config.kda_gate == "sigmoid",
        "attn_res=block": config.attn_res == "block",
        "an MoE layer": config.first_k_dense_replace < config.n_layer,
        "experts in a latent, with its norm": config.latent_norm,
        "both limits of SiTU": None not in (config.situ_beta, config.situ_linear_beta),
        "balance=quantile": config.balance == "quantile",
        "optimizer=muon": settings.optimizer == "muon",
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"a speedrun needs all of K3, and this has not {rule}")


if __name__ == "__main__":
    cli.run(main, __doc__)
