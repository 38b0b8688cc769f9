"""
Brackets to close: "[(){<" → ">}]".
"""
import zlib

PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}


def problem(rng):
    """Eight to twenty brackets, of which some are still open."""
    text, stack = "", []
    for _ in range(rng.randint(8, 20)):
        if stack and rng.random() < 0.4:
            text += PAIRS[stack.pop()]
        else:
            stack.append(rng.choice("([{<"))
            text += stack[-1]
    return text if stack else problem(rng)


def stacks(problem):
    """What is open after each bracket, the last one opened at the end."""
    now, found = "", []
    for bracket in problem:
        now = now + bracket if bracket in PAIRS else now[:-1]
        found.append(now)
    return found


def held_out(problem):
    return zlib.crc32(problem.encode()) % 10 == 0


def result(problem):
    return "".join(PAIRS[bracket] for bracket in reversed(stacks(problem)[-1]))


def reward(problem, answer):
    return float(answer == result(problem))


def kind(problem):
    return "short" if len(problem) <= 14 else "long"


def solve(problem, rng):
    """→ thinking, answer. It thinks of nothing, of what is open at the end, or after each one."""
    found = stacks(problem)
    return rng.choice(["", found[-1], " ".join(found)]), result(problem)
