"""Repeating a text exactly, also one in other scripts: characters whose bytes are several tokens."""

from __future__ import annotations

from random import Random

from quire.tiny.skills import vocabulary as v
from quire.tiny.skills.item import Item, Skill, Split, draw, exact, user

REQUESTS = ("Repeat: {text}", "Repeat after me: {text}", "Say exactly this: {text}", "Copy this text: {text}")
SIZES = ("words", "codes", "unicode")

# Ranges of letters without combining marks: [first, last] code points.
SCRIPTS: tuple[tuple[int, int], ...] = (
    (0xE0, 0xF6),  # Latin with accents
    (0x3B1, 0x3C9),  # Greek
    (0x430, 0x44F),  # Cyrillic
    (0x5D0, 0x5EA),  # Hebrew
    (0x3042, 0x3093),  # Hiragana
    (0x4E00, 0x4EFF),  # Chinese
    (0xAC00, 0xACFF),  # Hangul
    (0x1F600, 0x1F64F),  # emoji
)


def _words(rng: Random) -> str:
    return " ".join(rng.choice(v.LIST_WORDS) for _ in range(rng.randint(2, 12)))


def _codes(rng: Random) -> str:
    codes = []
    for _ in range(rng.randint(1, 4)):
        letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
        codes.append(f"{letters}-{v.digits(rng, rng.randint(2, 5))}")
    return " ".join([*codes, v.invented(rng)])


def _unicode(rng: Random) -> str:
    words = []
    for _ in range(rng.randint(1, 3)):
        first, last = rng.choice(SCRIPTS)
        words.append("".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 5))))
    return " ".join(words)


_SAMPLERS = {"words": _words, "codes": _codes, "unicode": _unicode}


def sample(rng: Random, split: Split, size: str) -> Item:
    """A text to repeat; the text decides the split."""

    def candidate() -> tuple[str, str]:
        text = _SAMPLERS[size](rng)
        return f"echo|{text}", text

    key, text = draw(split, candidate)
    question = rng.choice(REQUESTS).format(text=text)
    return Item("echo", size, (user(question),), text, key, max_tokens=96)


SKILL = Skill("echo", SIZES, sample, exact)
