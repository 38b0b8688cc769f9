"""
Does each idea earn its place? Small models that are trained alike but for one thing, on the same tokens with the same seeds.

    python bench.py ablate       every idea of K3 against what it takes the place of: a table with mean and spread
    python bench.py gpt          K3 against a plain GPT of as many active parameters, by AdamW and by Muon: tokens and time to the same loss
    python bench.py long         train at 256 tokens, read up to 64k: loss by position, and a needle to be found, for KDA, MLA and 3:1
    python bench.py scaling      five sizes, a fitted line for K3 and for some ablations, and where they cross

    --only=k3,dense              these variants only
    --size=48                    the width; heads, latents and MLPs follow from it (`sizes`)
    --tokens=500_000             of a run
    --seeds=3                    runs of each
    --label=mine                 keeps runs apart from earlier ones: change a line of code, and run --only=k3 --label=mine
    --anything=else              a setting of train.py, for all variants: --data=stdlib --n_layer=12 --lr=4e-3

A run is train.py's loop without checkpoints, and a variant is what one would write behind `python train.py`. Every finished run is a line
of out/study.jsonl, so a study that was stopped goes on, and studies share runs. The data: python data/prepare.py shakespeare, or for narrow
models, most of which 4,096 tokens would be: … --vocab_size=1024 --name=shakespeare1k, and --data=shakespeare1k here.
"""
import copy
import hashlib
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import attnres
import kda
import model
import moe
import muon
import train
from data import prepare
from model import K3, K3Config

RUNS = Path("out/study.jsonl")
# Of the sources that make the model, as they are imported: a run made with other ones is marked in the table
SOURCE = hashlib.sha256(b"".join(Path(module.__file__).read_bytes() for module in (attnres, kda, moe, muon, model))).hexdigest()[:12]


