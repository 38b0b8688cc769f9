"""
What every program here does with its arguments, its text and its failures.

    options       --name=value on the command line, checked against the defaults
    read_settings the same for many settings with types, and from files of `name = value` lines
    describe      what --help says of settings: the comments beside them
    find_device   --device=auto
    read_text     a UTF-8 file, without a byte-order mark
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


def options(arguments, defaults):
    """
    ["--top_k=5", "a.txt"] → ({name: value}, ["a.txt"]): all names of defaults, and what is no
    option. A value has the type of its default; a bool may stand alone (--text is --text=True).
    Errors: ValueError that names the argument and what was expected.
    """
    values, rest = dict(defaults), []
    for i, argument in enumerate(arguments):
        if not argument.startswith("-"):
            rest.append(argument)
            continue
        name, equals, text = argument.lstrip("-").partition("=")
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, 1)
            hint = f"did you mean --{near[0]}=…?" if near else "--help shows them all"
            raise ValueError(f"unknown option {argument}; {hint}")
        kind = type(defaults[name])
        if kind is bool and text in ("", "True", "False"):
            values[name] = text != "False"
            continue
        if not equals:
            raise ValueError(with_equals_sign(arguments, i))
        try:
            values[name] = {bool: None}.get(kind, kind)(text)
        except (ValueError, TypeError):
            expected = {int: "a whole number", float: "a number", bool: "True or False"}[kind]
            raise ValueError(f"{argument}: expected {expected}") from None
    return values, rest


def with_equals_sign(arguments, i):
    """What to say about ["--top_k", "5"]."""
    following = arguments[i + 1] if i + 1 < len(arguments) else "VALUE"
    return f"{arguments[i]}: expected an equals sign, {arguments[i]}={following}"


def read_settings(arguments, types, may_be_none=()):
    """
    ["config/a.py", "--lr=2e-3"] → ({name: value}, "a"): what files of `name = value` lines and the
    command line give, in this order, and the name of the file. types: {name: type}; a value is a
    literal. Errors: ValueError that names the setting, and what was expected.
    """
    given, stem = {}, ""
    for i, argument in enumerate(arguments):
        if not argument.startswith("-"):
            stem = Path(argument).stem
            values = read_config_file(argument)
        else:
            name, equals, text = argument.lstrip("-").partition("=")
            kind = types.get(name)
            if not equals and kind not in (bool, None):
                raise ValueError(with_equals_sign(arguments, i))
            value = text if equals else True      # --resume is --resume=True
            if equals and kind is not str:
                with contextlib.suppress(ValueError, SyntaxError):         # else it is no literal
                    value = ast.literal_eval(text)
            values = {name: value}
        for name, value in values.items():
            if value is not None or name not in may_be_none:
                value = checked(name, value, types)
            given[name] = value
    return given, stem


def read_config_file(path):
    """`name = value` lines → dict. Parsed, never executed: a value is a literal."""
    if not os.path.isfile(path):
        near = difflib.get_close_matches(path, [str(p) for p in Path("config").glob("*.py")], 1)
        hint = f"did you mean {near[0]}?" if near else "those that come with nanoK3 are in config/"
        raise ValueError(f"no config file {path}; {hint}")
    try:
        lines = ast.parse(read_text(path)).body
    except SyntaxError as error:
        raise ValueError(f"{path}: {error}; a config file is plain `name = value` lines") from None
    if lines and isinstance(lines[0], ast.Expr) and isinstance(lines[0].value, ast.Constant):
        lines = lines[1:]                         # a docstring
    values = {}
    for line in lines:
        try:
            (name,) = line.targets
            values[name.id] = ast.literal_eval(line.value)
        except (AttributeError, ValueError):
            raise ValueError(f"{path}, line {line.lineno}: expected `name = value` with a plain "
                             "value") from None
    return values


def checked(name, value, types):
    """→ the value in the type of its setting. Errors: ValueError, if one of them does not fit."""
    if name not in types:
        near = difflib.get_close_matches(name, types, 1)
        hint = f"did you mean {near[0]}?" if near else "--help shows them all"
        raise ValueError(f"unknown setting {name}; {hint}")
    kind = types[name]
    if kind is float and type(value) is int:
        value = float(value)
    if kind is tuple and type(value) is list:
        value = tuple(value)
    if type(value) is not kind:
        raise ValueError(f"{name} = {value!r}: expected {kind.__name__}, got "
                         f"{type(value).__name__}")
    if type(value) is float and not math.isfinite(value):
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
    import torch  # here, as programs that need no device start without it in no time
    found = [device for device, here in (("cuda", torch.cuda.is_available()),
                                         ("mps", torch.backends.mps.is_available()),
                                         ("cpu", True)) if here]
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


def is_out_of_memory(error):
    """Whether an error is torch's or Python's word for too little memory, on any device."""
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
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(f"error: out of memory ({(str(error).splitlines() or [''])[0][:150]})")
    except KeyboardInterrupt:
        sys.exit("\nstopped")
