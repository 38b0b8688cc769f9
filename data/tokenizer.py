"""
Text to token ids and back. Every tokenizer here is a `tiktoken.Encoding`, built from

    pattern     a regular expression that splits text into pieces
    ranks       bytes → id; within a piece, the pair with the lowest id merges first
    special     name → id: end-of-text and others, which no text encodes to

They are stored together, and travel with a data set and a checkpoint (to_dict, from_dict):

    {"name": "bpe", "pattern": "…", "ranks": the text of a .tiktoken file,
     "special": {"<|endoftext|>": 1023}}

make() knows these:

    bytes           the 256 bytes and end-of-text
    bpe             byte-level BPE, trained by rustbpe on your own text
    gpt2, o200k_…   tiktoken's own, which it downloads or finds in its cache
    PATH            a ranks file: K3's tiktoken.model, a prepared data set's tokenizer.tiktoken,
                    GPT-2's r50k_base.tiktoken, …

All of them contain the 256 single bytes, so there is no unknown text. Text is always ordinary:
"<|endoftext|>" in a document is thirteen characters. The separator of documents is added by id.
"""
import base64
import codecs
import difflib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import tiktoken

from cli import first_line

END = "<|endoftext|>"
VOCAB_SIZE = 4096      # of a BPE, unless told otherwise; K3Config has the same
MOST_TOKENS = 1 << 20
MOST_BYTES = 64 << 20  # of a file that a tokenizer is read from; K3's has 3 MB

