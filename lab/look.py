"""
Look inside a trained run: pictures of what the parts of K3 have learned to do, and a line on what to see in each.

    python look.py out/shakespeare               a run's newest checkpoint, or one checkpoint file, and its metrics.jsonl
    python look.py out/a out/b                   several runs: their loss curves beside each other, over tokens and over time
    --to=FOLDER        where the pictures go; otherwise `pictures` in the first run's folder
    --text             in the terminal, even where matplotlib is installed
    --kinds=A,B,…      text files, each a kind of document, for the experts' load; otherwise the longest documents of the run's data

    mixtures      §2.2    which sources each layer part reads
    decay         §2.1.1  how long KDA remembers: half-life in tokens, by head and channel
    load          §2.3.3  tokens of each expert in the course of training
    kinds         §2.3    the same by kind of document
    bias          §2.3.3  the router's bias
    activations   §2.3    gate and up branch beside SiTU's bounds
    loss                  over tokens and over time

PNG by matplotlib if it is installed, otherwise text. What a run does not have (no MoE layer, an old metrics.jsonl) is left out with a word.
"""
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import moe
from attnres import Mix
from data import prepare, tokenizer
from kda import KDA
from ops import fp32
from sample import load_model
from train import load_checkpoint


# ----------------------------------------------------------------------------------------------------------------------
# Drawing: three forms, each as PNG or as text. `plt` None stands for text

SHADES = " ·:-=+*#%@"


def draw_map(plt, to, name, rows, columns, values, title, unit, shades=None):
    """values (rows, columns), NaN where there is none. rows: a word each; columns: what they are. shades: what is light and what is dark."""
    low, high = shades or (np.nanmin(values), np.nanmax(values))
    if plt is None:
        cells = values if values.shape[1] <= 96 else np.stack([part.mean(1) for part in np.array_split(values, 96, axis=1)], 1)   # a screen's width
        wide, left = max(1, min(4, 72 // cells.shape[1])), max(map(len, rows))
        for row, line in zip(rows, cells):
            shade = lambda v: " " if math.isnan(v) else SHADES[int(np.clip((v - low) / (high - low or 1), 0, 1) * (len(SHADES) - 1))]
            print(f"  {row:>{left}s} │{''.join(shade(v) * wide for v in line)}│")
        print(f"  {'':{left}s}  {columns}; '{SHADES[0]}' is {low:.3g}, '{SHADES[-1]}' {high:.3g} {unit}")
        return
    high_row = 0.24 if len(rows) <= 24 else 0.11
    figure, axis = plt.subplots(figsize=(7, 1.2 + high_row * len(rows)), layout="constrained")
    picture = axis.imshow(values, aspect="auto", interpolation="nearest", vmin=low, vmax=high, cmap="viridis",
                          extent=(0.5, values.shape[1] + 0.5, len(rows) - 0.5, -0.5))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_yticks(range(len(rows)), rows, fontsize=28 * high_row)
    axis.set_xlabel(columns)
    axis.set_title(title, fontsize=9)
    figure.colorbar(picture, label=unit)
    save(plt, figure, to, name)


def draw_bars(plt, to, name, panels, title):
    """panels: (word, edges (n + 1), shares (n), bounds to mark) each a histogram; shares are drawn by their logarithm."""
    if plt is None:
        for word, edges, shares, bounds in panels:
            print(f"  {word}; bound{'s' if len(bounds) > 1 else ''} at {', '.join(f'{b:g}' for b in bounds) or 'none'}")
            for low, high, share in zip(edges, edges[1:], shares):
                mark = "".join(" ◄ bound" for b in bounds if low <= b < high)
                if share or mark:
                    print(f"    {low:8.2f} … {high:8.2f} │{'█' * max(0, round(8 * (6 + math.log10(max(share, 1e-6)))))} {share:.1e}{mark}")
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(3 * len(panels), 2.6), layout="constrained", squeeze=False)
    for axis, (word, edges, shares, bounds) in zip(axes[0], panels):
        axis.stairs(np.maximum(shares, 1e-9), edges, fill=True)
        axis.set_yscale("log")
        axis.set_ylim(1e-6, 1)
        for b in bounds:
            axis.axvline(b, color="crimson", lw=1)
        axis.set_title(word, fontsize=8)
    figure.suptitle(title, fontsize=9)
    save(plt, figure, to, name)


def draw_curves(plt, to, name, panels, title):
    """panels: (what the x axis is, {run: (x, y)})."""
    if plt is None:
        for across, curves in panels:
            every = [np.array(c, float) for c in curves.values()]
            (x0, y0), (x1, y1) = np.min([c.min(1) for c in every], 0), np.max([c.max(1) for c in every], 0)
            grid = [[" "] * 72 for _ in range(16)]
            for letter, c in zip("abcdefghijklmnopqrstuvwxyz", every):
                for x, y in zip(*c):
                    grid[15 - round(15 * (y - y0) / (y1 - y0 or 1))][round(71 * (x - x0) / (x1 - x0 or 1))] = letter
            for i, line in enumerate(grid):
                print(f"  {y1 - (y1 - y0) * i / 15:8.3f} │{''.join(line)}")
            names = ", ".join(f"{letter}: {run}" for letter, run in zip("abcdefghijklmnopqrstuvwxyz", curves))
            print(f"  {'':8s} └{'─' * 72}\n  {'':10s}{x0:,.0f} to {x1:,.0f} {across}; {names}")
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 2.8), layout="constrained", sharey=True, squeeze=False)
    for axis, (across, curves) in zip(axes[0], panels):
        for run, (x, y) in curves.items():
            axis.plot(x, y, label=run, lw=1, marker="." if len(x) < 20 else None)
        axis.set_xlabel(across)
    axes[0, 0].set_ylabel("bits per byte")
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    save(plt, figure, to, name)


