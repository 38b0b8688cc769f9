"""
What every program here does with its arguments, its text and its failures.

    options       --name=value on the command line, checked against the defaults
    find_device   --device=auto
    read_text     a UTF-8 file, without a byte-order mark
    run           main(arguments) as a program: UTF-8 out, an expected failure in one line
"""
import contextlib
import difflib
import os
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
    words = ("can't allocate memory", "out of memory", "bad_alloc")
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