def sizes(d):
    """K3Config's fields for width d: the quickstart's proportions, which are those of d = 128; smaller heads below, larger ones above."""
    head = 16 if d < 128 else 32 if d < 256 else 64
    if d < head or d % head:
        raise ValueError(f"--size={d}: expected a width, a multiple of {head}")
    return dict(n_layer=4, n_embd=d, n_head=d // head, q_lora_rank=d // 2, kv_lora_rank=3 * d // 8, qk_nope_head_dim=3 * head // 4,
                qk_rope_head_dim=head // 4, v_head_dim=head, intermediate_size=3 * d, moe_intermediate_size=d // 2, routed_expert_hidden_size=d // 2)


# What all runs have in common unless the command line says otherwise
BASE = dict(data="shakespeare", batch_size=8, context=128, lr=2.4e-2, weight_decay=0.5, eval_batches=32)


def ablations(size, given):
    """name → (what it is, settings that differ from K3's). For an idea of your own, add a line. given: settings that are for all."""
    config, lr = base_config(size, given), given.get("lr", BASE["lr"])

    def active(**changes):
        with torch.device("meta"):
            return K3(K3Config(**{**sizes_of(config), **changes})).num_active_params()

    def width(name, step, **changes):
        """The value of `name`, a multiple of step, with which the changed model has the active parameters nearest to K3's."""
        low, high = (active(**{**changes, name: step * n}) for n in (1, 2))
        return step * max(1, round(1 + (active() - low) / (high - low)))
    dense = dict(first_k_dense_replace=config.n_layer)
    flat = dict(routed_expert_hidden_size=0, latent_norm=False)
    return {
        "k3": ("K3 as it is", {}),
        "attn_none": ("plain residual for AttnRes", dict(attn_res="none")),
        "attn_full": ("full AttnRes for Block AttnRes", dict(attn_res="full")),
        "mla": ("MLA only", dict(mla_every=1)),
        "kda": ("KDA only", dict(mla_every=0)),
        "softplus": ("softplus gate in KDA", dict(kda_gate="softplus")),
        "dense": ("dense MLP of equal active size", dict(dense, intermediate_size=width("intermediate_size", 1, **dense))),
        "no_latent": ("MoE without the latent", dict(flat, moe_intermediate_size=width("moe_intermediate_size", 8, **flat))),
        "no_norm": ("MoE without the latent norm", dict(latent_norm=False)),
        "swiglu": ("SwiGLU for SiTU-GLU", dict(situ_beta=None, situ_linear_beta=None)),
        "sign": ("sign rule for Quantile Balancing", dict(balance="sign")),
        "no_bias": ("no router bias", dict(balance="none")),
        "adamw": ("AdamW for Muon", dict(optimizer="adamw", lr=lr * 2 / 3, weight_decay=0.1)),
        "whole": ("whole-matrix Muon for per-head", dict(optimizer="whole")),
        "wsd": ("WSD for cosine", dict(schedule="wsd")),
        "gpt_adamw": ("plain GPT by AdamW", dict(gpt=True, optimizer="adamw", lr=lr / 3, weight_decay=0.1, min_lr=0.1)),
        "gpt_muon": ("plain GPT by Muon", dict(gpt=True, optimizer="muon"))}


def sizes_of(config):
    return {name: getattr(config, name) for name in K3Config.__dataclass_fields__}


# ----------------------------------------------------------------------------------------------------------------------
# The yardstick

class PlainGPT(nn.Module):
    """
    nanoGPT's model: learned positions, softmax attention, GELU MLP, x + f(norm(x)), input and output embedding shared; normal init of 0.02,
    of what adds to the residual by √(2·layers) less. Width, depth and heads are the K3Config's; the MLP's width makes up for the
    difference, so that as many parameters are active.
    """

    def __init__(self, config, context):
        super().__init__()
        V, d, L, self.n_head = config.vocab_size, config.n_embd, config.n_layer, config.n_head
        with torch.device("meta"):
            hidden = max(1, round((K3(config).num_active_params() - V * d - L * 4 * d * d) / (2 * L * d)))
        linear = lambda a, b: nn.Linear(a, b, bias=False)
        self.embed, self.positions = nn.Embedding(V, d), nn.Embedding(context, d)
        self.layers = nn.ModuleList(nn.ModuleDict(dict(
            norm1=nn.RMSNorm(d), qkv=linear(d, 3 * d), o=linear(d, d),
            norm2=nn.RMSNorm(d), up=linear(d, hidden), down=linear(hidden, d))) for _ in range(L))
        self.norm, self.lm_head = nn.RMSNorm(d), linear(d, V)
        self.lm_head.weight = self.embed.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * L) ** 0.5 if name.endswith(("o.weight", "down.weight")) else 0.02)

    def num_active_params(self):
        return sum(p.numel() for p in self.parameters()) - self.positions.weight.numel()

    def forward(self, idx, targets):
        B, T = idx.shape
        x = self.embed(idx) + self.positions.weight[:T]
        for m in self.layers:
            q, k, v = m["qkv"](m["norm1"](x)).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)        # (B, H, T, D) each
            x = x + m["o"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1))
            x = x + m["down"](F.gelu(m["up"](m["norm2"](x))))
        logits = self.lm_head(self.norm(x))
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def configure_optimizers(self, lr, weight_decay=0.1, optimizer="adamw"):
        """nanoGPT's AdamW (β 0.9, 0.99; norms without decay), or Muon for the matrices, with q, k and v each as one."""
        layers = [m[name].weight for m in self.layers for name in ("o", "up", "down")]
        qkv, norms = [m["qkv"].weight for m in self.layers], [p for p in self.parameters() if p.dim() == 1]
        embeddings = [self.embed.weight, self.positions.weight]
        if optimizer == "adamw":
            return torch.optim.AdamW([dict(params=qkv + layers + embeddings), dict(params=norms, weight_decay=0.0)], lr=lr, betas=(0.9, 0.99),
                                     weight_decay=weight_decay, fused=True)
        return muon.MuonAdamW([dict(params=qkv, blocks=3), dict(params=layers)],
                              [dict(params=embeddings), dict(params=norms, weight_decay=0.0)], lr, weight_decay)


# ----------------------------------------------------------------------------------------------------------------------
# One run

