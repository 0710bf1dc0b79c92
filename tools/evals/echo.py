"""Repeating a text exactly, also one in other scripts: characters whose bytes are several tokens."""

from __future__ import annotations

from itertools import islice
from random import Random

from tools.evals import vocabulary as v
from tools.evals.item import Item, Skill, Split, draw, exact, user

REQUESTS = ("Repeat: {text}", "Repeat after me: {text}", "Say exactly this: {text}", "Copy this text: {text}")
SIZES = ("words", "codes", "letters", "unicode")

# Ranges of letters without combining marks: [first, last] code points.
SCRIPTS: tuple[tuple[int, int], ...] = (
    (0xC0, 0x17F),  # Latin with accents
    (0x391, 0x3C9),  # Greek
    (0x410, 0x44F),  # Cyrillic
    (0x5D0, 0x5EA),  # Hebrew
    (0x3042, 0x30FA),  # Hiragana and Katakana
    (0x4E00, 0x9FFF),  # Chinese
    (0xAC00, 0xD7A3),  # Hangul
    (0x1F300, 0x1F64F),  # emoji
)


def _words(rng: Random) -> str:
    return " ".join(rng.choice(v.LIST_WORDS) for _ in range(rng.randint(2, 12)))


def _codes(rng: Random) -> str:
    """Returns one to four codes such as AB-123, and an invented word."""
    codes = []
    for _ in range(rng.randint(1, 4)):
        letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
        codes.append(f"{letters}-{v.digits(rng, rng.randint(2, 5))}")
    return " ".join([*codes, v.invented(rng)])


def _letters(rng: Random) -> str:
    """Returns one to six words of random letters, in mixed case and with some punctuation."""
    words = []
    for _ in range(rng.randint(1, 6)):
        word = (
            "".join(rng.choice(v.LETTERS) for _ in range(rng.randint(1, 8))) if rng.random() < 0.5 else v.strange(rng)
        )
        style = rng.random()
        word = word.capitalize() if style < 0.3 else word.upper() if style < 0.4 else word
        words.append(word + (rng.choice(",.;:!?") if rng.random() < 0.15 else ""))
    return " ".join(words)


def _unicode(rng: Random) -> str:
    """Returns one to three words of one to five characters from random scripts."""
    words = []
    for _ in range(rng.randint(1, 3)):
        first, last = rng.choice(SCRIPTS)
        # A third of the words mix in plain letters, as Größe does.
        plain = 0.5 if rng.random() < 0.33 else 0.0
        letters = (rng.choice(v.LETTERS) if rng.random() < plain else chr(rng.randint(first, last)) for _ in range(5))
        words.append("".join(islice(letters, rng.randint(1, 5))))
    return " ".join(words)


_SAMPLERS = {"words": _words, "codes": _codes, "letters": _letters, "unicode": _unicode}


def sample(rng: Random, split: Split, size: str) -> Item:
    """Draws a text to repeat; the text itself decides whether it belongs to the split."""

    def candidate() -> tuple[str, str]:
        text = _SAMPLERS[size](rng)
        return f"echo|{text}", text

    key, text = draw(split, candidate)
    question = rng.choice(REQUESTS).format(text=text)
    return Item("echo", size, (user(question),), text, key, max_tokens=96)


SKILL = Skill("echo", SIZES, sample, exact)