# GPT-4's: letters with one leading mark, digits by three, punctuation with its line ends, blanks.
# Training and use both take it from here.
PATTERN = "|".join([
    r"'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
GPT2_PATTERN = "|".join([
    r"'(?:[sdmt]|ll|ve|re)", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)", r"\s+"])
# K3's: runs of Han characters stand alone; a word is capitals, then small letters, then an English
# ending.
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
WORD = r"[^\r\n\p{L}\p{N}]?%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
K3_PATTERN = "|".join([
    r"[\p{Han}]+", WORD % f"{UPPER}*{LOWER}+", WORD % f"{UPPER}+{LOWER}*", r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
# K3's special tokens are the 256 ids after its ranks. These have a name; build() names the others.
K3_SPECIAL = {"[BOS]": 0, "[EOS]": 1, "<|end_of_msg|>": 2, "<|open|>": 3, "<|close|>": 4,
              "<|sep|>": 5, "<|media_begin|>": 18, "<|media_content|>": 19, "<|media_end|>": 20,
              "<|media_pad|>": 21, "[UNK]": 254, "[PAD]": 255}
MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")   # of an image


# ---- making one

def make(which, texts=(), vocab_size=VOCAB_SIZE):
    """
    bytes | bpe | a name of tiktoken's | a path → tiktoken.Encoding.
    texts, an iterator of str, and vocab_size are for bpe, which learns from them.
    """
    if which == "bytes":
        return build("bytes", r"[\s\S]", {bytes([b]): b for b in range(256)}, {END: 256})
    if which == "bpe":
        return train_bpe(texts, vocab_size)
    names = tiktoken.list_encoding_names()
    if which in names:
        return from_tiktoken(which)
    path = os.path.expanduser(which)
    if Path(path).is_file() or os.sep in path or path.endswith((".model", ".tiktoken")):
        return from_file(path)
    near = difflib.get_close_matches(which, ["bytes", "bpe", *names], 1)
    hint = f", did you mean {near[0]}?" if near else "."
    raise ValueError(f"no tokenizer {which!r}{hint} There are: bytes, bpe, {', '.join(names)}, or "
                     "the path of a ranks file")


def build(name, pattern, ranks, special, size=0):
    """
    The one place that makes an Encoding. Every id from 0 to n_vocab − 1 (to size − 1, if that is
    more) gets a token, so a model can never sample one without.
    """
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        shown = " ".join(f"{b:02x}" for b in missing[:8]) + (" …" if len(missing) > 8 else "")
        raise ValueError(f"tokenizer {name}: {len(missing)} of the 256 single bytes have no rank "
                         f"(hex {shown}), so some text could not be encoded; get a complete ranks "
                         "file")
    ids = [*ranks.values(), *special.values()]
    used = {i for i in ids if type(i) is int and 0 <= i < MOST_TOKENS}
    if len(used) < len(ids):
        raise ValueError(f"tokenizer {name}: its ids must be distinct and between 0 and "
                         f"{MOST_TOKENS - 1}; the file is spoiled or cut short")
    last = max(max(used), size - 1)
    reserved = {f"<|reserved_token_{i}|>": i for i in range(last + 1) if i not in used}
    try:
        return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                                 special_tokens={**special, **reserved})
    except ValueError as error:
        why = first_line(error)
        raise ValueError(f"tokenizer {name}: its pattern is {pattern[:80]!r} ({why}); the file is "
                         "spoiled") from None


def train_bpe(texts, vocab_size):
    """
    A BPE of vocab_size tokens, end-of-text counted, from an iterator of str. It gets fewer if the
    text runs out of pairs.
    """
    if not 257 <= vocab_size <= MOST_TOKENS:
        raise ValueError(f"vocab_size is {vocab_size}; it must be 257 or more, 256 bytes and "
                         f"end-of-text, and at most {MOST_TOKENS}")
    try:
        import rustbpe
    except ImportError:
        raise ValueError("training a BPE needs rustbpe: pip install rustbpe (or use "
                         "--tokenizer=bytes)") from None
    trainer = rustbpe.Tokenizer()
    texts = (part for text in texts for part in at_long_blanks(text))
    try:
        trainer.train_from_iterator(texts, vocab_size - 1, buffer_size=256, pattern=PATTERN)
    except BaseException as error:
        if type(error).__name__ != "PanicException":   # Rust's, and not an Exception
            raise
        raise ValueError(f"rustbpe failed: {error}") from None
    ranks = {}
    for token, _ in trainer.get_mergeable_ranks():
        # Two merges can spell the same bytes: the first one counts
        ranks.setdefault(bytes(token), len(ranks))
    return build("bpe", PATTERN, ranks, {END: len(ranks)})


def from_tiktoken(name):
    """tiktoken.get_encoding, with an error that says how to go on without a network."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    cache = Path(cache if cache is not None else Path(tempfile.gettempdir(), "data-gym-cache"))
    sizes = {}                                         # taken now: tiktoken deletes a spoiled file
    if cache.is_dir():
        sizes = {path.name: path.stat().st_size for path in cache.iterdir() if path.is_file()}
    try:
        enc = tiktoken.get_encoding(name)
    except Exception as error:
        url = getattr(getattr(error, "request", None), "url", None)
        if url is None:                                # not a failed download
            raise ValueError(f"tiktoken could not load {name}: {error}") from None
        file, key = url.rsplit("/", 1)[-1], hashlib.sha1(url.encode()).hexdigest()
        hint = ""
        if key in sizes:
            hint += f" A file was there, but spoiled or cut short ({sizes[key]} bytes)."
        if file in sizes:
            hint += f" There is a {cache / file}: rename it to that."
        raise ValueError(f"tokenizer {name} needs {file}, which could not be fetched "
                         f"({type(error).__name__}) and is not in tiktoken's cache as "
                         f"{cache / key}.{hint} Put it there (TIKTOKEN_CACHE_DIR or "
                         "DATA_GYM_CACHE_DIR name another folder), give the path of a ranks file "
                         "(--tokenizer=path/to/r50k_base.tiktoken is GPT-2's), or use bpe or "
                         "bytes") from None
    return build(name, enc._pat_str, enc._mergeable_ranks, enc._special_tokens)


def with_media(enc):
    """The same tokenizer with MEDIA among its special tokens."""
    return with_special(enc, MEDIA)


def with_special(enc, names):
    """The same tokenizer with these special tokens; those that it lacks come after all others."""
    missing = [name for name in names if name not in enc._special_tokens]
    added = {name: enc.n_vocab + i for i, name in enumerate(missing)}
    return build(enc.name, enc._pat_str, enc._mergeable_ranks, {**enc._special_tokens, **added})


# ---- reading one

def from_file(path):
    """
    A file of ranks → tiktoken.Encoding. What the file does not hold, pattern and special tokens,
    comes from meta.json beside it or from its name.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer file {path}; expected a tiktoken.model or .tiktoken "
                                "file")
    text = read_bytes(path).decode("latin-1")
    meta = path.with_name("meta.json")
    if path.suffix == ".tiktoken" and meta.is_file():  # another data set's
        beside = read_object(meta).get("tokenizer")
        return from_dict({**(beside if isinstance(beside, dict) else {}), "ranks": text})
    ranks = parse_ranks(text, path)
    if path.suffix == ".model":
        return released(path, ranks)
    free = set(range(len(ranks) + 1)).difference(ranks.values())
    end = min(free)                                    # as in GPT-2
    of_gpt2 = "gpt2" in path.name or "50k" in path.name
    return build(path.stem, GPT2_PATTERN if of_gpt2 else PATTERN, ranks, {END: end})


def read_bytes(path):
    """A file that a tokenizer is read from. Errors: ValueError if it is too large for one."""
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES >> 20} MB; it is no tokenizer's file")
    return content


def read_object(path):
    """A JSON file → dict. Errors: ValueError that names the file."""
    data = read_bytes(path)
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({str(error)[:100]}); the file is cut short or "
                         "spoiled, make or fetch it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object; make or fetch it again")
    return content


def parse_ranks(text, where):
    """Lines of a token in base64 and its rank → {token: rank}."""
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"{where}: line {number} is {line[:40]!r}, not a token in base64 and "
                             "its rank; the file is spoiled, cut short or no ranks file") from None
    return ranks


