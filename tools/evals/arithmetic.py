"""Sums and differences of whole numbers up to three digits. A difference may be negative."""

from __future__ import annotations

from random import Random

from tools.evals.item import Item, Skill, Split, draw, exact, user

SUMS = (
    "What is {a} + {b}?",
    "What is {a}+{b}?",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Please add {a} and {b}.",
    "Calculate {a} + {b}.",
    "{a} + {b} = ?",
    "{a} + {b} =",
    "{a} + {b}",
    "{a}+{b}",
)
DIFFERENCES = (
    "What is {a} - {b}?",
    "What is {a}-{b}?",
    "How much is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "Please subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "{a} - {b} = ?",
    "{a} - {b} =",
    "{a} - {b}",
    "{a}-{b}",
)
SIZES = ("sum-1", "sum-2", "sum-3", "difference-1", "difference-2", "difference-3")


def _operands(rng: Random, size_digits: int) -> tuple[int, int]:
    """Draws two numbers in random order, the longer of which has `size_digits` digits."""
    low, high = (10 ** (size_digits - 1), 10**size_digits) if size_digits > 1 else (0, 10)
    long = rng.randrange(low, high)
    # One pair in four has a shorter second number, so that lengths that differ are seen as well.
    other = rng.randrange(high) if rng.random() < 0.25 else rng.randrange(low, high)
    return (long, other) if rng.random() < 0.5 else (other, long)


def sample(rng: Random, split: Split, size: str) -> Item:
    """A sum or difference whose longer operand has the size class's digits.

    A sum's key ignores the order of its summands: a + b in training would give b + a away.
    """
    kind, size_digits = size.split("-")
    is_sum = kind == "sum"

    def candidate() -> tuple[str, tuple[int, int]]:
        a, b = _operands(rng, int(size_digits))
        key = f"{min(a, b)} + {max(a, b)}" if is_sum else f"{a} - {b}"
        return key, (a, b)

    key, (a, b) = draw(split, candidate)
    question = rng.choice(SUMS if is_sum else DIFFERENCES).format(a=a, b=b)
    expected = str(a + b if is_sum else a - b)
    return Item("arithmetic", size, (user(question),), expected, key, max_tokens=16)


SKILL = Skill("arithmetic", SIZES, sample, exact)