def save(plt, figure, to, name):
    to.mkdir(parents=True, exist_ok=True)
    figure.savefig(to / f"{name}.png", dpi=90)
    plt.close(figure)


# ----------------------------------------------------------------------------------------------------------------------
# Reading: one forward pass over some text, with an eye on every part

@torch.no_grad()
def observe(model, ids):
    """
    ids (B, T) → dict: mixtures [(layer part, mean weight of each source)], decays {layer: half-life (H, K)}, loads {layer: tokens (E)},
    gate, up, product: what goes into and comes out of SiTU, one long vector each.
    """
    seen = dict(mixtures=[], decays={}, loads={}, gate=[], up=[], product=[])
    hooks = []

    def mixture(name):
        def hook(mix, arguments):
            x = fp32(torch.stack(arguments[0]))                            # (S, B, T, d)
            logits = F.rms_norm(x, x.shape[-1:], eps=mix.norm.eps) @ fp32(mix.w * mix.norm.weight)                   # (S, B, T)
            seen["mixtures"].append((name, logits.softmax(0).mean((1, 2)).cpu().numpy()))
        return hook

    def decay(i):
        def hook(layer, arguments):
            g = layer.log_decay(arguments[0])                              # (B, T, H, K)
            seen["decays"][i] = (math.log(2) / -g.mean((0, 1)).clamp(max=-1e-9)).cpu().numpy()
        return hook

    def watched_route(i, layer):
        def route(*arguments):
            chosen, p = type(layer).route(layer, *arguments)
            seen["loads"][i] = seen["loads"].get(i, 0) + torch.bincount(chosen.flatten(), minlength=layer.E).cpu().numpy()
            return chosen, p
        return route

    def watched_situ(g, u, *limits):
        out = situ(g, u, *limits)
        for name, x in dict(gate=g, up=u, product=out).items():
            seen[name].append(fp32(x).flatten().cpu().numpy())
        return out
    for i, layer in enumerate(model.layers):
        for name in ("attn", "mlp"):
            mix = getattr(layer, f"{name}_mix")
            hooks += [mix.register_forward_pre_hook(mixture(f"layer {i + 1} {name}"))] if mix else []
        if isinstance(layer.attn, KDA):
            hooks.append(layer.attn.register_forward_pre_hook(decay(i + 1)))
        if isinstance(layer.mlp, moe.LatentMoE):
            layer.mlp.route = watched_route(i + 1, layer.mlp)
    hooks += [model.out_mix.register_forward_pre_hook(mixture("output"))] if model.out_mix else []
    situ, moe.situ = moe.situ, watched_situ
    try:
        model(ids)
    finally:
        moe.situ = situ
        for hook in hooks:
            hook.remove()
        for layer in model.layers:
            layer.mlp.__dict__.pop("route", None)
    return seen


