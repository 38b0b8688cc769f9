"""
Text with images, once, before training; and its windows, for train.py. A document is a list of
parts, a str or an image; from a .jsonl file, one line each:

    {"text": "A cat: <|kimi_image_placeholder|> It sleeps.", "images": ["cat.png"]}

An image becomes

    <|media_begin|>image 640x480<|media_content|><|media_pad|> … <|media_end|>

with one pad per feature and the size it had when it came. Beside the files of a text data set
(prepare.py) stand

    train.pixels, val.pixels    uint8: the patches of all images, one after another (vision.cut)
    train.images, val.images    int64, five numbers an image: where <|media_begin|> stands, where
                                its first pad stands, rows and columns of its grid, its first patch
"""
import json
import warnings
from pathlib import Path

import numpy as np
import torch

from cli import first_line, read_text
from data import tokenizer
from vision import cut, shrink

MARK = "<|kimi_image_placeholder|>"


# ---- documents

def captions(path):
    """A .jsonl file → documents, one a line, without opening the images. Errors: ValueError."""
    documents = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text, names = entry["text"], entry.get("images", [])
            good = isinstance(text, str) and isinstance(names, list)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            good = False
        if not good or not all(isinstance(name, str) for name in names):
            raise ValueError(f'{where}: expected {{"text": "…", "images": ["a.png", …]}}')
        texts = text.split(MARK)
        if len(texts) != len(names) + 1:
            raise ValueError(f"{where}: the text has {MARK} {len(texts) - 1} times, for "
                             f"{len(names)} images; expected it once for each")
        files = [inside(Path(path).parent, name, where) for name in names]
        parts = [part for pair in zip(texts, files) for part in pair] + texts[-1:]
        documents.append([part for part in parts if part != ""])
    return documents


def inside(folder, name, where):
    """The path of an image, which must not leave the folder of the file that names it."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{where}: image {name!r} is outside {folder}; put it inside")
    if not path.is_file():
        raise ValueError(f"{where}: there is no image {folder / name}")
    return path


def read_image(path):
    """png, jpeg, webp, … → (H, W, 3) or, where pixels are transparent, (H, W, 4) uint8."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("images need Pillow: pip install pillow") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                return np.array(image.convert("RGBA" if image.has_transparency_data else "RGB"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"{path} is larger than Pillow's limit of {Image.MAX_IMAGE_PIXELS:,} "
                         "pixels; make it smaller") from None
    except FileNotFoundError:
        raise ValueError(f"there is no image {path}") from None
    except Exception as error:                     # each format has errors of its own
        why = first_line(error) or type(error).__name__
        raise ValueError(f"{path} is no image that Pillow can read ({why})") from None


# ---- documents to tokens and pixels

