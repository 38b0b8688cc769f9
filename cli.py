"""
What every program here does with its arguments, its text and its failures.

    options     --name=value on the command line, checked against the defaults
    read_text   a UTF-8 file, without a byte-order mark
    run         main(arguments) as a program: UTF-8 out, an expected failure in one line
"""
import difflib
import os
import sys
from pathlib import Path


def options(arguments, defaults):
    """
    ["--top_k=5", "a.txt"] → ({name: value}, ["a.txt"]): every name of defaults, and what is no option.
    A value has the type of its default; a bool may stand alone (--text is --text=True).
    Errors: ValueError that names the argument and what was expected.
    """
    values, rest = dict(defaults), []
    for argument in arguments:
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
            raise ValueError(f"{argument}: expected --{name}=VALUE, with an equals sign")
        try:
            values[name] = {bool: None}.get(kind, kind)(text)
        except (ValueError, TypeError):
            expected = {int: "a whole number", float: "a number", bool: "True or False"}[kind]
            raise ValueError(f"{argument}: expected {expected}") from None
    return values, rest


def read_text(path):
    """A UTF-8 file → str; a byte-order mark is dropped. Errors: OSError, ValueError with the way out."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text (byte {error.start}); if it is Latin-1, convert it: "
                         f"iconv -f latin1 -t utf-8 {path} > new.txt") from None


def is_out_of_memory(error):
    """Whether an error is torch's or Python's word for too little memory, on any device."""
    name, text = type(error).__name__, str(error)
    return (isinstance(error, MemoryError) or name == "OutOfMemoryError"
            or "can't allocate memory" in text or "out of memory" in text)


def run(main, doc):
    """
    main(sys.argv[1:]) as a program. --help prints doc. ValueError, OSError and too little memory
    end it with one line and exit status 1; a reader that went away (`… | head`) ends it quietly.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):     # a file or a pipe gets UTF-8, a terminal what it can show
            stream.reconfigure(errors="replace", encoding=None if stream.isatty() else "utf-8")
    if {"--help", "-h"} & set(sys.argv[1:]):
        sys.exit(print(doc.strip()))
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())   # for Python's own last flush
        sys.exit(0)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(f"error: out of memory ({str(error).splitlines()[0][:150]})")
    except KeyboardInterrupt:
        sys.exit("\nstopped")