def read_metrics(run):
    """metrics.jsonl → its lines, without those that were cut short."""
    path = Path(run) if Path(run).is_dir() else Path(run).parent
    if not (path / "metrics.jsonl").is_file():
        raise ValueError(f"no metrics.jsonl in {path}: expected a run's folder as train.py writes it")
    lines = []
    for text in (path / "metrics.jsonl").read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        lines += [line] if isinstance(line, dict) and "step" in line else []
    if not any("loss" in line for line in lines):
        raise ValueError(f"{path}/metrics.jsonl has no line of training; let the run go on for some steps")
    return lines


def texts(checkpoint, enc, kinds):
    """→ {kind: ids (n)}: the files of --kinds, else the longest documents of the run's data, else parts of it; {} if the data are gone."""
    if kinds:
        try:
            return {Path(file).name: tokenizer.encode(enc, Path(file).read_text(encoding="utf-8")) for file in kinds.split(",")}
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--kinds: {error}; expected text files in UTF-8, separated by commas") from None
    try:
        folder = prepare.HERE / checkpoint["settings"]["data"]
        meta, _ = prepare.load_meta(folder)
        if meta["sha256"] != checkpoint["data"]["sha256"]:
            raise ValueError("other data")
        ids = np.concatenate([prepare.open_tokens(folder, split, meta) for split in ("train", "val")])
    except (ValueError, OSError):
        return {}
    ends = np.flatnonzero(ids == tokenizer.end_of_text(enc))
    documents = [d for d in np.split(ids, ends + 1) if len(d) > 256]
    if len(documents) < 2:
        return {f"part {i + 1} of 8": part for i, part in enumerate(np.array_split(ids, 8))}
    longest = sorted(documents, key=len)[-10:]
    words = lambda d: " ".join(enc.decode(d[:40].tolist()).split())
    return {words(d)[:28]: d for d in longest}