class Run:
    """
    One run of train.py's loop. given: settings of train.py and K3Config in one flat dict, and gpt=True for the plain GPT.
    batches(step, batch_size, context) → x, y takes the place of the data's windows.
    """

    def __init__(self, given, batches=None):
        self.folder = prepare.HERE / given["data"]
        self.meta, enc = prepare.load_meta(self.folder)
        self.settings, config = train.make_settings({name: value for name, value in given.items() if name != "gpt"}, enc)
        self.device, dtype, _ = train.set_up_machine(self.settings)
        self.autocast = torch.autocast(self.device, dtype=dtype, enabled=dtype != torch.float32)
        torch.manual_seed(self.settings.seed)
        self.model = (PlainGPT(config, self.settings.context) if given.get("gpt") else K3(config)).train().to(self.device)
        self.optimizer = self.model.configure_optimizers(self.settings.lr, self.settings.weight_decay, optimizer=self.settings.optimizer)
        self.batches = batches or (lambda step, batch_size, context: train.get_batch(
            prepare.open_tokens(self.folder, "train", self.meta), batch_size, context, (self.settings.seed, step, 0)))

    def step(self, step):
        """One update → loss, gradient norm, the largest max violation of its layers."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * train.learning_rate(self.settings, step) * group.get("lr_scale", 1)
        context, batch_size = train.current_context(self.settings, step)
        x, y = self.batches(step, batch_size, context)
        with self.autocast:
            loss = self.model(x.to(self.device), y.to(self.device))[1]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip or math.inf).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        balance = self.model.update_router_bias() if isinstance(self.model, K3) else []
        return loss.item(), norm, max((figures["max_violation"] for figures in balance), default=math.nan)

    def fit(self):
        """All steps → the figures of a finished run; NaN for all if the loss left the finite numbers."""
        began, violations, result = now(), [], dict(active=self.model.num_active_params())
        for step in range(self.settings.steps):
            loss, norm, violation = self.step(step)
            violations.append(violation)
            if not math.isfinite(loss + norm):
                return result | dict.fromkeys(("val_bits_per_byte", "seconds", "max_violation", "largest"), math.nan)
        seconds, val = now() - began, prepare.open_tokens(self.folder, "val", self.meta)
        nats = train.evaluate(self.model, val, self.settings, self.device, self.autocast)
        x, y = (z.to(self.device) for z in train.get_batch(val, self.settings.batch_size, self.settings.context, (0,)))
        with self.autocast:
            largest = largest_activation(self.model, x, y)
        return result | dict(val_bits_per_byte=nats * self.bits(), seconds=seconds, largest=largest,
                             max_violation=statistics.mean(violations[len(violations) // 2:]))

    def bits(self):
        """Bits per byte for one nat per token."""
        return self.meta["val_tokens"] / self.meta["val_bytes"] / math.log(2)


def by_processor():
    """Whether one thread does all the work: then its own time is taken, so that what else runs on the machine counts for less."""
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
    """Tokens a second of each run's step, all in turn in this process, so that a busy machine falls on all."""
    steps = [Run(given) for given in flats]
    seconds = in_turn(runs, *(lambda r=r: r.step(0) for r in steps), clock=now)
    return [given["batch_size"] * given["context"] / s for given, s in zip(flats, seconds)]


@torch.no_grad()
def largest_activation(model, x, y):
    """The largest absolute value that any linear map, norm, layer part or gated product puts out for x; logits are not counted."""
    found = [0.0]
    look = lambda out: found.append(out.abs().max().item()) if isinstance(out, torch.Tensor) else None
    hooks = [m.register_forward_hook(lambda m, inputs, out: look(out)) for name, m in model.named_modules() if name not in ("", "lm_head")]
    situ = moe.situ

    def watched(*arguments):                                               # routed experts are no modules of their own
        out = situ(*arguments)
        look(out)
        return out
    moe.situ = watched
    try:
        model.eval()(x, y)
    finally:
        moe.situ = situ
        for hook in hooks:
            hook.remove()
    return max(found)


def run(variant, given, label=""):
    """The figures of a run, from out/study.jsonl if it was made before, else made now and written there."""
    line = finished(given, label)
    if line is None:
        line = dict(variant=variant, label=label, **Run(given).fit(), torch=torch.__version__, threads=torch.get_num_threads(), source=SOURCE,
                    spec=given)
        RUNS.parent.mkdir(exist_ok=True)
        cut = RUNS.exists() and not RUNS.read_text().endswith("\n")        # a line that was cut short stays one line
        with open(RUNS, "a") as file:
            file.write("\n" * cut + json.dumps(line) + "\n")
        print(f"  {variant} {label} size {given['n_embd']}, {tokens_of(given):,} tokens, seed {given['seed']}: "
              f"{line['val_bits_per_byte']:.4f} bits per byte ({line['seconds']:.0f} s)", file=sys.stderr, flush=True)
    return line


