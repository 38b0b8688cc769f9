"""
Look inside a trained run: pictures of what the parts of K3 have learned, each with a line on what
to see in it.

    python -m lab.look out/shakespeare      a run's newest checkpoint, or one checkpoint file, and
                                            its metrics.jsonl
    python -m lab.look out/a out/b          several runs: their loss curves together

    --to=FOLDER        where the pictures go; otherwise `pictures` in the run's folder
    --text             in the terminal, even if matplotlib is installed
    --kinds=A,B,…      text files, each a kind of document, for the experts' load; otherwise the
                       longest documents of the run's data

    mixtures      §2.2    which sources each layer part reads
    decay         §2.1.1  how long KDA remembers: half-life in tokens, by head and channel
    load          §2.3.3  tokens of each expert in the course of training
    kinds         §2.3    the same by kind of document
    bias          §2.3.3  the router's bias
    activations   §2.3    gate and up branch beside SiTU's bounds
    loss                  over tokens and over time
    reward, thinking, ratio         of post.py's rl and distill in the place of loss: what answers
                  §4.1    are worth, tokens of thought, and how far from ρ = 1 an update is

PNG by matplotlib if it is installed, otherwise text. A picture that a run has no data for (no MoE
layer, an old metrics.jsonl) is left out, with a word on why.
"""
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import checkpoint
import cli
import moe
from data import prepare, tokenizer
from kda import KDA
from ops import fp32


@torch.no_grad()
def observe(model, ids):
    """
    Read ids (B, T) and note what every part does → dict:
    mixtures [(layer part, mean weight of each source)], decays {layer: half-lives (H, K)},
    loads {layer: tokens (E)}, and gate, up, product: all that enters and leaves SiTU, in chunks.
    """
    seen = dict(mixtures=[], decays={}, loads={}, gate=[], up=[], product=[])
    hooks, situ = [], moe.situ

    def watch(module, note):
        hooks.append(module.register_forward_pre_hook(lambda module, inputs: note(inputs[0])))

    def watch_mixture(name, mix):
        watch(mix, lambda sources: seen["mixtures"].append((name, mean_shares(mix, sources))))

    def watch_decay(number, layer):
        watch(layer, lambda x: seen["decays"].update({number: half_lives(layer, x)}))

    def watched_route(number, layer):
        def route(*arguments):
            chosen, p = type(layer).route(layer, *arguments)
            load = torch.bincount(chosen.flatten(), minlength=layer.E).cpu().numpy()
            seen["loads"][number] = seen["loads"].get(number, 0) + load
            return chosen, p
        return route

    def watched_situ(gate, up, *limits):
        out = situ(gate, up, *limits)
        for name, x in dict(gate=gate, up=up, product=out).items():
            seen[name].append(fp32(x).flatten().cpu().numpy())
        return out

    for number, layer in enumerate(model.layers, 1):
        if layer.attn_mix:
            watch_mixture(f"layer {number} attn", layer.attn_mix)
            watch_mixture(f"layer {number} mlp", layer.mlp_mix)
        if isinstance(layer.attn, KDA):
            watch_decay(number, layer.attn)
        if isinstance(layer.mlp, moe.LatentMoE):
            layer.mlp.route = watched_route(number, layer.mlp)
    if model.out_mix:
        watch_mixture("output", model.out_mix)
    moe.situ = watched_situ
    try:
        model(ids)
    finally:
        moe.situ = situ
        for hook in hooks:
            hook.remove()
        for layer in model.layers:
            layer.mlp.__dict__.pop("route", None)
    return seen


def mean_shares(mix, sources):
    """The mean weight of each of a mixture's sources, (S)."""
    x = fp32(torch.stack(sources))                                                # (S, B, T, d)
    keys = F.rms_norm(x, x.shape[-1:], eps=mix.norm.eps)
    logits = keys @ fp32(mix.w * mix.norm.weight)                                 # (S, B, T)
    return logits.softmax(0).mean((1, 2)).cpu().numpy()


