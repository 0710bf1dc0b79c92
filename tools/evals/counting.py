"""Counting on and on: answers of known content that are as long as a test wants them."""

from __future__ import annotations

from random import Random

from tools.evals.item import Item, Skill, Split, Verdict, draw, exact, user

UPWARDS = ("Count from {a} to {b}.", "Count up from {a} to {b}.", "Write the numbers from {a} to {b}.")
FROM_ONE = ("Count to {b}.", "Count up to {b}.", "Please count to {b}.")
DOWNWARDS = ("Count down from {a} to {b}.", "Count backwards from {a} to {b}.")
STEPS = ("Count from {a} to {b} in steps of {step}.", "Count by {step} from {a} to {b}.")
OPEN = ("Keep counting from {a}.", "Count from {a} and do not stop.", "Start at {a} and keep counting.")

SPANS: dict[str, tuple[int, int]] = {"short": (3, 40), "medium": (41, 150), "long": (151, 420)}
"""Size class to how many numbers the answer has. The longest answers have about 2,100 tokens."""

OPEN_NUMBERS = 850
"""How many numbers of an open count are known: as many as surely fit in 4,096 tokens."""

OPEN_TOKENS = 1600
"""How many tokens of an open count an item asks for."""

SIZES = (*SPANS, "down", "steps", "open")


def _range(rng: Random, size: str) -> tuple[int, int, int]:
    """Draws the first number, last number and step of a count of the size class; the last number is included."""
    if size == "steps":
        step, count = rng.choice((2, 3, 5, 10)), rng.randint(3, 60)
        first = rng.randrange(0, 200)
        return first, first + step * (count - 1), step
    count = rng.randint(3, 150) if size == "down" else rng.randint(*SPANS[size])
    if size != "down" and rng.random() < 0.1:
        return 1, count, 1
    # Most counts stay below a thousand, some go into four digits.
    first = rng.randrange(0, 1001 - count) if rng.random() < 0.85 else rng.randrange(0, 2000)
    last = first + count - 1
    return (last, first, -1) if size == "down" else (first, last, 1)


def spell(first: int, last: int, step: int) -> str:
    """The numbers from first to last, both included, with a space between them."""
    return " ".join(map(str, range(first, last + (1 if step > 0 else -1), step)))


def _question(rng: Random, first: int, last: int, step: int) -> str:
    """Returns a question that asks to count from `first` to `last` by `step`."""
    if (first, step) == (1, 1) and rng.random() < 0.7:
        return rng.choice(FROM_ONE).format(b=last)
    templates = UPWARDS if step == 1 else DOWNWARDS if step == -1 else STEPS
    return rng.choice(templates).format(a=first, b=last, step=step)


def _open_ended(rng: Random, split: Split) -> Item:
    """Samples a question without an end; the expected answer is cut after OPEN_TOKENS tokens."""

    def candidate() -> tuple[str, int]:
        first = rng.randrange(0, 600)
        return f"count|{first}|on", first

    key, first = draw(split, candidate)
    expected = spell(first, first + OPEN_NUMBERS - 1, 1)
    question = rng.choice(OPEN).format(a=first)
    return Item("counting", "open", (user(question),), expected, key, max_tokens=OPEN_TOKENS, ends=False)


def sample(rng: Random, split: Split, size: str) -> Item:
    """A count between two numbers, or one that never ends; first, last and step decide the split."""
    if size == "open":
        return _open_ended(rng, split)

    def candidate() -> tuple[str, tuple[int, int, int]]:
        first, last, step = _range(rng, size)
        return f"count|{first}|{last}|{step}", (first, last, step)

    key, (first, last, step) = draw(split, candidate)
    expected = spell(first, last, step)
    question = _question(rng, first, last, step)
    return Item("counting", size, (user(question),), expected, key, max_tokens=len(expected) + 2)


def check(item: Item, text: str) -> Verdict:
    """Exact for a bounded count. An open one is right if it went on to `max_tokens` and starts what is expected.

    Each of its tokens is one digit or one space, so its length in characters says how far it went.
    """
    if item.ends:
        return exact(item, text)
    right = len(text) >= item.max_tokens - 1 and item.expected.startswith(text)
    return Verdict(valid=right, right=right)


SKILL = Skill("counting", SIZES, sample, check)
