"""
Does each idea of K3 earn its place? Small models, trained alike except for one thing, on the same
tokens with the same seeds.

    python -m lab.study ablate    every idea of K3 against what it replaces: a table, with spread
    python -m lab.study gpt       K3 against a plain GPT of equal active size, by AdamW and by Muon:
                                  tokens and time to the same loss
    python -m lab.study scaling   five sizes, a fitted line for K3 and for some ablations, and where
                                  the lines cross
    python -m lab.study long      train at 256 tokens, read up to 64k: loss by position, and a
                                  needle to be found, for KDA, MLA and three KDA layers to one MLA

    --only=k3,dense               these variants only
    --seeds=3                     runs of each variant
    --size=48                     ablate, gpt, long: the width; heads, latents and MLPs follow
    --tokens=500_000              ablate, gpt, long: tokens of a run
    --label=mine                  ablate, gpt, scaling: keep runs apart from earlier ones. Change a
                                  line of code, then run with --only=k3 --label=mine
    --sizes=32,48,64 --ratio=2    scaling: the widths, and tokens per active parameter
    --reach=65536 --rows=2        long: read so many tokens, in so many rows
    --anything=else               for all variants, any size of K3Config and train.py's settings of
                                  data, batch and optimizer: --data=stdlib --n_layer=12 --lr=4e-3

A variant is what one would write after `python train.py`; a run is train.py's loop without
checkpoints. Each finished run is a line of out/study.jsonl: a stopped study goes on from there, and
studies share runs. The data: python data/prepare.py shakespeare. Narrow models would be mostly its
4,096 tokens; for them add --vocab_size=1024 --name=shakespeare1k, and --data=shakespeare1k here.
"""
import copy
import hashlib
import itertools
import json
import math
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import attnres
import cli
import dispatch
import kda
import mla
import model
import moe
import mtp
import muon
import mxfp4
import ops
import sizes
import train
from data import prepare
from model import K3, K3Config

RUNS = Path("out/study.jsonl")

# The sources that make the model. A run made by other ones is marked in the tables.
SOURCE = hashlib.sha256(b"".join(
    Path(module.__file__).read_bytes()
    for module in (ops, dispatch, attnres, kda, mla, mxfp4, moe, mtp, muon, sizes, model)
)).hexdigest()[:12]

# Settings of every run, unless the command line says otherwise.
BASE = dict(data="shakespeare", batch_size=8, context=128, lr=2.4e-2, weight_decay=0.5,
            eval_batches=32)


def ablations(size, given):
    """
    {name: (what it is, settings that differ from K3's)}. For an idea of your own, add a line.
    given: settings of all variants.
    """
    config, lr = base_config(size, given), given.get("lr", BASE["lr"])

    def active(**changes):
        with torch.device("meta"):
            return K3(K3Config(**{**sizes_of(config), **changes})).num_active_params()

    def width(name, step, **changes):
        """The multiple of step for field `name` that brings the active size nearest to K3's."""
        low, high = (active(**{**changes, name: step * n}) for n in (1, 2))
        return step * max(1, round(1 + (active() - low) / (high - low)))

    dense = dict(first_k_dense_replace=config.n_layer)
    flat = dict(routed_expert_hidden_size=0, latent_norm=False)
    dense_width = width("intermediate_size", 1, **dense)
    flat_width = width("moe_intermediate_size", 8, **flat)
    adamw = dict(optimizer="adamw", weight_decay=0.1)
    return {
        "k3": ("K3 as it is", {}),
        "attn_none": ("plain residual for AttnRes", dict(attn_res="none")),
        "attn_full": ("full AttnRes for Block AttnRes", dict(attn_res="full")),
        "mla": ("MLA only", dict(mla_every=1)),
        "kda": ("KDA only", dict(mla_every=0)),
        "softplus": ("softplus gate in KDA", dict(kda_gate="softplus")),
        "dense": ("dense MLP of equal active size", dict(dense, intermediate_size=dense_width)),
        "no_latent": ("MoE without the latent", dict(flat, moe_intermediate_size=flat_width)),
        "no_norm": ("MoE without the latent norm", dict(latent_norm=False)),
        "swiglu": ("SwiGLU for SiTU-GLU", dict(situ_beta=None, situ_linear_beta=None)),
        "sign": ("sign rule for Quantile Balancing", dict(balance="sign")),
        "no_bias": ("no router bias", dict(balance="none")),
        "adamw": ("AdamW for Muon", dict(adamw, lr=lr * 2 / 3)),
        "whole": ("whole-matrix Muon for per-head", dict(optimizer="whole")),
        "wsd": ("WSD for cosine", dict(schedule="wsd")),
        "mtp": ("with an MTP layer", dict(mtp_layers=1)),
        "gpt_adamw": ("plain GPT by AdamW", dict(adamw, gpt=True, lr=lr / 3, min_lr=0.1)),
        "gpt_muon": ("plain GPT by Muon", dict(gpt=True, optimizer="muon")),
    }