def half_lives(layer, x):
    """Tokens until half of what a channel holds is gone, at its mean decay, (H, K)."""
    g = layer.log_decay(x)                                                        # (B, T, H, K)
    return (math.log(2) / -g.mean((0, 1)).clamp(max=-1e-9)).cpu().numpy()


# --------------------------------------------------------------------------------------------------
# The pictures. Each draws one form (map, bars or curves) and returns what to see in it, in one line

def mixtures(draw, seen, *_):
    parts = seen["mixtures"]
    if not parts:
        return "left out: this model has no AttnRes mixtures"
    table = np.full((len(parts), max(len(p) for _, p in parts)), np.nan)
    for row, (_, p) in zip(table, parts):
        row[:len(p)] = p
    draw.map([name for name, _ in parts],
             "source: 1 is the embedding, then finished blocks, the last of a row the running sum",
             table, "AttnRes: share of each source in what a layer part reads", "share", (0, 1))
    name, p = max(parts, key=lambda part: part[1].max() - 1 / len(part[1]))
    even = [name for name, p in parts if p.max() < 1.2 / len(p)]
    embedding = np.mean([p[0] for _, p in parts])
    return (f"a plain sum would be equal shares in each row; {name} is farthest from it, "
            f"{p.max():.0%} from source {p.argmax() + 1} of {len(p)}; the embedding has "
            f"{embedding:.0%} on average; {len(even)} of {len(parts)} are still near a plain mean")


def decay(draw, seen, *_):
    if not seen["decays"]:
        return "left out: this model has no KDA layer"
    rows = [(f"layer {number} head {h}", np.sort(lives)[::-1])
            for number, heads in seen["decays"].items() for h, lives in enumerate(heads, 1)]
    draw.map([name for name, _ in rows], "channels of the key, longest memory first",
             np.log10(np.stack([lives for _, lives in rows])),
             "KDA: half-life of what a channel remembers", "log10 of the half-life in tokens")
    every = np.concatenate([lives for _, lives in rows])
    by_median = sorted(((np.median(lives), name) for name, lives in rows), key=lambda row: row[0])
    (short, shortest), (long, longest) = by_median[0], by_median[-1]
    return (f"half-lives from {every.min():.2g} to {every.max():.3g} tokens, half of the channels "
            f"under {np.median(every):.2g}; heads share out the work: {longest} remembers longest "
            f"(median {long:.2g}), {shortest} shortest ({short:.2g})")