def finished(given, label):
    """The line of that run, None if there is none. What is no whole line is passed over: that run was stopped while it wrote."""
    spec = json.loads(json.dumps(given))
    for text in RUNS.read_text().splitlines() if RUNS.exists() else []:
        line = json.loads(text) if text.startswith("{") and text.endswith("}}") else {}
        if line.get("spec") == spec and line["label"] == label:
            return line
    return None


def tokens_of(given):
    return given["steps"] * given["batch_size"] * given["context"]


# ----------------------------------------------------------------------------------------------------------------------
# The command line

def read_options(arguments, **defaults):
    """→ options of this file (only, size, tokens, seeds, label) and settings for train.py, with types and names checked."""
    options = dict(only="", size=48, tokens=500_000, seeds=3, label="") | defaults
    rest = []
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        if name in options and equals:
            try:
                options[name] = type(options[name])(text)
            except ValueError:
                raise ValueError(f"{argument}: expected a number") from None
        elif argument.startswith("--") and equals:
            rest.append(argument)
        else:
            names = ", ".join(f"--{name}" for name in options)
            raise ValueError(f"{argument}: expected --name=value; this study has {names}, and takes train.py's settings")
    if min(options["seeds"], options["tokens"]) < 1:
        raise ValueError("expected --seeds and --tokens of at least 1")
    given, _ = train.read_arguments(rest)
    prepare.load_meta(prepare.HERE / given.get("data", BASE["data"]))      # an error now rather than later
    return options, given


def settings_of(size, tokens, seed, given, variant):
    """The flat settings of one run. What the command line says goes before BASE; what a variant says goes before both."""
    flat = {**BASE, **sizes(size), **given, **variant, "seed": seed}
    flat["steps"] = max(1, round(tokens / (flat["batch_size"] * flat["context"])))
    return flat


def base_config(size, given):
    """K3's own K3Config at that size."""
    _, enc = prepare.load_meta(prepare.HERE / given.get("data", BASE["data"]))
    return train.make_settings({**BASE, **sizes(size), **given}, enc)[1]


def chosen(variants, only):
    names = only.split(",") if only else list(variants)
    unknown = [name for name in names if name not in variants]
    if unknown:
        raise ValueError(f"no variant {unknown[0]}; there are: {', '.join(variants)}")
    return names


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else math.nan


def with_spread(values, digits):
    return f"{statistics.mean(values):.{digits}f} ± {spread(values):.{digits}f}" if len(values) > 1 else f"{values[0]:.{digits}f}"


def heading(options, flat, what):
    """What stands over every table: how it was measured."""
    device = flat.get("device", train.find_device("auto"))
    return (f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {device}; data/{flat['data']}, {what}, lr {flat['lr']:g}, "
            f"{flat['batch_size']} × {flat['context']} tokens a step, seeds 1 to {options['seeds']}; ± is the standard deviation over seeds. "
            f"Tokens/s: a step of each in turn, median of 7{', in processor time' if by_processor() else ''}.")


# ----------------------------------------------------------------------------------------------------------------------

def ablate(arguments):
    options, given = read_options(arguments)
    variants = ablations(options["size"], given)
    names, rows = chosen(variants, options["only"]), {}
    for seed in range(1, options["seeds"] + 1):                            # seed by seed: a study that is stopped has whole columns
        for name in names:
            flat = settings_of(options["size"], options["tokens"], seed, given, variants[name][1])
            if options["label"] and finished(flat, ""):                    # beside a labelled run stands the one without, if it is there
                rows.setdefault((name, ""), []).append(finished(flat, ""))
            rows.setdefault((name, options["label"]), []).append(run(name, flat, options["label"]))
    fast = dict(zip(names, speeds([settings_of(options["size"], options["tokens"], 1, given, variants[name][1]) for name in names])))
    print(heading(options, flat, f"size {options['size']}, {tokens_of(flat):,} tokens") + " Δ: against K3 with the same seed, * where zero "
          "lies outside its 95% interval. Max violation: of the worst layer, mean over the last half of the steps.\n")
    print("| | active parameters | validation, bits per byte | Δ to K3 | tokens/s | max violation | largest activation |\n" + "|---" * 7 + "|")
    k3 = rows.get(("k3", "")) or rows.get(("k3", options["label"]))
    t95 = {2: 12.7, 3: 4.3, 4: 3.18, 5: 2.78}.get(options["seeds"], 2.6)   # Student's t, two-sided
    for (name, label), lines in rows.items():
        bits, violation, largest = ([line[figure] for line in lines] for figure in ("val_bits_per_byte", "max_violation", "largest"))
        delta = [a["val_bits_per_byte"] - b["val_bits_per_byte"] for a, b in zip(lines, k3 or [])]
        sure = len(delta) > 1 and abs(statistics.mean(delta)) > t95 * spread(delta) / len(delta) ** 0.5
        difference = "" if not delta or lines is k3 else f"{statistics.mean(delta):+.4f} ± {spread(delta):.4f}{' *' if sure else ''}"
        old = "" if all(line["source"] == SOURCE for line in lines) else " †"
        what = variants[name][0] + (f" ({label})" if label else "") + old
        print(f"| {what} | {lines[0]['active']:,} | {with_spread(bits, 4)} | {difference} | {fast[name]:,.0f} | "
              f"{'' if math.isnan(violation[0]) else with_spread(violation, 2)} | {with_spread(largest, 1)} |")
    if any(line["source"] != SOURCE for lines in rows.values() for line in lines):
        print("† run with other sources than the present ones; --label=… runs it anew beside the old")


