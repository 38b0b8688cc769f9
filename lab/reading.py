"""
How well a model reads after config/reading.py, and what its tower costs.

    python -m lab.reading read [out/reading]    error rates by greedy decoding: unseen lines in seen
                                                faces, random digits, a face held out, lines longer
                                                than any trained; the loss with another's image; the
                                                loss of plain text
    python -m lab.reading picture [out/reading] assets/reading.png: five images, and what it reads
    python -m lab.reading tower                 the tower against a plain ViT of torch's own modules
    python -m lab.reading released              one 640 × 480 image through a tower of K3's size
    python -m lab.reading ablate [--steps=800]  config/reading.py in five forms, three seeds each:
                                                as it is, without rotation, without the table, with
                                                LayerNorm and biases, AdamW for Muon. Hours
"""
import random
import resource
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import cli
import train
import vision
from checkpoint import load_model
from data import images, prepare, reading, tokenizer
from lab.study import in_turn, now
from sizes import K3Config

COUNT = 200                 # lines of each kind


# --------------------------------------------------------------------------------------------------
# How well it reads

def read(folder="out/reading"):
    """Everything that a trained model can be asked."""
    model, enc = load_model(folder, "cpu")
    for name, documents in kinds().items():
        errors, length, right = 0, 0, 0
        for document, text in zip(documents, greedy(model, enc, documents)):
            errors += edits(text, document[1])
            length += len(document[1])
            right += text == document[1]
        print(f"{name:40} {errors / length:6.1%} of characters wrong, "
              f"{right / len(documents):4.0%} of lines right")
    documents = kinds()["unseen lines, seen faces"]
    others = documents[1:] + documents[:1]
    own = loss(model, enc, documents)
    swapped = loss(model, enc, [[b[0], a[1]] for a, b in zip(documents, others)])
    print(f"loss of what is read {own:.3f} nats per byte, with another line's image {swapped:.3f}")
    print(f"loss of plain text {plain_loss(model, enc):.3f} nats per byte")


def plain(folder):
    """The last line of read, for a model without a tower."""
    model, enc = load_model(folder, "cpu")
    print(f"loss of plain text {plain_loss(model, enc):.3f} nats per byte")


def kinds(count=COUNT):
    """{what: documents}, each an image and its text, none of them in the training set."""
    lines, held_out, longest = reading.known_and_new()[1], [reading.HELD_OUT], 2 * reading.LONGEST
    long = reading.phrases(reading.split_text()[1], reading.LONGEST + 1, longest)

    def some(kind, lines, faces=reading.FACES):
        rng = random.Random(f"{kind} {len(lines)} {faces[0]}")
        return [reading.sample(kind, lines, rng, faces) for _ in range(count)]
    return {
        "unseen lines, seen faces": some("text", lines),
        "random digits, seen faces": some("digits", lines),
        f"unseen lines in {reading.HELD_OUT}, held out": some("text", lines, held_out),
        f"random digits in {reading.HELD_OUT}, held out": some("digits", lines, held_out),
        f"lines of {reading.LONGEST + 1} to {longest} characters": some("text", long),
    }


@torch.no_grad()
def greedy(model, enc, documents):
    """
    What the model reads in the images of documents, each likeliest token by token. Documents whose
    images take as many tokens are read together.
    """
    end, texts, alike = tokenizer.end_of_text(enc), [""] * len(documents), {}
    for number, document in enumerate(documents):
        ids, patches, [(_, _, h, w)] = images.encode(enc, document[:1], model.config.vit_patch)
        alike.setdefault(len(ids), []).append((number, ids, patches, (h, w)))
    for group in alike.values():
        numbers, ids, patches, grids = zip(*group)
        seen = torch.from_numpy(np.concatenate(patches)), grids
        tokens = torch.empty(len(ids), 0, dtype=torch.int64)
        for token in model.generate(torch.tensor(ids), 80, temperature=0, images=seen,
                                    stream=True, vocab_size=enc.n_vocab):
            tokens = torch.cat([tokens, token], dim=1)  # (documents, read so far)
            if (tokens == end).any(1).all():
                break
        for number, row in zip(numbers, tokens.tolist()):
            texts[number] = enc.decode(row[:row.index(end)] if end in row else row)
    return texts


