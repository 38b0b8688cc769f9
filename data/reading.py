"""
A data set for learning to read: lines of text as images, and plain text beside them.

    python data/reading.py                    needs Pillow and matplotlib, for its faces
    python train.py config/reading.py

    --images=60000        to train on; half of them show lines of Shakespeare, half random digits,
                          where no knowledge of the language helps
    --seed=1

A line is 16 pixels high and as wide as its text, black on white in one of FACES, in a size and
place of its own. HELD_OUT is never trained on. Validation has lines that training does not have. It
writes data/reading/, as data/images.py says, in single bytes.
"""
import functools
import random
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))     # run as a script

from cli import options, run  # noqa: E402
from data import prepare, tokenizer  # noqa: E402
from data.corpus import shakespeare  # noqa: E402

PATCH, HEIGHT, LONGEST = 8, 16, 16          # pixels, pixels, characters
FACES = ("built-in", "DejaVuSans", "DejaVuSansMono", "DejaVuSerif")
HELD_OUT = "STIXGeneral"
KINDS = ("text", "digits")
VALIDATION = 400                            # images


# ---- drawing

@functools.cache
def face(name, size):
    from PIL import ImageFont
    if name == "built-in":
        return ImageFont.load_default(size)
    import matplotlib
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf", f"{name}.ttf"), size)


def draw(text, name, rng):
    """One line of text in a face → (16, W, 3) uint8. Size and place: rng."""
    from PIL import Image, ImageDraw
    font = face(name, rng.choice((11, 12, 13)))
    left, right = rng.randint(1, 6), rng.randint(1, 6)
    width = left + int(font.getlength(text)) + right
    image = Image.new("RGB", (width, HEIGHT), "white")
    base = 12 + rng.randint(-1, 0)
    ImageDraw.Draw(image).text((left, base), text, "black", font, anchor="ls")
    return np.asarray(image)


# ---- what is written in the images

def phrases(text, shortest=1, longest=LONGEST):
    """The distinct lines of a text, in order; of a longer one as many words as fit."""
    found = {}
    for line in text.splitlines():
        line = " ".join(line.split())
        if len(line) > longest:
            line = line[:longest + 1].rpartition(" ")[0]
        if len(line) >= shortest and line.isascii():
            found[line] = None
    return list(found)


def digits(rng, shortest=1, longest=LONGEST):
    return "".join(rng.choices("0123456789", k=rng.randint(shortest, longest)))


def split_text():
    """Shakespeare → (text to train on, text to validate on), as prepare.py splits it."""
    works = shakespeare()
    whole = "".join(works)
    cut = int(len(whole) * 0.9)
    return whole[:cut], whole[cut:]


def known_and_new():
    """
    Phrases to train on, and those of the validation text that are not among them. The former stand
    there once whole and once cut short after a word: what is short is learned first.
    """
    train, val = map(phrases, split_text())
    rng = random.Random(0)
    for line in train[:]:
        words = line.split()
        train.append(" ".join(words[:rng.randint(1, len(words))]))
    known = set(train)
    return train, [line for line in val if line not in known]


def sample(kind, lines, rng, faces=FACES):
    """→ a document: an image, and what it says."""
    text = rng.choice(lines) if kind == "text" else digits(rng)
    return [draw(text, rng.choice(faces), rng), text]


# ---- the command

def main(arguments):
    given, rest = options(arguments, dict(images=60000, seed=1))
    if rest or given["images"] < 1:
        raise ValueError("expected: python data/reading.py [--images=60000] [--seed=1]")
    texts = dict(zip(("train", "val"), split_text()))
    lines = dict(zip(texts, known_and_new()))
    enc = tokenizer.with_media(tokenizer.make("bytes"))

    def documents(split, count):
        """Plain text, as many bytes as an image and its line take tokens; then the images."""
        rng = random.Random(f"{given['seed']} {split}")
        yield [texts[split][:32 * count]]
        for i in range(count):
            yield sample(KINDS[i % 2], lines[split], rng)
    splits = dict(train=documents("train", given["images"]), val=documents("val", VALIDATION))
    meta = prepare.prepare_images(splits, "reading", enc, PATCH)
    print(f"{meta['train_images']:,} images and {meta['train_tokens']:,} tokens to train on, in "
          f"{prepare.HERE / 'reading'}")


if __name__ == "__main__":
    run(main, __doc__)