def sizes(d):
    """K3Config's fields for width d, in the quickstart's proportions; heads grow with the width."""
    head = 16 if d < 128 else 32 if d < 256 else 64
    if d < head or d % head:
        raise ValueError(f"--size={d}: expected a width, a multiple of {head}")
    return dict(n_layer=4, n_embd=d, n_head=d // head, q_lora_rank=d // 2, kv_lora_rank=3 * d // 8,
                qk_nope_head_dim=3 * head // 4, qk_rope_head_dim=head // 4, v_head_dim=head,
                intermediate_size=3 * d, moe_intermediate_size=d // 2,
                routed_expert_hidden_size=d // 2)


def sizes_of(config):
    return asdict(config)


def base_config(size, given):
    """The K3Config of K3 itself at that size."""
    _, enc = prepare.load_meta(prepare.HERE / given.get("data", BASE["data"]))
    return train.make_settings({**BASE, **sizes(size), **given}, enc)[1]


def settings_of(size, tokens, seed, given, changes):
    """One run's settings, a flat dict. A variant's changes win over `given`, `given` over BASE."""
    flat = {**BASE, **sizes(size), **given, **changes, "seed": seed}
    flat["steps"] = max(1, round(tokens / (flat["batch_size"] * flat["context"])))
    return flat


def tokens_of(flat):
    return flat["steps"] * flat["batch_size"] * flat["context"]


# --------------------------------------------------------------------------------------------------
# One run

class Run:
    """
    One run of train.py's loop. given: settings of train.py and K3Config in one flat dict, and
    gpt=True for the plain GPT. batches(step, batch_size, context) → x, y may replace the data's.
    """

    def __init__(self, given, batches=None):
        self.folder = prepare.HERE / given["data"]
        self.meta, enc = prepare.load_meta(self.folder)
        self.settings, config = train.make_settings(
            {name: value for name, value in given.items() if name != "gpt"}, enc)
        self.device, dtype, _ = train.set_up_machine(self.settings)
        self.autocast = torch.autocast(self.device, dtype=dtype, enabled=dtype != torch.float32)
        self.batches = batches or self.windows
        torch.manual_seed(self.settings.seed)
        made = PlainGPT(config, self.settings.context) if given.get("gpt") else K3(config)
        self.model = made.train().to(self.device)
        self.optimizer = self.model.configure_optimizers(
            self.settings.lr, self.settings.weight_decay, optimizer=self.settings.optimizer)

    def windows(self, step, batch_size, context):
        """The windows that train.py reads in this step: x, y (batch_size, context)."""
        tokens = prepare.open_tokens(self.folder, "train", self.meta)
        return train.get_batch(tokens, batch_size, context, (self.settings.seed, step, 0))

    def step(self, step):
        """One update → loss, gradient norm, the largest max violation of the MoE layers."""
        rate = self.settings.lr * train.learning_rate(self.settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1)
        context, batch_size = train.current_context(self.settings, step)
        x, y = self.batches(step, batch_size, context)
        with self.autocast:
            loss = self.model(x.to(self.device), y.to(self.device))[1]
        loss.backward()
        limit = self.settings.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        balance = self.model.update_router_bias() if isinstance(self.model, K3) else []
        violations = [figures["max_violation"] for figures in balance]
        return loss.item(), norm, max(violations, default=math.nan)

    def fit(self):
        """All steps → the run's figures, a dict; all NaN if the loss became infinite or NaN."""
        active, violations, began = self.model.num_active_params(), [], now()
        for step in range(self.settings.steps):
            loss, norm, violation = self.step(step)
            violations.append(violation)
            if not math.isfinite(loss + norm):
                lost = ("val_bits_per_byte", "seconds", "max_violation", "largest")
                return dict(active=active) | dict.fromkeys(lost, math.nan)
        seconds = now() - began
        val = prepare.open_tokens(self.folder, "val", self.meta)
        nats = train.evaluate(self.model, val, self.settings, self.device, self.autocast)
        x, y = train.get_batch(val, self.settings.batch_size, self.settings.context, (0,))
        with self.autocast:
            largest = largest_activation(self.model, x.to(self.device), y.to(self.device))
        late = violations[len(violations) // 2:]
        return dict(active=active, val_bits_per_byte=nats * self.bits_per_nat(), seconds=seconds,
                    largest=largest, max_violation=statistics.mean(late))

    def bits_per_nat(self):
        """Bits per byte for one nat per token."""
        return self.meta["val_tokens"] / self.meta["val_bytes"] / math.log(2)


def run(variant, flat, label=""):
    """A run's figures: from out/study.jsonl if it is there, otherwise made now and added to it."""
    line = finished(flat, label)
    if line is None:
        line = dict(variant=variant, label=label, **Run(flat).fit(), torch=torch.__version__,
                    threads=torch.get_num_threads(), source=SOURCE, spec=flat)
        append_line(RUNS, line)
        print(f"  {variant} {label} size {flat['n_embd']}, {tokens_of(flat):,} tokens, "
              f"seed {flat['seed']}: {line['val_bits_per_byte']:.4f} bits per byte "
              f"({line['seconds']:.0f} s)", file=sys.stderr, flush=True)
    return line


def finished(flat, label):
    """The line of that run, or None."""
    for line in read_lines(RUNS):
        if line.get("spec") == as_stored(flat) and line.get("label") == label:
            return line
    return None


def as_stored(flat):
    """Settings as a .jsonl file gives them back, with lists for tuples."""
    return json.loads(json.dumps(flat))


def read_lines(path):
    """
    A .jsonl file → its lines that are whole, dicts. A line cut short by a kill is passed over, and
    no file is no lines.
    """
    if not Path(path).exists():
        return []
    lines = []
    for text in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict)]