def edits(a, b):
    """The least number of characters to insert, delete or replace to turn a into b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (x != y))
    return row[-1]


@torch.no_grad()
def loss(model, enc, documents):
    """Nats per byte of the texts that follow the images, end of text included."""
    total = count = 0
    for document in documents:
        ids, patches, found = images.encode(enc, document, model.config.vit_patch)
        x = torch.tensor([[*ids, tokenizer.end_of_text(enc)]])
        y = x[:, 1:].clone()
        y[:, :len(ids) - len(document[1].encode()) - 1] = -1
        seen = torch.from_numpy(patches), [(h, w) for _, _, h, w in found]
        targets = (y != -1).sum().item()
        total += model(x[:, :-1], y, images=seen)[1].item() * targets
        count += targets
    return total / count


@torch.no_grad()
def plain_loss(model, enc, context=256, windows=256):
    """Nats per byte of the validation text, in windows."""
    ids = tokenizer.encode(enc, reading.split_text()[1]).astype(np.int64)
    starts = np.linspace(0, len(ids) - context - 1, windows).astype(np.int64)
    losses = []
    for some in np.array_split(starts, windows // 16):
        losses.append(model(*train.get_windows(ids, some, context))[1].item())
    return sum(losses) / len(losses)


def picture(folder="out/reading", path="assets/reading.png"):
    """Five lines as the model gets them, and below each what it reads."""
    from PIL import Image, ImageDraw
    model, enc = load_model(folder, "cpu")
    documents = [documents[0] for documents in kinds(count=1).values()]
    sheet = Image.new("RGB", (max(d[0].shape[1] for d in documents) * 2 + 24, 62 * 5), "white")
    for i, (document, text) in enumerate(zip(documents, greedy(model, enc, documents))):
        line = Image.fromarray(document[0])
        sheet.paste(line.resize((line.width * 2, line.height * 2)), (12, 62 * i + 6))
        font = reading.face("DejaVuSansMono", 13)
        ImageDraw.Draw(sheet).text((12, 62 * i + 41), text, "black", font)
    sheet.save(path)
    print(f"wrote {path}")


# --------------------------------------------------------------------------------------------------
# What the tower costs

class PlainViT(nn.Module):
    """A pre-norm ViT of torch's own modules with as many numbers as the tower of a config."""

    def __init__(self, config, patches):
        super().__init__()
        c, D = config, config.vit_width
        numbers = 4 * D * c.vit_attn_width + 2 * D * c.vit_mlp_width       # of a block's matrices
        layer = nn.TransformerEncoderLayer(
            D, c.vit_heads, (numbers - 4 * D * D) // (2 * D), dropout=0.0, activation=F.gelu,
            batch_first=True, norm_first=True, bias=False)
        self.patch_map = nn.Linear(3 * c.vit_patch ** 2, D, bias=False)
        self.table = nn.Parameter(torch.randn(patches, D) * 0.1)
        norm = nn.LayerNorm(D, bias=False)
        self.blocks = nn.TransformerEncoder(layer, c.vit_layers, norm, enable_nested_tensor=False)
        self.projector = nn.Sequential(
            nn.Linear(4 * D, 4 * D, bias=False), nn.GELU(), nn.Linear(4 * D, c.n_embd, bias=False),
            nn.LayerNorm(c.n_embd, bias=False))

    def forward(self, x):
        """x (images, patches, 3·p²) → (images · patches/4, d)"""
        x = self.blocks(self.patch_map(x) + self.table)
        return self.projector(x.reshape(-1, 4 * x.shape[-1]))


def tower():
    """Forward and backward, in turn. All images have one size: a plain ViT knows no other."""
    config = K3Config(vit_layers=4, media_pad=0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; config/reading.py's "
          "tower against a plain ViT, forward and backward, medians of 9 in turn")
    for count, (h, w) in ((64, (2, 12)), (44, (2, 22)), (16, (16, 16)), (4, (32, 32))):
        torch.manual_seed(0)
        ours, plain = vision.VisionTower(config), PlainViT(config, h * w)
        patches = torch.randn(count * h * w, 3 * config.vit_patch ** 2)
        sizes = [sum(p.numel() for p in m.parameters()) for m in (ours, plain)]

        def step(model, *inputs):
            model.zero_grad()
            model(*inputs).square().sum().backward()
        a, b = in_turn(9, lambda: step(ours, patches, [(h, w)] * count),
                       lambda: step(plain, patches.view(count, h * w, -1)), clock=now)
        print(f"  {count} images of {h} × {w} patches: {a * 1000:.0f} and {b * 1000:.0f} ms, ratio "
              f"{a / b:.2f} (aim 1.2); {sizes[0]:,} and {sizes[1]:,} parameters, table included")