def gpt(arguments):
    """The architecture's gain and the optimizer's: K3 with a fifth and with two fifths of the tokens that the plain GPTs have."""
    options, given = read_options(arguments, tokens=2_000_000)
    variants = ablations(options["size"], given)
    names = chosen(variants, options["only"])
    rows = [(name, part) for name, part in (("gpt_adamw", 1.0), ("gpt_muon", 1.0), ("k3", 0.4), ("k3", 0.2)) if name in names]
    flats = {row: settings_of(options["size"], options["tokens"] * row[1], 1, given, variants[row[0]][1]) for row in rows}
    lines = {row: [] for row in rows}
    for seed in range(1, options["seeds"] + 1):
        for row in rows:
            lines[row].append(run(row[0], {**flats[row], "seed": seed}, options["label"]))
    fast = dict(zip(rows, speeds(list(flats.values()))))
    print(heading(options, flats[rows[-1]], f"size {options['size']}") + " Seconds: tokens by tokens/s.\n")
    print("| | active parameters | lr | tokens | tokens/s | seconds | validation, bits per byte |\n|---|---|---|---|---|---|---|")
    for row in rows:
        tokens, bits = tokens_of(flats[row]), [line["val_bits_per_byte"] for line in lines[row]]
        print(f"| {variants[row[0]][0]} | {lines[row][0]['active']:,} | {flats[row]['lr']:g} | {tokens:,} | {fast[row]:,.0f} | "
              f"{tokens / fast[row]:.0f} | {with_spread(bits, 4)} |")


def scaling(arguments):
    """Five sizes, tokens in proportion to the active parameters; for each variant a line log loss = a − b log compute."""
    options, given = read_options(arguments, only="k3,attn_none,dense,gpt_muon", sizes="32,48,64,80,96", ratio=2.0, seeds=1)
    if not all(d.isdigit() for d in options["sizes"].split(",")) or options["sizes"].count(",") < 2:
        raise ValueError(f"--sizes={options['sizes']}: expected at least three widths, such as 32,48,64: a line through two has no error")
    widths = [int(d) for d in options["sizes"].split(",")]
    names, points = chosen(ablations(widths[0], given), options["only"]), {}
    for d in widths:
        variants = ablations(d, given)
        with torch.device("meta"):
            active = K3(base_config(d, given)).num_active_params()         # K3's, so that all variants of a size see the same tokens
        for name in names:
            for seed in range(1, options["seeds"] + 1):
                flat = settings_of(d, options["ratio"] * active, seed, given, variants[name][1])
                line = run(name, flat, options["label"])
                points.setdefault(name, []).append((6 * line["active"] * tokens_of(flat), line["val_bits_per_byte"]))
    what = f"widths {options['sizes']}, {options['ratio']:g} tokens for each active parameter"
    print(heading(options, flat, what) + " Compute C: 6 · active parameters · tokens.\n")
    computes = " ".join(f"{c:.1e}" for c, _ in points[names[0]][::options["seeds"]])
    print(f"| | bits per byte at C = {computes} | fit: bits per byte | fit error | compute for K3's loss |\n|---|---|---|---|---|")
    fits = {name: power_law(*zip(*p)) for name, p in points.items()}
    for name, p in points.items():
        a, b, error, slope_error = fits[name]
        means = [statistics.mean(loss for _, loss in p[i:i + options["seeds"]]) for i in range(0, len(p), options["seeds"])]
        fit = f"{math.exp(a):.2f} · C^-{b:.4f} ± {slope_error:.4f}"
        print(f"| {variants[name][0]} | {' '.join(f'{loss:.3f}' for loss in means)} | {fit} | {error:.2%} | {crossing(fits, points, name)} |")
    large = "--data=corpus --vocab_size=50304 --n_layer=12 --batch_size=64 --context=1024 --lr=4e-3 --weight_decay=0.1"
    print(f"""
on a GPU, ten times as wide, with a corpus as for config/gpu_small.py:
    python data/prepare.py path/to/texts --name=corpus --tokenizer=gpt2
    python bench.py scaling --sizes=256,384,512,768,1024 --ratio=20 {large}
    python bench.py ablate --size=768 --tokens=2_000_000_000 {large}""")