def append_line(path, line):
    """Add a dict to a .jsonl file as a line of its own, whatever the file ends with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        last = file.read()
        file.write(b"\n" * (last not in (b"", b"\n")) + json.dumps(line).encode() + b"\n")


# --------------------------------------------------------------------------------------------------
# The yardstick

class PlainGPT(nn.Module):
    """
    nanoGPT's model: learned positions, softmax attention, GELU MLP, x + f(norm(x)), one matrix for
    input and output embedding; normal init of 0.02, divided by √(2·layers) for what adds to the
    residual. Width, depth and heads are the K3Config's. hidden: the MLP's width; by default the one
    with which as many parameters are active as in K3.
    """

    def __init__(self, config, context, hidden=None):
        super().__init__()
        V, d, L, self.n_head = config.vocab_size, config.n_embd, config.n_layer, config.n_head
        if hidden is None:
            with torch.device("meta"):
                left_for_mlps = K3(config).num_active_params() - V * d - L * 4 * d * d
            hidden = max(1, round(left_for_mlps / (2 * L * d)))
        self.embed, self.positions = nn.Embedding(V, d), nn.Embedding(context, d)
        self.layers = nn.ModuleList(self.layer(d, hidden) for _ in range(L))
        self.norm, self.lm_head = nn.RMSNorm(d), nn.Linear(d, V, bias=False)
        self.lm_head.weight = self.embed.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                adds_to_residual = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * L) ** 0.5 if adds_to_residual else 0.02)

    @staticmethod
    def layer(d, hidden):
        linear = lambda a, b: nn.Linear(a, b, bias=False)
        return nn.ModuleDict(dict(
            norm1=nn.RMSNorm(d), qkv=linear(d, 3 * d), o=linear(d, d),
            norm2=nn.RMSNorm(d), up=linear(d, hidden), down=linear(hidden, d)))

    def num_active_params(self):
        return sum(p.numel() for p in self.parameters()) - self.positions.weight.numel()

    def forward(self, idx, targets, images=None):
        """As K3.forward: idx, targets (B, T) int64 → logits (B, T, V), mean loss in nats."""
        B, T = idx.shape
        x = self.embed(idx) + self.positions.weight[:T]                           # (B, T, d)
        for layer in self.layers:
            qkv = layer["qkv"](layer["norm1"](x)).view(B, T, 3, self.n_head, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)                                  # (B, H, T, d/H)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["o"](o.transpose(1, 2).reshape(B, T, -1))               # (B, T, d)
            x = x + layer["down"](F.gelu(layer["up"](layer["norm2"](x))))
        logits = self.lm_head(self.norm(x))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def configure_optimizers(self, lr, weight_decay=0.1, optimizer="adamw"):
        """
        nanoGPT's AdamW (β 0.9 and 0.99, no decay of norms), or Muon for the matrices, with q, k and
        v as one block each.
        """
        qkv = [layer["qkv"].weight for layer in self.layers]
        matrices = [layer[name].weight for layer in self.layers for name in ("o", "up", "down")]
        embeddings = [self.embed.weight, self.positions.weight]
        norms = dict(params=[p for p in self.parameters() if p.dim() == 1], weight_decay=0.0)
        if optimizer == "adamw":
            decayed = dict(params=qkv + matrices + embeddings)
            return torch.optim.AdamW([decayed, norms], lr=lr, betas=(0.9, 0.99),
                                     weight_decay=weight_decay, fused=True)
        return muon.MuonAdamW([dict(params=qkv, blocks=3), dict(params=matrices)],
                              [dict(params=embeddings), norms], lr, weight_decay)


# --------------------------------------------------------------------------------------------------
# ablate

def ablate(arguments):
    """Every idea of K3 against what it replaces."""
    options, given = read_options(arguments, size=48, tokens=500_000, label="")
    size, tokens, label = options["size"], options["tokens"], options["label"]
    variants = ablations(size, given)
    names, rows = chosen(variants, options["only"]), {}
    for seed in range(1, options["seeds"] + 1):    # seed by seed: a stopped study has whole columns
        for name in names:
            flat = settings_of(size, tokens, seed, given, variants[name][1])
            if label and finished(flat, ""):
                rows.setdefault((name, ""), []).append(finished(flat, ""))
            rows.setdefault((name, label), []).append(run(name, flat, label))
    firsts = [settings_of(size, tokens, 1, given, variants[name][1]) for name in names]
    speed = dict(zip(names, speeds(firsts)))

    print(heading(options, flat, f"size {size}, {tokens_of(flat):,} tokens")
          + " Δ: against K3 with the same seed, * where zero lies outside its 95% interval."
          " Max violation: of the worst layer, mean over the last half of the steps.\n")
    print("| | active parameters | validation, bits per byte | Δ to K3 | tokens/s | max violation "
          "| largest activation |\n" + "|---" * 7 + "|")
    k3 = rows.get(("k3", "")) or rows.get(("k3", label)) or []
    for (name, row_label), lines in rows.items():
        old = any(line["source"] != SOURCE for line in lines)
        what = variants[name][0] + (f" ({row_label})" if row_label else "") + " †" * old
        delta = "" if lines is k3 else difference(lines, k3)
        print(ablation_row(what, lines, delta, speed[name]))
    if any(line["source"] != SOURCE for lines in rows.values() for line in lines):
        print("† run with other sources than the present ones; --label=… runs it anew beside the "
              "old")


def ablation_row(what, lines, delta, speed):
    bits, violation, largest = (
        [line[figure] for line in lines]
        for figure in ("val_bits_per_byte", "max_violation", "largest"))
    violation = "" if math.isnan(violation[0]) else with_spread(violation, 2)
    return (f"| {what} | {lines[0]['active']:,} | {with_spread(bits, 4)} | {delta} | {speed:,.0f} "
            f"| {violation} | {with_spread(largest, 1)} |")


def difference(lines, base):
    """Mean difference in bits per byte and its spread, * if it differs from zero at 95%."""
    delta = [a["val_bits_per_byte"] - b["val_bits_per_byte"] for a, b in zip(lines, base)]
    if not delta:
        return ""
    mean = statistics.mean(delta)
    student = {2: 12.7, 3: 4.3, 4: 3.18, 5: 2.78}.get(len(delta), 2.6)   # t, two-sided, 95%
    sure = len(delta) > 1 and abs(mean) > student * spread(delta) / len(delta) ** 0.5
    return f"{mean:+.4f} ± {spread(delta):.4f}" + " *" * sure


# --------------------------------------------------------------------------------------------------
# gpt

def gpt(arguments):
    """
    What the architecture brings and what the optimizer brings: K3 with a fifth and two fifths of
    the tokens that the plain GPTs have.
    """
    options, given = read_options(arguments, size=48, tokens=2_000_000, label="")
    variants = ablations(options["size"], given)
    compared = {name: variants[name] for name in ("gpt_adamw", "gpt_muon", "k3")}
    names = chosen(compared, options["only"])
    parts = (("gpt_adamw", 1.0), ("gpt_muon", 1.0), ("k3", 0.4), ("k3", 0.2))
    rows = [(name, part) for name, part in parts if name in names]
    flats = {(name, part): settings_of(options["size"], options["tokens"] * part, 1, given,
                                       variants[name][1]) for name, part in rows}
    lines = {row: [] for row in rows}
    for seed in range(1, options["seeds"] + 1):
        for row in rows:
            lines[row].append(run(row[0], {**flats[row], "seed": seed}, options["label"]))
    speed = dict(zip(rows, speeds(list(flats.values()))))

    print(heading(options, flats[rows[-1]], f"size {options['size']}")
          + " Seconds: tokens by tokens/s.\n")
    print("| | active parameters | lr | tokens | tokens/s | seconds | validation, bits per byte |\n"
          "|---|---|---|---|---|---|---|")
    for row in rows:
        bits = [line["val_bits_per_byte"] for line in lines[row]]
        tokens, flat = tokens_of(flats[row]), flats[row]
        print(f"| {variants[row[0]][0]} | {lines[row][0]['active']:,} | {flat['lr']:g} "
              f"| {tokens:,} | {speed[row]:,.0f} | {tokens / speed[row]:.0f} "
              f"| {with_spread(bits, 4)} |")


# --------------------------------------------------------------------------------------------------
# scaling

def scaling(arguments):
    """
    Several sizes, with tokens in proportion to the active parameters; for each variant a line
    log loss = a − b log compute.
    """
    options, given = read_options(arguments, only="k3,attn_none,dense,gpt_muon", seeds=1, label="",
                                  sizes="32,48,64,80,96", ratio=2.0)
    seeds, widths = options["seeds"], options["sizes"].split(",")
    if len(widths) < 3 or not all(d.isdigit() for d in widths):
        raise ValueError(f"--sizes={options['sizes']}: expected at least three widths, such as "
                         "32,48,64: a line through two has no error")
    if options["ratio"] <= 0:
        raise ValueError(f"--ratio={options['ratio']:g}: expected more than 0 tokens per parameter")
    widths = [int(d) for d in widths]
    names, points = chosen(ablations(widths[0], given), options["only"]), {}
    for d in widths:
        variants = ablations(d, given)
        with torch.device("meta"):         # K3's size: all variants of a width see as many tokens
            active = K3(base_config(d, given)).num_active_params()
        for name, seed in itertools.product(names, range(1, seeds + 1)):
            flat = settings_of(d, options["ratio"] * active, seed, given, variants[name][1])
            line = run(name, flat, options["label"])
            compute = 6 * line["active"] * tokens_of(flat)
            points.setdefault(name, []).append((compute, line["val_bits_per_byte"]))

    print(heading(options, flat, f"widths {options['sizes']}, {options['ratio']:g} tokens for each "
                                 "active parameter")
          + " Compute C: 6 · active parameters · tokens.\n")
    computes = " ".join(f"{compute:.1e}" for compute, _ in points[names[0]][::seeds])
    print(f"| | bits per byte at C = {computes} | fit: bits per byte | fit error "
          "| compute for K3's loss |\n|---|---|---|---|---|")
    fits = {name: power_law(*zip(*pairs)) for name, pairs in points.items()}
    for name, pairs in points.items():
        a, b, error, slope_error = fits[name]
        losses = [loss for _, loss in pairs]
        means = (statistics.mean(losses[i:i + seeds]) for i in range(0, len(losses), seeds))
        print(f"| {variants[name][0]} | {' '.join(f'{loss:.3f}' for loss in means)} "
              f"| {math.exp(a):.2f} · C^-{b:.4f} ± {slope_error:.4f} | {error:.2%} "
              f"| {crossing(fits, points, name)} |")
    print(LARGE)


LARGE = """
on a GPU, ten times as wide, with a corpus as for config/gpu_small.py:
    LARGE="--data=corpus --vocab_size=50304 --n_layer=12 --batch_size=64 --context=1024"
    LARGE="$LARGE --lr=4e-3 --weight_decay=0.1"
    python data/prepare.py path/to/texts --name=corpus --tokenizer=gpt2
    python -m lab.study scaling --sizes=256,384,512,768,1024 --ratio=20 $LARGE
    python -m lab.study ablate --size=768 --tokens=2_000_000_000 $LARGE"""


def power_law(compute, loss):
    """
    Least squares of log loss = a − b log compute → a, b, the root mean square of the residuals
    (a relative error), the standard error of b.
    """
    x, y = np.log(compute), np.log(loss)
    slope, a = np.polyfit(x, y, 1)
    residual = y - a - slope * x
    rms = float(np.sqrt((residual ** 2).sum() / max(1, len(x) - 2)))
    return float(a), float(-slope), rms, rms / float(np.sqrt(((x - x.mean()) ** 2).sum()))


def crossing(fits, points, name):
    """
    A variant's line against K3's, in words: the compute it needs for K3's loss at the largest size,
    as a multiple of K3's, and where the two lines meet.
    """
    if "k3" not in fits or name == "k3":
        return ""
    (a, b, *_), (a3, b3, *_) = fits[name], fits["k3"]
    largest = max(compute for compute, _ in points["k3"])
    k3_loss = a3 - b3 * math.log(largest)                  # its logarithm
    needed = math.exp((a - k3_loss) / b) / largest
    log_meeting = (a - a3) / (b - b3) if abs(b - b3) > 1e-9 else math.inf
    meeting = math.exp(log_meeting) if abs(log_meeting) < 200 else math.inf
    slope = "steeper" if b > b3 else "flatter"
    if largest / 1000 < meeting < largest * 1000:
        where = f"meets K3's line at {meeting:.0e}"
    else:
        where = "does not meet K3's line within a factor of 1000"
    return f"{needed:.2f} × at the largest; {slope}, {where}"


# --------------------------------------------------------------------------------------------------
# long: K3 has no positions, so a model trained on 256 tokens can be read at any length

def long(arguments):
    """Loss by position, and needles found, far beyond the context that was trained on."""
    options, given = read_options(arguments, only="kda,k3,mla", seeds=1, size=48, tokens=1_000_000,
                                  reach=65536, rows=2)
    if options["reach"] < 256 or options["reach"] % 256 or options["rows"] < 1:
        raise ValueError("expected --reach, a multiple of 256, and --rows of at least 1")
    given = {"context": 256, "batch_size": 4, "lr": 1.6e-2, **given}
    variants = {name: variant for name, variant in ablations(options["size"], given).items()
                if "gpt" not in variant[1]}                # a GPT has positions
    for seed in range(1, options["seeds"] + 1):
        for name in chosen(variants, options["only"]):
            what, changes = variants[name]
            flat = settings_of(options["size"], options["tokens"], seed, given, changes)
            long_run(f"{what}, seed {seed}", flat, options["reach"], options["rows"])


def long_run(what, flat, reach, rows):
    """Train one model with needles in its text, read far with it, and print what it found."""
    trained = Run(flat)
    if trained.meta["val_tokens"] <= reach:
        raise ValueError(f"--reach={reach}: data/{flat['data']} has {trained.meta['val_tokens']} "
                         "validation tokens; give more text, or reach less far")
    needles = Needles(trained.folder, trained.meta, pairs=4, times=6)
    trained.batches = lambda step, *shape: needles.batch((flat["seed"], step), *shape)
    figures = trained.fit()
    found = {}
    if reach >= 4096:                                      # short distances, many times
        found, *_ = read_long(trained, needles, 24, min(reach, 4096))
    far, nats, windows = read_long(trained, needles, rows, reach)
    found = {**far, **found}

    print(f"{what}, {figures['active']:,} active, {tokens_of(flat):,} tokens in windows of "
          f"{flat['context']}: {figures['val_bits_per_byte']:.4f} bits per byte at "
          f"{flat['context']}")
    print("  needle found after   " + "   ".join(
        f"{distance:,}: {right / asked:.0%} of {asked}"
        for distance, (right, asked) in sorted(found.items())))
    edges = [edge for edge in (256, 1024, 4096, 16384, 65536) if edge <= reach]
    words, scale = [], trained.bits_per_nat()
    for low, high in itertools.pairwise(edges):
        # by blocks of 256 tokens, whose scatter is the noise
        gain = scale * (nats - windows)[:, low:high].reshape(-1, 256).mean(1)
        noise = gain.std() / len(gain) ** 0.5
        words.append(f"{low:,} to {high:,}: {scale * nats[:, low:high].mean():.3f} "
                     f"({gain.mean():+.3f} ± {noise:.3f})")
    print("  bits per byte at positions (and against windows of 256)   " + "   ".join(words),
          flush=True)


class Needles:
    """
    Batches of text in which pairs are planted, "mark key value", and asked for later: "mark key" →
    value. The mark is a token that the text does not have; keys and values are drawn from its
    commonest tokens. Pairs overwrite the text in slots of three tokens. In training each pair is
    planted `times` times at random places, so every time but the first is a question.
    """

    def __init__(self, folder, meta, pairs, times, words=16):
        self.tokens = prepare.open_tokens(folder, "train", meta)
        self.pairs, self.times = pairs, times
        counts = np.bincount(self.tokens, minlength=meta["vocab_size"])
        unused = np.flatnonzero(counts == 0)
        if not len(unused):
            raise ValueError(f"{folder}: every token of the vocabulary occurs, none is free to "
                             "mark a needle; use a byte-level tokenizer or a BPE")
        commonest = np.argsort(-counts, kind="stable")
        self.mark, self.words = int(unused[0]), commonest[:min(words, np.count_nonzero(counts))]

    def draw(self, random):
        """→ keys, values: `pairs` of each, the keys all different."""
        keys = random.choice(self.words, self.pairs, replace=False)
        return keys, random.choice(self.words, self.pairs)

    def batch(self, key, batch_size, context):
        """As train.get_batch: x, y (batch_size, context)."""
        x, y = train.get_batch(self.tokens, batch_size, context, key)
        rows = torch.cat([x, y[:, -1:]], 1)                                       # (B, context + 1)
        random = np.random.default_rng((*key, 1))
        for row in rows:
            slots = random.choice((context + 1) // 3, self.times * self.pairs, replace=False)
            pairs = list(zip(*self.draw(random)))
            for slot, pair in zip(slots, self.times * pairs):
                row[3 * slot:3 * slot + 3] = torch.tensor([self.mark, *pair])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def plant(self, x):
        """x (rows, T) → a copy whose rows begin with pairs, and the pairs of each row."""
        random, planted = np.random.default_rng(7), x.clone()
        pairs = [list(zip(*self.draw(random))) for _ in x]
        for row, row_pairs in zip(planted, pairs):
            start = [token for pair in row_pairs for token in (self.mark, *pair)]
            row[:len(start)] = torch.tensor(start)
        return planted, pairs


@torch.no_grad()
def read_long(trained, needles, rows, reach):
    """
    Read `rows` segments of `reach` validation tokens that begin with pairs →
    {tokens read before the question: (found, asked)}, and the nats of every token (rows, reach),
    twice: read in one go, and in windows of 256 that know nothing of each other.
    """
    model, device = trained.model.eval(), trained.device
    val = prepare.open_tokens(trained.folder, "val", trained.meta)
    starts = np.linspace(0, len(val) - reach - 1, rows).astype(np.int64)   # may overlap
    x, y = train.get_windows(val, starts, reach)                                  # (rows, reach)
    planted, pairs = needles.plant(x)
    x, y, planted = x.to(device), y.to(device), planted.to(device)

    def nats(logits, targets):
        each = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return each.view(targets.shape)

    def ask(number, cache):
        """How many rows give the value of their pair `number`; the cache stays as it is."""
        question = [[needles.mark, row_pairs[number][0]] for row_pairs in pairs]
        idx, cache = torch.tensor(question, device=device), copy.deepcopy(cache)
        with trained.autocast:
            answers = model(idx, cache=cache, last_only=True)[0].argmax(-1).flatten().tolist()
        return sum(answer == row_pairs[number][1] for answer, row_pairs in zip(answers, pairs))

    cache, found, long_nats, window_nats = model.new_cache(rows), {}, [], []
    for start, end in itertools.pairwise([0, 16, 64, *range(256, reach + 1, 256)]):
        with trained.autocast:
            logits = model(planted[:, start:end], cache=cache)[0]
        long_nats.append(nats(logits, y[:, start:end]))
        if end in (16, 64, 256, 1024, 4096, 16384, 65536):
            right = sum(ask(number, cache) for number in range(needles.pairs))
            found[end] = right, rows * needles.pairs
    for start in range(0, reach, 256):
        with trained.autocast:
            logits = model(x[:, start:start + 256])[0]
        window_nats.append(nats(logits, y[:, start:start + 256]))
    return found, torch.cat(long_nats, 1).cpu(), torch.cat(window_nats, 1).cpu()


# --------------------------------------------------------------------------------------------------
# Measuring

def by_processor():
    """Whether one CPU thread does all the work: then its own time is taken, not the clock's."""
    return torch.get_num_threads() == 1 and not torch.cuda.is_available()