@torch.no_grad()
def released():
    """K3's tower, with random weights in bf16, on one image."""
    torch.manual_seed(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.set_default_dtype(torch.bfloat16)
    ours = vision.VisionTower(K3Config.k3())
    torch.set_default_dtype(torch.float32)
    weights = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    image = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    began = now()
    patches, grid = vision.preprocess(image)
    ready = now()
    features = ours(patches, [grid])
    seconds, peak = now() - ready, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"640 × 480 → {len(patches):,} patches, {len(features)} features; "
          f"{sum(p.numel() for p in ours.parameters()):,} parameters in bf16, "
          f"{torch.get_num_threads()} threads: preprocessing {(ready - began) * 1000:.0f} ms, "
          f"tower {seconds:.1f} s; memory {(weights - before) / 1e6:.2f} GB with the weights, "
          f"{(peak - before) / 1e6:.2f} GB at most")


# --------------------------------------------------------------------------------------------------
# What its parts bring

class Biased(nn.Module):
    """A linear map or norm of the tower with what K3 leaves out: biases, and means in norms."""

    def __init__(self, module):
        super().__init__()
        self.weight, self.is_norm = module.weight, not isinstance(module, nn.Linear)
        self.in_features = getattr(module, "in_features", 0)
        self.bias = nn.Parameter(torch.zeros(len(module.weight)))

    def forward(self, x):
        if self.is_norm:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def without_rotation(model):
    model.vision.turn = lambda h, w: torch.ones(
        h * w, model.config.vit_attn_width // model.config.vit_heads // 2, dtype=torch.complex64)


def without_table(model):
    with torch.no_grad():
        model.vision.table.zero_()
    model.vision.table.requires_grad_(False)


def layer_norm_with_biases(model):
    for module in list(model.vision.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) or type(child).__name__ == "RMSNorm":
                setattr(module, name, Biased(child))


def ablate(*arguments):
    """Each form is a run of train.py whose model is changed after it is made."""
    given, _ = cli.options(list(arguments), dict(steps=800, seeds=3))
    forms = {"as it is": None, "no rotation": without_rotation, "no table": without_table,
             "LayerNorm, biases": layer_norm_with_biases, "AdamW": None}
    made = train.K3
    for name, change in forms.items():
        for seed in range(1, given["seeds"] + 1):
            def make(config, change=change):
                model = made(config)
                if change:
                    change(model)
                return model
            train.K3 = make
            out_dir = f"out/reading_{name.replace(', ', '_').replace(' ', '_')}_{seed}"
            settings = [f"--steps={given['steps']}", f"--seed={seed}", f"--out_dir={out_dir}"]
            if name == "AdamW":
                settings.append("--optimizer=adamw")
            with train.Run(["config/reading.py", *settings], train.Ranks()) as run:
                train.loop(run)
                run.model.eval()
                documents = kinds()
                for kind in ("unseen lines, seen faces", "random digits, seen faces"):
                    figure = loss(run.model, run.data.enc, documents[kind])
                    print(f"{name}, seed {seed}: {kind}: {figure:.3f} nats per byte", flush=True)
    train.K3 = made


TASKS = dict(read=read, plain=plain, picture=picture, tower=tower, released=released, ablate=ablate)


def main(arguments):
    name, *rest = arguments or [""]
    if name not in TASKS:
        raise ValueError(f"no task {name!r}; there are: {', '.join(TASKS)}")
    if not (prepare.HERE / "shakespeare").exists() and name in ("read", "picture", "ablate"):
        print("the lines come from Shakespeare, which is fetched now", file=sys.stderr)
    Path("assets").mkdir(exist_ok=True)
    TASKS[name](*rest)


if __name__ == "__main__":
    cli.run(main, __doc__)
