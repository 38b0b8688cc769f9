"""
Addition and subtraction of numbers of 2 to 4 digits: "57+468" → "525".

solve writes the conversations that lab/post.py lets a model learn from first.
"""
import re
import zlib


def problem(rng):
    a, b = (rng.randrange(10 ** (n - 1), 10 ** n) for n in (rng.randint(2, 4), rng.randint(2, 4)))
    return f"{a}+{b}" if rng.random() < 0.5 else f"{max(a, b)}-{min(a, b)}"


def read(problem):
    a, sign, b = re.fullmatch(r"(\d+)([+-])(\d+)", problem).groups()
    return int(a), sign, int(b)


def held_out(problem):
    """A tenth of all; a + b and b + a are one problem."""
    a, sign, b = read(problem)
    a, b = max(a, b), min(a, b)
    return zlib.crc32(f"{a}{sign}{b}".encode()) % 10 == 0


def result(problem):
    a, sign, b = read(problem)
    return str(a + b if sign == "+" else a - b)


def reward(problem, answer):
    return float(answer == result(problem))


def kind(problem):
    """The digits of the longer number."""
    a, _, b = read(problem)
    return str(len(str(max(a, b))))


def solve(problem, rng):
    """
    → thinking, answer. It thinks at one of four lengths: not at all, the result from its last digit
    on, column by column, or that after both numbers backwards.

        57+468:  "", "525", "7+8=15 5+6+1=12 0+4+1=5", "57 468 75 864 7+8=15 …"
    """
    a, sign, b = read(problem)
    columns, carry = [], 0
    for i in range(len(str(max(a, b)))):
        x, y = a // 10 ** i % 10, b // 10 ** i % 10
        value = x + y + carry if sign == "+" else x - y - carry
        borrow = value < 0
        columns.append(f"{x}{sign}{y}" + f"{sign}1" * carry + f"={value + 10 * borrow}")
        carry = int(value > 9 or borrow)
    in_columns, answer = " ".join(columns), result(problem)
    backwards = f"{str(a)[::-1]} {str(b)[::-1]} "
    return rng.choice(["", answer[::-1], in_columns, backwards + in_columns]), answer