def power_law(compute, loss):
    """Least squares of log loss = a − b log compute → a, b, the root mean square of what is left (a relative error), the standard error of b."""
    x, y = np.log(compute), np.log(loss)
    slope, a = np.polyfit(x, y, 1)
    left = y - a - slope * x
    rms = float(np.sqrt((left ** 2).sum() / max(1, len(x) - 2)))
    return float(a), float(-slope), rms, rms / float(np.sqrt(((x - x.mean()) ** 2).sum()))


def crossing(fits, points, name):
    """How a variant's line lies to K3's: the compute it needs for the loss that K3 has at the largest size, and where the two meet, if they do."""
    if "k3" not in fits or name == "k3":
        return ""
    (a, b, *_), (a3, b3, *_) = fits[name], fits["k3"]
    largest = max(c for c, _ in points["k3"])
    needed = math.exp((a - (a3 - b3 * math.log(largest))) / b) / largest   # log loss of K3 at `largest`, reached by the other line
    at = math.exp((a - a3) / (b - b3)) if abs(b - b3) > 1e-9 and abs((a - a3) / (b - b3)) < 200 else math.inf
    slope = "steeper" if b > b3 else "flatter"
    where = f"meets K3's line at {at:.0e}" if largest / 1000 < at < largest * 1000 else "does not meet K3's line within a factor of 1000"
    return f"{needed:.2f} × at the largest; {slope}, {where}"


# ----------------------------------------------------------------------------------------------------------------------
# Long context: there are no positions, so a model that was trained on 256 tokens can be read at any length