def load(draw, seen, metrics, *_):
    if not seen["loads"]:
        return "left out: this model has no MoE layer"
    lines = [line for line in metrics if line.get("load")]
    if not lines:
        return "left out: metrics.jsonl has no `load`; train.py writes it now"
    rows = [(f"layer {int(layer) + 1} expert {e + 1}", [line["load"][layer][e] for line in lines])
            for layer, shares in lines[0]["load"].items() for e in range(len(shares))]
    if len(rows) > 64:
        rows = [rows[i] for i in np.linspace(0, len(rows) - 1, 64).astype(int)]
    table = np.array([shares for _, shares in rows])
    draw.map([name for name, _ in rows],
             f"training, step {lines[0]['step']} to {lines[-1]['step']}", table,
             "Tokens of each expert over its fair share", "of the fair share", (0, 2))
    early, late = table[:, :max(1, len(lines) // 10)], table[:, -max(1, len(lines) // 4):]
    return (f"1 is a fair share: experts lie between {early.min():.2f} and {early.max():.2f} at "
            f"the start and between {late.min():.2f} and {late.max():.2f} in the last quarter, "
            f"dead ones {(late.mean(1) == 0).sum()}")


def kinds(draw, seen, metrics, model, documents, context):
    if not seen["loads"]:
        return "left out: this model has no MoE layer"
    if not documents:
        return "left out: the run's data are gone; give --kinds=FILE,FILE"
    layer, rows = list(seen["loads"])[-1], []
    for ids in documents.values():
        load = observe(model, windows(ids, 8, context))["loads"][layer]
        rows.append(load / load.mean())
    table = np.stack(rows)                                                        # (kinds, E)
    draw.map(list(documents), f"expert of layer {layer}", table,
             "Load of each expert by kind of document", "of the fair share",
             (0, max(2, table.max())))
    apart = table.max(0) / np.maximum(table.min(0), 1e-9)
    preference = table / np.maximum(table.mean(0), 1e-9)
    kind, expert = np.unravel_index(preference.argmax(), table.shape)
    return (f"a column of one shade is an expert that does not care; expert {expert + 1} cares "
            f"most for “{list(documents)[kind]}” ({table[kind, expert]:.1f} of the fair share, "
            f"{table[:, expert].mean():.1f} on average); {(apart > 1.5).sum()} of {len(apart)} "
            "differ by more than half between kinds")


def bias(draw, seen, metrics, model, *_):
    biases = {f"layer {number}": np.sort(layer.mlp.router_bias.cpu().numpy())
              for number, layer in enumerate(model.layers, 1)
              if isinstance(layer.mlp, moe.LatentMoE)}
    if not biases:
        return "left out: this model has no MoE layer"
    table = np.stack(list(biases.values()))
    most = max(np.abs(table).max(), 1e-3)
    draw.map(list(biases), "experts, lowest bias first", table,
             "Router bias, beside scores between 0 and 1", "bias", (-most, most))
    return ("a high bias pulls tokens to an expert that the router would pass over: "
            f"{table.min():+.3f} to {table.max():+.3f}, beside scores between 0 and 1; spread "
            f"{table.std():.3f}")


def activations(draw, seen, metrics, model, *_):
    gate, up = model.config.situ_beta, model.config.situ_linear_beta
    panels, words = [], []
    for name, what, bound in (("gate", "gate W_g x", gate), ("up", "up W_u x", up),
                              ("product", "SiTU's product", gate * up if gate and up else None)):
        x = np.concatenate(seen[name])
        largest = np.abs(x).max()
        edge = max(largest, bound or 0, 1e-6) * 1.05
        counts, edges = np.histogram(x, bins=41, range=(-edge, edge))
        panels.append((what, edges, counts / len(x), [-bound, bound] if bound else []))
        share = (np.abs(x) > bound).mean() if bound else 0
        beyond = f" (bound {bound:g}, {share:.2%} beyond it)" if bound else ""
        words.append(f"|{name}| up to {largest:.2g}{beyond}")
    draw.bars(panels, "Shares of values, beside SiTU's bounds")
    return "; ".join(words) + ("; what lies beyond a bound is what SwiGLU would let through and "
                               "SiTU bends")


def loss(draw, runs):
    """runs: {name: (lines of metrics, settings)}. Bits per byte; nats if there is no evaluation."""
    by_tokens, by_seconds, ends = {}, {}, []

    def add(name, lines, values, per_step):
        by_tokens[name] = [line["step"] * per_step for line in lines], values
        by_seconds[name] = [line["seconds"] for line in lines], values

    for name, (lines, settings) in runs.items():
        per_step = settings["batch_size"] * settings["context"] * settings["grad_accum"]
        training, evaluations = of_training(lines), of_evaluation(lines)
        last = evaluations[-1] if evaluations else dict(val_bits_per_byte=1, val_loss=math.log(2))
        scale = last["val_bits_per_byte"] / last["val_loss"]
        nats = [line["loss"] for line in training]
        if len(training) > 8:                              # a little smoother
            nats, training = np.convolve(nats, np.ones(3) / 3, "valid"), training[1:-1]
        add(f"{name}, training", training, [n * scale for n in nats], per_step)
        if evaluations:
            bits = [line["val_bits_per_byte"] for line in evaluations]
            add(f"{name}, validation", evaluations, bits, per_step)
            ends.append((bits[-1], name, last["step"] * per_step, last["seconds"]))
    draw.curves([("tokens", by_tokens), ("seconds", by_seconds)], "Loss over tokens and over time")
    return "lower is better, and further left is cheaper: " + ("; ".join(
        f"{name} ends at {bits:.3f} bits per byte after {tokens:,} tokens, {seconds:,.0f} s"
        for bits, name, tokens, seconds in sorted(ends)) or "no evaluation yet, only training loss")


def reward(draw, runs):
    return of_answers(draw, runs, "reward", "mean reward of the answers",
                      "what an update learned from was worth")


def thinking(draw, runs):
    return of_answers(draw, runs, "thinking", "tokens of thought",
                      "a budget that falls bends it down")


def ratio(draw, runs):
    return of_answers(draw, runs, "log_ratio", "mean |log ρ| of a token",
                      "0 is on-policy; answers begun under earlier weights lift it")


def of_answers(draw, runs, name, unit, words):
    """A figure of post.py's metrics over its updates. runs: as of loss."""
    curves = {}
    for run, (lines, _) in runs.items():
        found = [line for line in lines if has(line, name)]
        curves[run] = [line["step"] for line in found], [line[name] for line in found]
    draw.curves([("updates", curves)], unit, unit)
    return words + "; " + "; ".join(f"{run} begins at {y[0]:.3g} and ends at {y[-1]:.3g}"
                                    for run, (_, y) in curves.items())


PICTURES = (mixtures, decay, load, kinds, bias, activations)


# --------------------------------------------------------------------------------------------------
# What is read

def read_metrics(run):
    """The lines of a run's metrics.jsonl, at least one of them of training."""
    folder = folder_of(run)
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"no metrics.jsonl in {folder}: expected a run's folder as train.py "
                         "writes it")
    lines = checkpoint.read_metrics(folder)
    if not of_training(lines):
        raise ValueError(f"{folder}/metrics.jsonl has no line of training, with step, loss and "
                         "seconds; let the run go on for some steps")
    return lines


def has(line, *names):
    """Whether these figures are there, as finite numbers."""
    return all(isinstance(line.get(name), (int, float)) and math.isfinite(line[name])
               for name in names)


def of_training(lines):
    return [line for line in lines if has(line, "loss", "seconds")]


def of_evaluation(lines):
    return [line for line in lines if has(line, "val_bits_per_byte", "val_loss", "seconds")]


def folder_of(run):
    return Path(run) if Path(run).is_dir() else Path(run).parent


def read_kinds(files, enc):
    """The files of --kinds → {kind: ids (n)}. Two files of one name are called by their paths."""
    names = [Path(file).name for file in files]
    names = names if len(set(names)) == len(files) else files
    documents = {}
    for name, file in zip(names, files):
        try:
            documents[name] = tokenizer.encode(enc, cli.read_text(file))
        except (OSError, ValueError) as error:
            raise ValueError(f"--kinds: {error}; expected text files, with commas") from None
        if not len(documents[name]):
            raise ValueError(f"--kinds: {file} is empty; expected a text")
    return documents


def documents_of(saved, enc):
    """The longest documents of a run's data, or parts of them → {kind: ids (n)}; {} if gone."""
    try:
        folder = prepare.HERE / saved["settings"]["data"]
        meta, _ = prepare.load_meta(folder)
        if meta["sha256"] != saved["data"]["sha256"]:
            return {}
        ids = np.concatenate([prepare.open_tokens(folder, split, meta)
                              for split in ("train", "val")])
    except (ValueError, OSError):
        return {}
    ends = np.flatnonzero(ids == tokenizer.end_of_text(enc))
    documents = [part for part in np.split(ids, ends + 1) if len(part) > 256]
    if len(documents) < 2:
        return {f"part {i} of 8": part for i, part in enumerate(np.array_split(ids, 8), 1)}
    first_words = lambda part: " ".join(enc.decode(part[:40].tolist()).split())[:28]
    return {first_words(part): part for part in sorted(documents, key=len)[-10:]}


def windows(ids, count, context):
    """At most count evenly spread windows of ids → (count, context) int64."""
    context = min(context, len(ids))
    count = min(count, max(1, len(ids) // context))
    starts = np.linspace(0, len(ids) - context, count).astype(int)
    return torch.from_numpy(np.stack([ids[i:i + context].astype(np.int64) for i in starts]))


# --------------------------------------------------------------------------------------------------
# Drawing: the same three forms in the terminal and as PNG
#
#     map       values (rows, columns), NaN where there is none; a word for each row;
#               shades: the values that are lightest and darkest
#     bars      histograms: (word, edges (n + 1), shares (n), bounds to mark) each; log scale
#     curves    panels: (what the x axis is, {name: (x, y)}) each

SHADES = " ·:-=+*#%@"


def limits(values, shades):
    return shades or (np.nanmin(values), np.nanmax(values))


class Terminal:

    def begin(self, name):
        print(f"\n{name}")

    def end(self, words):
        print(f"  {words}", flush=True)

    def map(self, rows, columns, values, title, unit, shades=None):
        low, high = limits(values, shades)
        if values.shape[1] > 96:                           # a screen's width
            values = np.stack([part.mean(1) for part in np.array_split(values, 96, axis=1)], 1)
        wide, left = max(1, min(4, 72 // values.shape[1])), max(map(len, rows))

        def shade(value):
            if math.isnan(value):
                return " "
            height = np.clip((value - low) / (high - low or 1), 0, 1)
            return SHADES[int(height * (len(SHADES) - 1))]

        for row, line in zip(rows, values):
            print(f"  {row:>{left}s} │{''.join(shade(value) * wide for value in line)}│")
        print(f"  {'':{left}s}  {columns}; '{SHADES[0]}' is {low:.3g}, '{SHADES[-1]}' {high:.3g} "
              f"{unit}")

    def bars(self, panels, title):
        for word, edges, shares, bounds in panels:
            marked = ", ".join(f"{bound:g}" for bound in bounds) or "none"
            print(f"  {word}; bound{'s' if len(bounds) > 1 else ''} at {marked}")
            for low, high, share in zip(edges, edges[1:], shares):
                mark = "".join(" ◄ bound" for bound in bounds if low <= bound < high)
                if share or mark:
                    bar = "█" * max(0, round(8 * (6 + math.log10(max(share, 1e-6)))))
                    print(f"    {low:8.2f} … {high:8.2f} │{bar} {share:.1e}{mark}")

    def curves(self, panels, title, unit="bits per byte"):
        letters = "abcdefghijklmnopqrstuvwxyz"
        for across, curves in panels:
            points = [np.array(curve, float) for curve in curves.values()]        # (2, n) each
            x0, y0 = np.min([curve.min(1) for curve in points], 0)
            x1, y1 = np.max([curve.max(1) for curve in points], 0)
            grid = [[" "] * 72 for _ in range(16)]
            for letter, curve in zip(letters, points):
                for x, y in zip(*curve):
                    row = 15 - round(15 * (y - y0) / (y1 - y0 or 1))
                    grid[row][round(71 * (x - x0) / (x1 - x0 or 1))] = letter
            for i, line in enumerate(grid):
                print(f"  {y1 - (y1 - y0) * i / 15:8.3f} │{''.join(line)}")
            names = ", ".join(f"{letter}: {name}" for letter, name in zip(letters, curves))
            print(f"  {'':8s} └{'─' * 72}")
            print(f"  {'':10s}{x0:,.0f} to {x1:,.0f} {across}; {names}")


class Pictures:
    """PNG files in a folder. plt: matplotlib.pyplot."""

    def __init__(self, plt, folder):
        self.plt, self.folder = plt, folder

    def begin(self, name):
        self.name, self.path = name, None

    def end(self, words):
        print(f"{self.path or self.name}: {words}", flush=True)

    def map(self, rows, columns, values, title, unit, shades=None):
        low, high = limits(values, shades)
        row_height = 0.24 if len(rows) <= 24 else 0.11
        figure, axis = self.plt.subplots(figsize=(7, 1.2 + row_height * len(rows)),
                                         layout="constrained")
        picture = axis.imshow(values, aspect="auto", interpolation="nearest", vmin=low, vmax=high,
                              cmap="viridis",
                              extent=(0.5, values.shape[1] + 0.5, len(rows) - 0.5, -0.5))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_yticks(range(len(rows)), rows, fontsize=28 * row_height)
        axis.set_xlabel(columns)
        axis.set_title(title, fontsize=9)
        figure.colorbar(picture, label=unit)
        self.save(figure)

    def bars(self, panels, title):
        figure, axes = self.plt.subplots(1, len(panels), figsize=(3 * len(panels), 2.6),
                                         layout="constrained", squeeze=False)
        for axis, (word, edges, shares, bounds) in zip(axes[0], panels):
            axis.stairs(np.maximum(shares, 1e-9), edges, fill=True)
            axis.set_yscale("log")
            axis.set_ylim(1e-6, 1)
            for bound in bounds:
                axis.axvline(bound, color="crimson", lw=1)
            axis.set_title(word, fontsize=8)
        figure.suptitle(title, fontsize=9)
        self.save(figure)

    def curves(self, panels, title, unit="bits per byte"):
        figure, axes = self.plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 2.8),
                                         layout="constrained", sharey=True, squeeze=False)
        for axis, (across, curves) in zip(axes[0], panels):
            for name, (x, y) in curves.items():
                axis.plot(x, y, label=name, lw=1, marker="." if len(x) < 20 else None)
            axis.set_xlabel(across)
        axes[0, 0].set_ylabel(unit)
        axes[0, 0].legend(fontsize=7)
        figure.suptitle(title, fontsize=9)
        self.save(figure)

    def save(self, figure):
        path = self.folder / f"{self.name}.png"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=90)
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}); give another folder, "
                             "--to=FOLDER, or --text") from None
        self.plt.close(figure)
        self.path = path