def now():
    """Seconds."""
    return time.process_time() if by_processor() else time.perf_counter()


def in_turn(runs, *functions, clock=time.perf_counter):
    """Run the functions in turn, `runs` times after one warm-up → the median seconds of each."""
    times = [[] for _ in functions]
    for i in range(runs + 1):
        for f, seconds in zip(functions, times):
            began = clock()
            f()
            if i:
                seconds.append(clock() - began)
    return [statistics.median(seconds) for seconds in times]


def speeds(flats, runs=7):
    """Tokens a second of each run's step, taken in turn so that a busy machine slows all alike."""
    steps = [Run(flat) for flat in flats]
    seconds = in_turn(runs, *(lambda one=one: one.step(0) for one in steps), clock=now)
    return [flat["batch_size"] * flat["context"] / s for flat, s in zip(flats, seconds)]


@torch.no_grad()
def largest_activation(model, x, y):
    """The largest absolute output for x of any module or gated product; logits are not counted."""
    found, situ = [0.0], moe.situ

    def look(out):
        if isinstance(out, torch.Tensor):
            found.append(out.abs().max().item())

    def watched_situ(*arguments):                          # routed experts are no modules
        out = situ(*arguments)
        look(out)
        return out

    watched = [module for name, module in model.named_modules() if name not in ("", "lm_head")]
    hooks = [module.register_forward_hook(lambda module, inputs, out: look(out))
             for module in watched]
    moe.situ = watched_situ
    try:
        model.eval()(x, y)
    finally:
        moe.situ = situ
        for hook in hooks:
            hook.remove()
    return max(found)


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else math.nan