def encode(enc, document, patch, **limits):
    """
    Parts, each a str, the Path of an image or its pixels → ids, a list; patches (L, 3·p²) uint8;
    and for each image (where it begins, where its first pad stands, h, w).
    """
    ids, patches, images = [], [np.zeros((0, 3 * patch ** 2), np.uint8)], []
    for part in document:
        if isinstance(part, str):
            ids += tokenizer.encode(enc, part).tolist()
            continue
        pixels = read_image(part) if isinstance(part, Path) else part
        cells, (h, w) = cut(shrink(pixels, patch, **limits), patch)
        begin, content, end, pad = tokenizer.media_ids(enc)
        size = tokenizer.encode(enc, f"image {pixels.shape[1]}x{pixels.shape[0]}").tolist()
        start, head = len(ids), [begin, *size, content]
        ids += [*head, *[pad] * (h * w // 4), end]
        patches.append(cells)
        images.append((start, start + len(head), h, w))
    return ids, np.concatenate(patches), images


def write(files, split, documents, enc, patch, digest):
    """Documents → the files of a split, {name: path}, and what meta.json says of them."""
    dtype, special = tokenizer.token_dtype(enc.n_vocab), [*enc._special_tokens.values()]
    sizes = dict(documents=0, tokens=0, bytes=0, images=0, patches=0, pads=0)
    table = []
    token_path, pixel_path = files[f"{split}.bin"], files[f"{split}.pixels"]
    with open(token_path, "wb") as token_file, open(pixel_path, "wb") as pixel_file:
        for document in documents:
            ids, patches, images = encode(enc, document, patch)
            ids = np.array([*ids, tokenizer.end_of_text(enc)], dtype)
            at, first = sizes["tokens"], sizes["patches"]
            for begin, pads, h, w in images:
                table.append((at + begin, at + pads, h, w, first))
                first += h * w
                sizes["pads"] += h * w // 4
            # the bytes that the tokens stand for, the size written before an image included
            text = enc.decode_bytes(ids[~np.isin(ids, special)].tolist())
            for name, size in dict(documents=1, tokens=len(ids), bytes=len(text),
                                   images=len(images), patches=len(patches)).items():
                sizes[name] += size
            for file, numbers in ((token_file, ids), (pixel_file, patches)):
                digest.update(numbers.tobytes())
                file.write(numbers.tobytes())
    np.array(table, "<i8").tofile(files[f"{split}.images"])
    return sizes


# ---- reading it back, for train.py

class Images:
    """The images of a split of a data set, and windows of its tokens that hold them whole."""

    def __init__(self, folder, split, meta, enc):
        self.width, self.end = 3 * meta["patch"] ** 2, tokenizer.end_of_text(enc)
        self.pad = tokenizer.media_ids(enc)[-1]
        self.pixel_file = open(Path(folder) / f"{split}.pixels", "rb")
        table = np.fromfile(Path(folder) / f"{split}.images", "<i8").reshape(-1, 5)
        self.begins, self.pads, *grids, self.first_patches = table.T
        self.grids = np.stack(grids, axis=1)  # (images, 2): rows and columns of patches
        self.ends = self.pads + self.grids.prod(1) // 4  # where <|media_end|> stands

    def windows(self, tokens, starts, context):
        """
        The windows of tokens (n) that begin at starts (batch) → x, y (batch, context) int64, and
        for each the range of its images, all of whose pads it holds.

        One that would begin in an image, or in the text that follows it in its document, begins
        with the image if that is less than a window away. One that would end in an image ends
        before it, and is filled up with ends of text. There is no target for a pad.
        """
        x = np.full((len(starts), context), self.end, np.int64)
        y = np.full((len(starts), context), -1, np.int64)
        rows = []
        for i, start in enumerate(starts):
            image = np.searchsorted(self.begins, start, "right") - 1
            begin = self.begins[image] if image >= 0 else -context
            if start - begin < context and self.end not in tokens[begin:start]:
                start = begin
            stop = start + context
            first, last = np.searchsorted(self.begins, (start, stop))
            if last > first and self.ends[last - 1] > stop:
                last -= 1
                stop = self.begins[last]
            window = tokens[start:stop + 1].astype(np.int64)  # copied out of the file
            x[i, :stop - start] = window[:stop - start]
            targets = window[1:]
            y[i, :len(targets)] = np.where(targets == self.pad, -1, targets)
            rows.append(range(first, last))
        return torch.from_numpy(x), torch.from_numpy(y), rows

    def load(self, numbers):
        """Numbers of images → (patches (L, 3·p²) uint8, [(h, w)]), as K3.forward takes them."""
        pixels = [np.zeros((0, self.width), np.uint8)]
        if numbers:                                # a map anew each time, like Data.tokens
            pixel_map = np.memmap(self.pixel_file, np.uint8, "r").reshape(-1, self.width)
        for number in numbers:
            first = self.first_patches[number]
            pixels.append(pixel_map[first:first + self.grids[number].prod()])
        grids = [tuple(self.grids[number].tolist()) for number in numbers]
        return torch.from_numpy(np.concatenate(pixels)), grids

    def close(self):
        self.pixel_file.close()