def windows(ids, count, context):
    """count stretches of ids, evenly spread → (count, context) int64."""
    context = min(context, len(ids))
    starts = np.linspace(0, len(ids) - context, min(count, max(1, len(ids) // context))).astype(int)
    return torch.from_numpy(np.stack([ids[i:i + context].astype(np.int64) for i in starts]))


# ----------------------------------------------------------------------------------------------------------------------
# The pictures: each draws, and returns what to see in one line

def mixtures(draw, seen, *_):
    parts = seen["mixtures"]
    if not parts:
        return "left out: this model has no AttnRes mixtures"
    most = max(len(p) for _, p in parts)
    table = np.full((len(parts), most), np.nan)
    for row, (_, p) in zip(table, parts):
        row[:len(p)] = p
    draw(draw_map, [name for name, _ in parts], "source: 1 is the embedding, then finished blocks, the last of a row the running sum", table,
         "AttnRes: share of each source in what a layer part reads", "share", (0, 1))
    name, p = max(parts, key=lambda part: part[1].max() - 1 / len(part[1]))
    even = [name for name, p in parts if p.max() < 1.2 / len(p)]
    embedding = np.mean([p[0] for _, p in parts])
    return (f"a plain sum would be equal shares in each row; {name} is farthest from it, {p.max():.0%} from source {p.argmax() + 1} of {len(p)}; "
            f"the embedding has {embedding:.0%} on average; {len(even)} of {len(parts)} are still near a plain mean")


def decay(draw, seen, *_):
    if not seen["decays"]:
        return "left out: this model has no KDA layer"
    rows = [(f"layer {i} head {h + 1}", np.sort(head)[::-1]) for i, heads in seen["decays"].items() for h, head in enumerate(heads)]
    lives = np.concatenate([head for _, head in rows])
    longest, shortest = (pick(rows, key=lambda row: np.median(row[1])) for pick in (max, min))
    draw(draw_map, [name for name, _ in rows], "channels of the key, longest memory first", np.log10(np.stack([head for _, head in rows])),
         "KDA: half-life of what a channel remembers", "log10 of the half-life in tokens")
    return (f"half-lives from {lives.min():.2g} to {lives.max():.3g} tokens, half of the channels under {np.median(lives):.2g}; heads share out the "
            f"work: {longest[0]} remembers longest (median {np.median(longest[1]):.2g}), {shortest[0]} shortest ({np.median(shortest[1]):.2g})")


def load(draw, seen, metrics, *_):
    lines = [line for line in metrics if line.get("load")]
    if not seen["loads"] or not lines:
        return "left out: " + ("metrics.jsonl has no `load`; train.py writes it now" if seen["loads"] else "this model has no MoE layer")
    rows = [(f"layer {int(i) + 1} expert {e + 1}", [line["load"][i][e] for line in lines])
            for i in lines[0]["load"] for e in range(len(lines[0]["load"][i]))]
    if len(rows) > 64:
        rows = [rows[i] for i in np.linspace(0, len(rows) - 1, 64).astype(int)]
    table = np.array([row for _, row in rows])
    draw(draw_map, [name for name, _ in rows], f"training, step {lines[0]['step']} to {lines[-1]['step']}", table,
         "Tokens of each expert over its fair share", "of the fair share", (0, 2))
    early, late = table[:, :max(1, len(lines) // 10)], table[:, -max(1, len(lines) // 4):]
    return (f"1 is a fair share: experts lie between {early.min():.2f} and {early.max():.2f} at the start and between {late.min():.2f} and "
            f"{late.max():.2f} in the last quarter, dead ones {(late.mean(1) == 0).sum()}")


def kinds(draw, seen, metrics, model, documents, context):
    if not seen["loads"] or not documents:
        return "left out: " + ("the run's data are gone; give --kinds=FILE,FILE" if seen["loads"] else "this model has no MoE layer")
    loads = {kind: observe(model, windows(ids, 8, context))["loads"] for kind, ids in documents.items()}
    layer = list(seen["loads"])[-1]
    table = np.stack([by_layer[layer] / by_layer[layer].mean() for by_layer in loads.values()])
    draw(draw_map, list(loads), f"expert of layer {layer}", table, "Load of each expert by kind of document", "of the fair share",
         (0, max(2, table.max())))
    apart = table.max(0) / np.maximum(table.min(0), 1e-9)
    kind, expert = np.unravel_index((table / np.maximum(table.mean(0), 1e-9)).argmax(), table.shape)
    return (f"a column of one shade is an expert that does not care; expert {expert + 1} cares most for “{list(loads)[kind]}” "
            f"({table[kind, expert]:.1f} of the fair share, {table[:, expert].mean():.1f} on average); {(apart > 1.5).sum()} of {len(apart)} differ by "
            "more than half between kinds")


def bias(draw, seen, metrics, model, *_):
    biases = {f"layer {i + 1}": layer.mlp.router_bias.cpu().numpy() for i, layer in enumerate(model.layers) if isinstance(layer.mlp, moe.LatentMoE)}
    if not biases:
        return "left out: this model has no MoE layer"
    table = np.stack([np.sort(b) for b in biases.values()])
    most = max(np.abs(table).max(), 1e-3)
    draw(draw_map, list(biases), "experts, lowest bias first", table, "Router bias, beside scores between 0 and 1", "bias", (-most, most))
    return (f"a high bias pulls tokens to an expert that the router would pass over: {table.min():+.3f} to {table.max():+.3f}, beside scores between "
            f"0 and 1; spread {table.std():.3f}")


def activations(draw, seen, metrics, model, *_):
    c, panels, words = model.config, [], []
    limits = dict(gate=c.situ_beta, up=c.situ_linear_beta, product=c.situ_beta and c.situ_linear_beta and c.situ_beta * c.situ_linear_beta)
    for name, bound in limits.items():
        x = np.concatenate(seen[name])
        most = max(np.abs(x).max(), bound or 0, 1e-6) * 1.05
        counts, edges = np.histogram(x, bins=41, range=(-most, most))
        word = dict(gate="gate W_g x", up="up W_u x", product="SiTU's product")[name]
        panels.append((word, edges, counts / len(x), [-bound, bound] if bound else []))
        beyond = f" (bound {bound:g}, {(np.abs(x) > bound).mean():.2%} beyond it)" if bound else ""
        words.append(f"|{name}| up to {np.abs(x).max():.2g}{beyond}")
    draw(draw_bars, panels, "Shares of values, beside SiTU's bounds")
    return "; ".join(words) + "; what lies beyond a bound is what SwiGLU would let through and SiTU bends"


def loss(draw, runs):
    """runs: {name: (lines of metrics, settings)}. Validation where a run has it, else training loss in nats."""
    tokens, times, finals = {}, {}, []
    for name, (lines, settings) in runs.items():
        evaluations = [line for line in lines if "val_bits_per_byte" in line]
        scale = evaluations[-1]["val_bits_per_byte"] / evaluations[-1]["val_loss"] if evaluations else 1 / math.log(2)
        training = [line for line in lines if "loss" in line]
        per_step = settings["batch_size"] * settings["context"] * settings["grad_accum"]
        nats = [line["loss"] for line in training]
        if len(training) > 8:
            nats, training = np.convolve(nats, np.ones(3) / 3, "valid"), training[1:-1]                # a little smoother
        tokens[f"{name}, training"] = [line["step"] * per_step for line in training], [n * scale for n in nats]
        times[f"{name}, training"] = [line["seconds"] for line in training], [n * scale for n in nats]
        if evaluations:
            bits = [line["val_bits_per_byte"] for line in evaluations]
            tokens[f"{name}, validation"] = [line["step"] * per_step for line in evaluations], bits
            times[f"{name}, validation"] = [line["seconds"] for line in evaluations], bits
            finals.append((bits[-1], name, evaluations[-1]["step"] * per_step, evaluations[-1]["seconds"]))
    draw(draw_curves, [("tokens", tokens), ("seconds", times)], "Loss over tokens and over time")
    finals.sort()
    ends = "; ".join(f"{name} ends at {bits:.3f} bits per byte after {t:,} tokens, {s:,.0f} s" for bits, name, t, s in finals)
    return "lower is better, and further left is cheaper: " + (ends or "no evaluation yet, only training loss")


PICTURES = (mixtures, decay, load, kinds, bias, activations)


def main(arguments):
    options, runs = dict(to="", kinds=""), []
    text = "--text" in arguments
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            runs.append(argument.rstrip("/"))
        elif name in options and equals:
            options[name] = value
        elif argument != "--text":
            raise ValueError(f"unknown option {argument}; there are --to=FOLDER, --kinds=FILE,FILE and --text")
    if not runs:
        raise ValueError("expected the folder of a run: python look.py out/shakespeare")
    try:
        if text:
            raise ImportError
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        plt = None
        if not text:
            print("matplotlib is not installed, so the pictures are text: pip install matplotlib for PNG")
    first = Path(runs[0]) if Path(runs[0]).is_dir() else Path(runs[0]).parent
    to = Path(options["to"] or first / "pictures")

    def show(name, picture, *arguments):
        drawn = []

        def draw(form, *what):
            drawn.append(form(plt, to, name, *what))
        if plt is None:
            print(f"\n{name}")
        words = picture(draw, *arguments)
        print(f"  {words}" if plt is None else f"{to}/{name}.png: {words}" if drawn else f"{name}: {words}", flush=True)
    checkpoints = {run: load_checkpoint(run) for run in runs}
    metrics = {run: (read_metrics(run), checkpoints[run]["settings"]) for run in runs}
    if len(runs) == 1:
        model, enc = load_model(runs[0], "cpu")
        checkpoint = checkpoints[runs[0]]
        documents, context = texts(checkpoint, enc, options["kinds"]), checkpoint["settings"]["context"]
        if documents:
            ids = torch.cat([windows(d, 1, min(context, *map(len, documents.values()))) for d in documents.values()])
        else:
            print("the run's data are not in data/ any more: the model reads what it writes itself")
            torch.manual_seed(1)
            ids = model.generate(torch.zeros(4, 1, dtype=torch.long), min(context, 128), vocab_size=enc.n_vocab)
        seen = observe(model, ids)
        for picture in PICTURES:
            show(picture.__name__, picture, seen, metrics[runs[0]][0], model, documents, context)
    show("loss", loss, metrics)


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__.strip()))
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
