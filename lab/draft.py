"""
What the MTP layer's drafts bring, after config/draft.py.

    python -m lab.draft tune [out/draft]     fine-tune the layer twice, with L_LK and with KL, from
                                             the same checkpoint on the same batches
    python -m lab.draft passing [out/draft]  how often a draft passes, by step: as pre-trained and
                                             after both
    python -m lab.draft speed [out/draft]    tokens a round and tokens a second against decoding
                                             without drafts, in turn, for 1 to 5 drafts

python -m lab.bench draft does all three. What is finished is kept beside the run's checkpoints, in
tuned_*.pt and draft.jsonl, so that a stopped bench goes on from there. What the layer costs or
brings the model in training: python -m lab.study ablate --only=k3,mtp
"""
import functools
import sys
from pathlib import Path

import numpy as np
import torch

import cli
import mtp
import train
from checkpoint import load_checkpoint, load_model
from lab.study import append_line, now, read_lines
from ops import fp32

UPDATES, RATE, BATCH, CONTEXT = 200, 1e-3, 4, 128


def kl(logits, p):
    """KL(p ‖ q), what a draft is usually trained with: logits (…, vocab) of q, p the same → (…)."""
    return (p * (p.clamp(min=1e-9).log() - fp32(logits).log_softmax(-1))).sum(-1)


LOSSES = dict(LK=mtp.LK.apply, KL=kl)
DRAFTS = dict(pretrained="as pre-trained", KL="fine-tuned with KL", LK="fine-tuned with L_LK")


def data_of(folder):
    return train.Data(load_checkpoint(folder)["settings"]["data"])


def tuned(folder, name):
    """The run's model with the layer of that name, made now if it is not there yet."""
    model, _ = load_model(folder, "cpu")
    if name == "pretrained":
        return model
    path = Path(folder) / f"tuned_{name}.pt"
    if not path.exists():
        tokens, began = data_of(folder).tokens("train"), now()
        batches = [functools.partial(lambda key: train.get_batch(tokens, BATCH, CONTEXT, key)[0],
                                     (1, step)) for step in range(UPDATES)]

        def log(step, losses):
            if step % 50 == 0:
                print(f"  {name}, update {step}: {sum(losses) / len(losses):.4f}, "
                      f"{now() - began:.0f} s", file=sys.stderr, flush=True)
        mtp.fine_tune(model, batches, RATE, LOSSES[name], log)
        torch.save(model.mtp.state_dict(), path)
    mtp.add_features(model)
    model.mtp.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def tune(folder="out/draft"):
    for name in LOSSES:
        tuned(folder, name)


def once(folder, part, make):
    """The figures of a part, a list: kept in draft.jsonl, or made now."""
    path = Path(folder) / "draft.jsonl"
    for line in read_lines(path):
        if line["part"] == part:
            return line["figures"]
    figures = make()
    append_line(path, dict(part=part, figures=figures))
    return figures


# --------------------------------------------------------------------------------------------------
# How often a draft passes

@torch.no_grad()
def passing(folder="out/draft", windows=64, context=128):
    """
    Σ min(p, q) on the validation text, at temperature 1: the probability that the draft of a step
    passes, where the text before it is real.
    """
    tokens = data_of(folder).tokens("val")
    starts = np.linspace(0, len(tokens) - context - 1, windows).astype(np.int64)
    print("how often a draft passes at temperature 1 on validation text, steps 1 to 7; its mean, ± "
          "the standard error over windows")

    def make(name):
        model, each = tuned(folder, name), []
        for some in np.array_split(starts, windows // 8):
            idx, _ = train.get_windows(tokens, some, context)
            losses = mtp.unrolled(model, idx)
            each.append(torch.stack([(-x).exp().mean(1) for x in losses], dim=1))  # (8, 7)
        each = torch.cat(each)
        error = each.mean(1).std() / windows ** 0.5
        return [*each.mean(0).tolist(), error.item()]
    for name, words in DRAFTS.items():
        *steps, error = once(folder, f"passing {name}", lambda name=name: make(name))
        print(f"  {words:21}  " + "  ".join(f"{x:.3f}" for x in steps) +
              f"    {sum(steps) / len(steps):.3f} ± {error:.3f}", flush=True)


# --------------------------------------------------------------------------------------------------
# What that brings in decoding

def speed(folder="out/draft", prompts=8, length=64, count=64):
    """
    For each prompt from the validation text: without drafts, then with 1, 2, … in turn. Seconds are
    the processor's where one thread works (OMP_NUM_THREADS=1), all of a draft's included.
    """
    text = data_of(folder).tokens("val")
    print(f"{prompts} prompts of {length} tokens, {count} new ones each, {torch.get_num_threads()} "
          "threads: tokens a round; tokens a second by those without drafts, in turn, and the "
          "least and the most of a prompt")
    for temperature in (0.0, 1.0):
        for name, gammas in (("LK", (1, 2, 3, 4, 5)), ("KL", (3,)), ("pretrained", (3,))):
            part = f"speed {name} {temperature}"
            figures = once(folder, part, lambda: decode(
                tuned(folder, name), text, temperature, gammas, prompts, length, count))
            for gamma, per_round, ratio, least, most, plain in figures:
                how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
                print(f"  {how:13}  {DRAFTS[name]:21} {gamma} drafts: {per_round:.2f} a round, "
                      f"{ratio:.2f} times ({least:.2f} … {most:.2f}) {plain:.0f} tokens/s",
                      flush=True)


def decode(model, text, temperature, gammas, prompts, length, count):
    """→ for each γ: it, tokens a round, the ratio of speeds, its least and most, plain tokens/s."""
    seconds = {gamma: [] for gamma in (None, *gammas)}
    rounds = {gamma: [0, 0] for gamma in gammas}
    for start in np.linspace(0, len(text) - length - 1, prompts).astype(np.int64):
        idx = torch.from_numpy(text[start:start + length].astype(np.int64)).unsqueeze(0)
        for gamma in seconds:
            torch.manual_seed(1)
            model.mtp.rounds = model.mtp.kept = 0
            tokens = model.generate(idx, count, temperature, draft=gamma, stream=True)
            next(tokens)                                   # the prompt is read once, by each
            began = now()
            for _ in tokens:
                pass
            seconds[gamma].append(now() - began)
            if gamma:
                rounds[gamma][0] += model.mtp.kept
                rounds[gamma][1] += model.mtp.rounds
    figures = []
    for gamma in gammas:
        ratios = [a / b for a, b in zip(seconds[None], seconds[gamma])]
        kept, of = rounds[gamma]
        figures.append([gamma, kept / of, sum(seconds[None]) / sum(seconds[gamma]), min(ratios),
                        max(ratios), prompts * (count - 1) / sum(seconds[None])])
    return figures


TASKS = dict(tune=tune, passing=passing, speed=speed)


def main(arguments):
    name, *rest = arguments or [""]
    if name not in TASKS:
        raise ValueError(f"no task {name!r}; there are: {', '.join(TASKS)}")
    TASKS[name](*rest)


def bench(arguments):
    """All of it, for lab.bench."""
    for task in TASKS.values():
        task(*arguments)


if __name__ == "__main__":
    cli.run(main, __doc__)
