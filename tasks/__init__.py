"""
What post.py's rl and distill ask a model. A task is a file in this folder, tasks/NAME.py, with

    problem(rng)                a problem, a text, drawn with a random.Random
    held_out(problem)           whether it is kept for evaluation and never trained on
    reward(problem, answer)     0 to 1, for what the model says once it has thought
    kind(problem)               problems of one kind share a budget of thinking; may be left out
"""
import importlib
import random
from pathlib import Path

from cli import did_you_mean


def load(name):
    """The module tasks/NAME.py. Errors: ValueError."""
    known = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if name not in known:
        raise ValueError(f"no task {name!r}; "
                         + did_you_mean(name, known, otherwise=f"tasks/ has {', '.join(known)}"))
    task = importlib.import_module(f"tasks.{name}")
    lacking = [f for f in ("problem", "held_out", "reward") if not hasattr(task, f)]
    if lacking:
        raise ValueError(f"tasks/{name}.py lacks {', '.join(lacking)}; tasks/__init__.py says what "
                         "a task has")
    return task


def find_problem(task, held_out, key):
    """A problem to train on or a held-out one; the same key gives the same. Errors: ValueError."""
    rng = random.Random(str(key))
    for _ in range(10_000):
        problem = task.problem(rng)
        if bool(task.held_out(problem)) == held_out:
            return problem
    raise ValueError(f"task {task.__name__}: of 10,000 problems none is "
                     f"{'held out' if held_out else 'to train on'}; its held_out(problem) should "
                     "be true of a small part of them")


def kind(task, problem):
    return task.kind(problem) if hasattr(task, "kind") else ""