def canvas(text, folder):
    """The Terminal if that is wanted or matplotlib is not installed, otherwise Pictures."""
    if text:
        return Terminal()
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("matplotlib is not installed, so the pictures are text: pip install matplotlib "
              "for PNG")
        return Terminal()
    return Pictures(plt, folder)


# --------------------------------------------------------------------------------------------------

def main(arguments):
    options, runs = cli.options(arguments, dict(to="", kinds="", text=False))
    runs = [run.rstrip("/") for run in runs]
    if not runs:
        raise ValueError("expected the folder of a run: python -m lab.look out/shakespeare")
    if options["text"] and options["to"]:
        raise ValueError("--to=FOLDER is for PNG files, and --text makes none; give one of them")
    if options["kinds"] and len(runs) > 1:
        raise ValueError("--kinds is for one run; of several runs only the loss is drawn")
    draw = canvas(options["text"], Path(options["to"] or folder_of(runs[0]) / "pictures"))
    saved = {run: checkpoint.load_checkpoint(run) for run in runs}
    metrics = {run: (read_metrics(run), saved[run]["settings"]) for run in runs}

    def show(picture, *arguments):
        draw.begin(picture.__name__)
        draw.end(picture(draw, *arguments))

    if len(runs) == 1:
        lines, settings = metrics[runs[0]]
        model, enc = checkpoint.load_model(runs[0])
        documents = (read_kinds(options["kinds"].split(","), enc) if options["kinds"]
                     else documents_of(saved[runs[0]], enc))
        context = settings["context"]
        if documents:
            shortest = min(context, *map(len, documents.values()))
            ids = torch.cat([windows(part, 1, shortest) for part in documents.values()])
        else:
            print("the run's data are not in data/ any more: the model reads what it writes itself")
            torch.manual_seed(1)
            ids = model.generate(torch.zeros(4, 1, dtype=torch.long), min(context, 128),
                                 vocab_size=enc.n_vocab)
        seen = observe(model, ids)
        for picture in PICTURES:
            show(picture, seen, lines, model, documents, context)
    answering = {run: found for run, found in metrics.items()
                 if found[1].get("verb") in ("rl", "distill")}
    others = {run: found for run, found in metrics.items() if run not in answering}
    for picture in (reward, thinking, ratio) if answering else ():
        show(picture, answering)
    if others:
        show(loss, others)


if __name__ == "__main__":
    cli.run(main, __doc__)