class Needles:
    """
    Batches of text in which pairs are planted, "mark key value", and asked for later, "mark key" → value. The mark is a token that the text
    never has, keys and values are drawn from its commonest ones. Only slots of three tokens are overwritten. In training a pair stands there
    `times` times, at random places, so all but its first are questions.
    """

    def __init__(self, folder, meta, pairs, times, words=16):
        self.tokens, self.pairs, self.times = prepare.open_tokens(folder, "train", meta), pairs, times
        counts = np.bincount(self.tokens, minlength=meta["vocab_size"])
        unused = np.flatnonzero(counts == 0)
        if not len(unused):
            raise ValueError(f"{folder}: every token of the vocabulary occurs, none is free to mark a needle; use a byte-level tokenizer or a BPE")
        self.mark, self.words = int(unused[0]), np.argsort(-counts, kind="stable")[:min(words, np.count_nonzero(counts))]

    def draw(self, random):
        """→ keys, values (pairs): keys all different."""
        return random.choice(self.words, self.pairs, replace=False), random.choice(self.words, self.pairs)

    def batch(self, key, batch_size, context):
        """As train.get_batch: x, y (batch_size, context)."""
        x, y = train.get_batch(self.tokens, batch_size, context, key)
        rows, random = torch.cat([x, y[:, -1:]], 1), np.random.default_rng((*key, 1))              # (B, context + 1)
        for row in rows:
            slots = random.choice((context + 1) // 3, self.times * self.pairs, replace=False)
            for slot, pair in zip(slots, self.times * list(zip(*self.draw(random)))):
                row[3 * slot:3 * slot + 3] = torch.tensor([self.mark, *pair])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@torch.no_grad()
def read_long(r, needles, rows, reach):
    """
    A trained run, `rows` stretches of `reach` validation tokens that begin with the pairs → {tokens read before the question: (found, asked)}
    and nats (rows, reach) of every token, read in one go, and again in windows of 256 that know nothing of each other.
    """
    model, val = r.model.eval(), prepare.open_tokens(r.folder, "val", r.meta)
    starts = np.linspace(0, len(val) - reach - 1, rows).astype(np.int64)   # they overlap where the text is short
    x, y = train.get_windows(val, starts, reach)                           # (rows, reach)
    random, planted = np.random.default_rng(7), x.clone()
    pairs = [list(zip(*needles.draw(random))) for _ in range(rows)]
    for row, their in zip(planted, pairs):
        row[:3 * needles.pairs] = torch.tensor([token for pair in their for token in (needles.mark, *pair)])
    x, y, planted = (z.to(r.device) for z in (x, y, planted))
    nats = lambda logits, y: F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    cache, found, long = model.new_cache(rows), {}, []
    for start, end in itertools.pairwise([0, 16, 64, *range(256, reach + 1, 256)]):
        piece = slice(start, end)
        with r.autocast:
            logits = model(planted[:, piece], cache=cache)[0]
        long.append(nats(logits, y[:, piece]))
        if end in (16, 64, 256, 1024, 4096, 16384, 65536):
            right = 0
            for i in range(needles.pairs):
                ask = torch.tensor([[needles.mark, their[i][0]] for their in pairs], device=r.device)
                with r.autocast:
                    answer = model(ask, cache=copy.deepcopy(cache), last_only=True)[0].argmax(-1).flatten()
                right += sum(a == their[i][1] for a, their in zip(answer.tolist(), pairs))
            found[end] = right, rows * needles.pairs
    with r.autocast:
        windows = [nats(model(x[:, i:i + 256])[0], y[:, i:i + 256]) for i in range(0, reach, 256)]
    return found, torch.cat(long, 1).cpu(), torch.cat(windows, 1).cpu()


def long(arguments):
    options, given = read_options(arguments, tokens=1_000_000, only="kda,k3,mla", seeds=1, reach=65536, rows=2)
    given = {"context": 256, "batch_size": 4, "lr": 1.6e-2, **given}
    variants = {name: v for name, v in ablations(options["size"], given).items() if "gpt" not in v[1]}         # those have positions
    for seed in range(1, options["seeds"] + 1):
        for name in chosen(variants, options["only"]):
            flat = settings_of(options["size"], options["tokens"], seed, given, variants[name][1])
            r = Run(flat)
            needles = Needles(r.folder, r.meta, pairs=4, times=6)
            if r.meta["val_tokens"] <= options["reach"]:
                raise ValueError(f"--reach={options['reach']}: data/{flat['data']} has {r.meta['val_tokens']} validation tokens; give more text, "
                                 "or reach less far")
            r.batches = lambda step, batch_size, context: needles.batch((seed, step), batch_size, context)
            figures = r.fit()
            found = read_long(r, needles, 24, min(options["reach"], 4096))[0] if options["reach"] >= 4096 else {}      # short ones many times
            far, nats, windows = read_long(r, needles, options["rows"], options["reach"])
            found = {**far, **found}
            print(f"{variants[name][0]}, seed {seed}, {figures['active']:,} active, {tokens_of(flat):,} tokens in windows of {flat['context']}: "
                  f"{figures['val_bits_per_byte']:.4f} bits per byte at {flat['context']}")
            print("  needle found after   " + "   ".join(f"{far:,}: {right / asked:.0%} of {asked}" for far, (right, asked) in sorted(found.items())))
            edges = [e for e in (256, 1024, 4096, 16384, 65536) if e <= options["reach"]]
            line = []
            for low, high in zip(edges, edges[1:]):
                bits = r.bits() * (nats - windows)[:, low:high].reshape(-1, 256).mean(1)           # by blocks of 256, whose scatter is the noise
                noise = bits.std() / len(bits) ** 0.5
                line.append(f"{low:,} to {high:,}: {r.bits() * nats[:, low:high].mean():.3f} ({bits.mean():+.3f} ± {noise:.3f})")
            print("  bits per byte at positions (and against windows of 256)   " + "   ".join(line), flush=True)


STUDIES = dict(ablate=ablate, gpt=gpt, long=long, scaling=scaling)