def released(path, ranks):
    """
    K3's tiktoken.model. Special tokens are those that tokenizer_config.json beside it names, at the
    ids it gives; then those of K3_SPECIAL whose name and id are free. The vocabulary is that of
    config.json beside it, without one the ranks and 256 more.
    """
    where, config_path = path.with_name("tokenizer_config.json"), path.with_name("config.json")
    settings, config = read_beside(where), read_beside(config_path)
    given = added_tokens(settings, where)
    pattern = settings.get("pat_str")
    if pattern is not None:                            # write_model's, with all special tokens
        if not isinstance(pattern, str):
            raise ValueError(f"{where}: pat_str is {str(pattern)[:80]}, expected a pattern; write "
                             "it anew")
        return build("released", pattern, ranks, given)
    first, vocab = max(ranks.values(), default=-1) + 1, config.get("vocab_size")
    if type(vocab) is not int or not first <= vocab <= 1 << 20:
        vocab = first + 256
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if type(config.get(name)) is int and not 0 <= config[name] < vocab:
            raise ValueError(f"{config_path}: {name} = {config[name]}, expected an id below "
                             f"{vocab}; fetch the files again")
    special = dict(given)
    for name, i in K3_SPECIAL.items():
        if name not in given and first + i not in given.values() and first + i < vocab:
            special[name] = first + i
    return build("k3", K3_PATTERN, ranks, special, vocab)


def read_beside(path):
    """A JSON object, the fields of its text_config among its own; {} if there is no such file."""
    if not path.is_file():
        return {}
    content = read_object(path)
    text = content.get("text_config")
    return content | (text if isinstance(text, dict) else {})


def added_tokens(settings, where):
    """tokenizer_config.json's added_tokens_decoder → {name: id}."""
    decoder = settings.get("added_tokens_decoder", {})
    try:
        given = {token["content"]: int(i) for i, token in decoder.items()}
        good = len(given) == len(decoder) and all(isinstance(name, str) and name for name in given)
    except (AttributeError, KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(f"{where}: expected added_tokens_decoder from ids to distinct contents; "
                         "fetch it again")
    return given


# ---- keeping one

def to_dict(enc):
    """All that makes the tokenizer, in str and int: for JSON and torch.load(weights_only=True)."""
    ranks = sorted(enc._mergeable_ranks.items(), key=lambda item: item[1])
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks]
    return {"name": enc.name, "pattern": enc._pat_str, "ranks": "".join(lines),
            "special": dict(enc._special_tokens)}


def from_dict(d):
    """to_dict's way back. Errors: ValueError if d is anything else."""
    kinds = {"name": str, "pattern": str, "ranks": str, "special": dict}
    given = d if isinstance(d, dict) else {}
    wrong = [key for key, kind in kinds.items() if not isinstance(given.get(key), kind)]
    if wrong:
        raise ValueError(f"stored tokenizer: {', '.join(wrong)} missing or of the wrong type; "
                         "prepare the data or save the checkpoint anew")
    ranks = parse_ranks(d["ranks"], f"tokenizer {d['name']}")
    return build(d["name"], d["pattern"], ranks, d["special"])