def with_spread(values, digits):
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {spread(values):.{digits}f}" if len(values) > 1 else mean


def heading(options, flat, what):
    """How a table was measured."""
    device = flat.get("device", cli.find_device("auto"))
    clock = ", in processor time" if by_processor() else ""
    return (f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {device}; "
            f"data/{flat['data']}, {what}, lr {flat['lr']:g}, {flat['batch_size']} × "
            f"{flat['context']} tokens a step, seeds 1 to {options['seeds']}; ± is the standard "
            "deviation over seeds. Tokens/s: a step of each in turn, median of 7" + clock + ".")


# --------------------------------------------------------------------------------------------------
# The command line

# Settings of train.py that a run here uses; a study chooses seed and steps itself.
USED = {"data", "batch_size", "context", "context_stages", "lr", "min_lr", "schedule", "optimizer",
        "weight_decay", "grad_clip", "eval_batches", "device", "dtype"}


def read_options(arguments, **defaults):
    """→ the study's options, and settings of train.py and K3Config, all checked."""
    defaults = dict(only="", seeds=3) | defaults
    mine, settings = [], []
    for argument in arguments:
        if not argument.startswith("--"):
            names = ", ".join(f"--{name}" for name in defaults)
            raise ValueError(f"{argument}: expected --name=value; this study has {names}, and "
                             "takes settings of train.py")
        name = argument[2:].partition("=")[0]
        if name in {"label", "ratio", "reach", "rows", "size", "sizes", "tokens"} - defaults.keys():
            raise ValueError(f"--{name}: an option of other studies; --help says of which")
        (mine if name in defaults else settings).append(argument)
    options, _ = cli.options(mine, defaults)
    if options["seeds"] < 1 or options.get("tokens", 1) < 1:
        raise ValueError("expected --seeds and --tokens of at least 1")
    given, _ = train.read_arguments(settings)
    instead = dict(seed="--seeds=N", steps="--tokens=N, or --ratio=N for scaling")
    for name in given:
        if name not in USED | K3Config.__dataclass_fields__.keys():
            hint = f"; give {instead[name]}" if name in instead else ""
            raise ValueError(f"--{name}: this study does not use that setting{hint}")
    prepare.load_meta(prepare.HERE / given.get("data", BASE["data"]))      # fail now, not later
    return options, given


def chosen(variants, only):
    names = only.split(",") if only else list(variants)
    for name in names:
        if name not in variants:
            raise ValueError(f"no variant {name}; there are: {', '.join(variants)}")
    return names


STUDIES = dict(ablate=ablate, gpt=gpt, scaling=scaling, long=long)


def main(arguments):
    name, *rest = arguments or [""]
    if name not in STUDIES:
        raise ValueError(f"expected a study, one of {', '.join(STUDIES)}, got {name!r}; "
                         "--help describes them")
    train.keep_memory()
    try:
        STUDIES[name](rest)
    except KeyboardInterrupt:
        sys.exit("\nstopped; a study goes on from its last finished run")


if __name__ == "__main__":
    cli.run(main, __doc__)
