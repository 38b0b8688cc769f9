"""
What every program here does with its arguments, its text and its failures.

    options       --name=value on the command line, checked against the defaults
    read_settings the same for many settings with types, and from files of `name = value` lines
    describe      what --help says of settings: the comments beside them
    find_device   --device=auto
    read_text     a UTF-8 file, without a byte-order mark
    hold          a lock that ends with the process
    run           main(arguments) as a program: UTF-8 out, an expected failure in one line
"""
import ast
import contextlib
import difflib
import inspect
import math
import os
import re
import sys
from pathlib import Path

try:
    import fcntl
except ImportError:      # Windows
    import msvcrt
    fcntl = None


def options(arguments, defaults):
    """
    ["--top_k=5", "a.txt"] → ({name: value}, ["a.txt"]): all names of defaults, and what is no
    option. A value has the type of its default. Errors: ValueError that names the argument and what
    was expected.
    """
    types = {name: type(default) for name, default in defaults.items()}
    values, rest = dict(defaults), []
    for i, argument in enumerate(arguments):
        if not argument.startswith("-"):
            rest.append(argument)
            continue
        name, text = name_and_text(arguments, i, types)
        if name not in types:
            raise ValueError(f"unknown option {argument}; {did_you_mean(name, types, '--{}=…')}")
        kind = types[name]
        try:
            values[name] = {"True": True, "False": False}[text] if kind is bool else kind(text)
        except (ValueError, KeyError):
            expected = {int: "a whole number", float: "a number", bool: "True or False"}[kind]
            raise ValueError(f"{argument}: expected {expected}") from None
    return values, rest


def read_settings(arguments, types, may_be_none=()):
    """
    ["config/a.py", "--lr=2e-3"] → ({name: value}, "a"): what files of `name = value` lines and the
    command line give, in this order, and the name of the file. types: {name: type}; those in
    may_be_none also take None. Errors: ValueError that names the setting, and what was expected.
    """
    given, stem = {}, ""
    for i, argument in enumerate(arguments):
        if argument.startswith("-"):
            name, value = name_and_text(arguments, i, types)
            if types.get(name) is not str:
                with contextlib.suppress(ValueError, SyntaxError):         # else it is no literal
                    value = ast.literal_eval(value)
            values = {name: value}
        else:
            stem = Path(argument).stem
            values = read_config_file(argument)
        for name, value in values.items():
            none = value is None and name in may_be_none
            given[name] = None if none else checked(name, value, types)
    return given, stem


def name_and_text(arguments, i, types):
    """The argument --name=text → name, text. A bool may stand alone: --resume is --resume=True."""
    name, equals, text = arguments[i].lstrip("-").partition("=")
    if not equals and types.get(name, bool) is not bool:
        following = arguments[i + 1] if i + 1 < len(arguments) else "VALUE"
        raise ValueError(f"{arguments[i]}: expected an equals sign, {arguments[i]}={following}")
    return name, text if equals else "True"


def did_you_mean(name, names, form="{}", otherwise="--help shows them all"):
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {form.format(near[0])}?" if near else otherwise


def read_config_file(path):
    """`name = value` lines → dict. Parsed, never executed: a value is a literal."""
    if not os.path.isfile(path):
        hint = did_you_mean(path, [str(p) for p in Path("config").glob("*.py")],
                            otherwise="those that come with nanoK3 are in config/")
        raise ValueError(f"no config file {path}; {hint}")
    try:
        file = ast.parse(read_text(path))
    except SyntaxError as error:
        raise ValueError(f"{path}: {error}; a config file is plain `name = value` lines") from None
    values = {}
    for line in file.body[ast.get_docstring(file) is not None:]:
        try:
            (name,) = line.targets
            values[name.id] = ast.literal_eval(line.value)
        except (AttributeError, ValueError):
            raise ValueError(f"{path}, line {line.lineno}: expected `name = value` with a plain "
                             "value") from None
    return values


def checked(name, value, types):
    """→ the value in the type of its setting. Errors: ValueError, if it does not fit."""
    if name not in types:
        raise ValueError(f"unknown setting {name}; {did_you_mean(name, types)}")
    kind = types[name]
    if (type(value), kind) in ((int, float), (list, tuple)):
        value = kind(value)
    if type(value) is not kind:
        raise ValueError(f"{name} = {value!r}: expected {kind.__name__}, got "
                         f"{type(value).__name__}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name} = {value}: expected a finite number")
    return value


def describe(*kinds):
    """Every field of these dataclasses as an option, with its default and the comment beside it."""
    lines = []
    for kind in kinds:
        lines += ["", f"{kind.__name__}:"]
        source = inspect.getsource(kind).partition("    @")[0]             # up to the first method
        for line in source.splitlines():
            field = re.fullmatch(r"    (\w+): \w+ = (.*?)(?:  +# (.*))?", line)
            comment = re.fullmatch(r"    ( *)# (.*)", line)
            if field:
                name, default, text = field.groups()
                lines.append(f"    {f'--{name}={default}':<32} {text or ''}".rstrip())
            elif comment:
                inside, text = comment.groups()
                lines.append(f"{'':37}{text}" if inside else f"  {text}")
    return "\n".join(["", *lines])


def find_device(name):
    """"auto" or a name → "cuda", "mps" or "cpu". Errors: ValueError with what there is here."""
    import torch  # here: programs that need no device start at once
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    found = [device for device in here if here[device]] + ["cpu"]
    device = found[0] if name == "auto" else name
    if device not in found:
        hint = "; CUDA_VISIBLE_DEVICES chooses the GPU" if name.startswith("cuda:") else ""
        raise ValueError(f"device = {name!r}: not here; expected auto, {', '.join(found)}{hint}")
    return device


def read_text(path):
    """A UTF-8 file → str, without a byte-order mark. Errors: OSError; ValueError with a way out."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text (byte {error.start}); if it is Latin-1, convert "
                         f"it: iconv -f latin1 -t utf-8 {path} > new.txt") from None


def hold(file):
    """
    Lock an open file, or a folder's descriptor, until it is closed or the process ends → whether it
    worked: not if another process holds it. A disk without locks lets everybody.
    """
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass
    return True


def first_line(error):
    return (str(error).splitlines() or [""])[0][:150]


def is_out_of_memory(error):
    """Whether torch, on any device, or Python ran out of memory."""
    words = ("can't allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED",
             "Storage size calculation overflowed")
    return (isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            or any(word in str(error) for word in words))


def discard_output():
    """What is printed from now on goes nowhere, and so does what Python still holds."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(main, doc):
    """
    main(sys.argv[1:]) as a program. --help prints doc. ValueError, OSError and too little memory
    end it with one line and exit status 1; a reader that went away (`… | head`) ends it quietly.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):     # files and pipes get UTF-8, a terminal what it shows
            stream.reconfigure(errors="replace", encoding=None if stream.isatty() else "utf-8")
    try:
        if {"--help", "-h"} & set(sys.argv[1:]):
            print(doc.strip())
        else:
            main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
    except KeyboardInterrupt:
        sys.exit("\nstopped")
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            sys.exit(f"error: out of memory ({first_line(error)})")
        if isinstance(error, RuntimeError):
            raise
        sys.exit(f"error: {error}")