def write_model(enc, folder):
    """
    tiktoken.model and tokenizer_config.json, as K3 has them: from_file(folder/tiktoken.model) gives
    the same tokenizer again. Once more as tokenizer.json, for engines without the release's code.
    """
    d, ids = to_dict(enc), special_ids(enc)
    names = {i: name for name, i in d["special"].items()}
    plain = dict(lstrip=False, rstrip=False, single_word=False, normalized=False, special=True)
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "added_tokens_decoder": {str(i): {"content": names[i], **plain} for i in sorted(names)},
        **{name.removesuffix("_id"): names[i] for name, i in ids.items()},
        "unk_token": "[UNK]" if "[UNK]" in d["special"] else None,
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
        "pat_str": d["pattern"],
    }
    added = [{"id": i, "content": names[i], **plain} for i in sorted(names)]
    engines = tokenizer_json(enc._mergeable_ranks, d["pattern"], added)
    for file, text in (("tiktoken.model", d["ranks"]),
                       ("tokenizer_config.json", json.dumps(settings, indent=1)),
                       ("tokenizer.json", json.dumps(engines, ensure_ascii=False))):
        (folder / file).write_text(text, encoding="utf-8")


def tokenizer_json(ranks, pattern, added):
    """
    The content of tokenizer.json. Bytes are written as letters, GPT-2's way. There is a merge for
    every cut of a token into two tokens, those of lower ranks first.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    spelled = {token: "".join(letters[b] for b in token) for token in sorted(ranks, key=ranks.get)}
    merges = []
    for token in spelled:
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges += [[spelled[a], spelled[b]] for a, b in halves if a in spelled and b in spelled]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
             "invert": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "post_processor": None, "decoder": level, "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }


# ---- using one

def end_of_text(enc):
    """The id between documents: [EOS] in K3's tokenizer, <|endoftext|> in the others."""
    for name in (END, "[EOS]"):
        if name in enc._special_tokens:
            return enc._special_tokens[name]
    raise ValueError(f"tokenizer {enc.name} has neither {END} nor [EOS] to put between documents; "
                     "use another one")


def special_ids(enc):
    """For the configs of released weights: the ids that begin a text, end it, and pad it."""
    tokens, end = enc._special_tokens, end_of_text(enc)
    return dict(bos_token_id=tokens.get("[BOS]", end),
                eos_token_id=tokens.get("<|end_of_msg|>", end),
                pad_token_id=tokens.get("[PAD]", end))


def media_ids(enc):
    """The ids of MEDIA, or None if the tokenizer has no words for images."""
    ids = [enc._special_tokens.get(name) for name in MEDIA]
    return None if None in ids else ids


def token_dtype(vocab_size):
    """Of the ids in a data set's files."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def encode(enc, text):
    """str → ids, a uint32 array. Errors: ValueError for half a surrogate pair, never UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {text[error.start]!r} at position {error.start} of the text "
                         "is half a surrogate pair, which no tokenizer can take (often a byte that "
                         "is not UTF-8); remove it") from None
    try:
        return enc.encode_to_numpy(text, disallowed_special=())
    except ValueError as error:
        parts = list(at_long_blanks(text))
        if "stack size" not in str(error) or len(parts) == 1:
            raise
        return np.concatenate([enc.encode_to_numpy(part, disallowed_special=()) for part in parts])


# From a million blanks on, \s+(?!\S) has no answer for tiktoken or rustbpe; a run of others has.
LONG_BLANKS = re.compile(r"\s{999999,}")


def at_long_blanks(text):
    """A text in parts that can be encoded: cut, if anywhere, within such a run of blanks."""
    start = 0
    for run in LONG_BLANKS.finditer(text):
        for cut in range(run.start() + 500_000, run.end(), 500_000):
            yield text[start:cut]
            start = cut
    yield text[start:]


class StreamDecoder:
    """
    Ids → text, one at a time. A character can be spread over several tokens: it comes out whole,
    with the last of them. Joined, the pieces are enc.decode(ids). Special tokens come out as their
    names; stop at end_of_text(enc) before the push if you want none.
    """

    def __init__(self, enc):
        self.enc = enc
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token):
        try:
            return self.utf8.decode(self.enc.decode_single_token_bytes(token))
        except (KeyError, OverflowError):
            raise ValueError(f"token id {token} is not in the vocabulary (0 to "
                             f"{self.enc.n_vocab - 1})") from None

    def finish(self):
        """What is left: a character cut short by the end becomes a replacement mark."""
        return self.utf8.decode(b"", final=True)
