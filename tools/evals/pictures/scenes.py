"""Contents of pictures, independent of how they are drawn: what the questions are about, and what decides the split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tools.evals import vocabulary as v
from tools.evals.item import Split, draw

DIGITS = Path(__file__).with_name("digits.npz")

KINDS = ("circle", "square", "triangle", "star", "cross")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 30, 35),
    "green": (35, 150, 55),
    "blue": (40, 75, 220),
    "yellow": (245, 220, 45),
    "orange": (250, 135, 20),
    "purple": (125, 40, 165),
    "pink": (250, 140, 190),
    "brown": (115, 70, 35),
    "black": (18, 18, 18),
    "white": (243, 243, 243),
    "gray": (128, 128, 128),
}
"""Name to red, green and blue, around which drawing varies."""

CELLS = (
    "at the top left",
    "at the top",
    "at the top right",
    "on the left",
    "in the middle",
    "on the right",
    "at the bottom left",
    "at the bottom",
    "at the bottom right",
)
"""Answers to where a shape is: the ninths of a picture, row by row."""

WORDS = tuple(word for word in v.LIST_WORDS if len(word) <= 5)
MOST_ALIKE, MOST_DIFFERENT = 6, 3


@dataclass(frozen=True, slots=True)
class DrawnShape:
    """One shape of a picture; `cell` is the ninth that it lies in, an index of CELLS."""

    kind: str
    colour: str
    cell: int

    @property
    def name(self) -> str:
        """Colour and kind, as in `red circle`."""
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True, slots=True)
class ShapesScene:
    """A picture of shapes in different cells: one, several alike, or several of different kinds and colours."""

    shapes: tuple[DrawnShape, ...]

    @property
    def is_alike(self) -> bool:
        """Whether the picture has several shapes of one kind and colour."""
        return len(self.shapes) > 1 and self.shapes[0].name == self.shapes[1].name

    @property
    def key(self) -> str:
        """Key of the split: number, colour and kind of shapes that are alike, and with the cells of others."""
        if self.is_alike:
            return f"picture|{len(self.shapes)} {self.shapes[0].name}"
        return "picture|" + "|".join(sorted(f"{shape.name} {shape.cell}" for shape in self.shapes))


@dataclass(frozen=True, slots=True)
class WordScene:
    """A picture of one printed word, in a colour on a background of another."""

    word: str
    ink: str
    paper: str

    @property
    def key(self) -> str:
        """Key of the split: the word in its colours. A word occurs on both sides, never in the same colours."""
        return f"picture|{self.word} {self.ink} {self.paper}"


@dataclass(frozen=True, slots=True)
class DigitScene:
    """A picture of one handwritten digit, given by its place among the scanned ones."""

    index: int

    @property
    def number(self) -> int:
        """The digit's value, 0 to 9."""
        return int(scanned_digits()[1][self.index])

    @property
    def key(self) -> str:
        """Key of the split: the scan."""
        return f"picture|digit {self.index}"


PictureScene = ShapesScene | WordScene | DigitScene
S = TypeVar("S", ShapesScene, WordScene, DigitScene)


@cache
def scanned_digits() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns the scans [1797, 8, 8], values 0 to 16, and their numbers [1797].

    They are scikit-learn's `load_digits`: the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin
    and C. Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0).
    """
    with np.load(DIGITS) as file:
        return file["images"], file["numbers"]


def sample_single(rng: Random, split: Split) -> ShapesScene:
    """Draws one shape."""
    return _drawn(split, lambda: ShapesScene((_shape(rng, rng.randrange(len(CELLS))),)))


def sample_alike(rng: Random, split: Split) -> ShapesScene:
    """Draws two to six shapes of one kind and colour."""

    def candidate() -> ShapesScene:
        kind, colour = rng.choice(KINDS), rng.choice(tuple(COLOURS))
        cells = rng.sample(range(len(CELLS)), rng.randint(2, MOST_ALIKE))
        return ShapesScene(tuple(DrawnShape(kind, colour, cell) for cell in sorted(cells)))

    return _drawn(split, candidate)


def sample_different(rng: Random, split: Split) -> ShapesScene:
    """Draws two or three shapes that all differ in kind and colour, in reading order."""

    def candidate() -> ShapesScene:
        count = rng.randint(2, MOST_DIFFERENT)
        kinds, colours = rng.sample(KINDS, count), rng.sample(tuple(COLOURS), count)
        cells = sorted(rng.sample(range(len(CELLS)), count))
        return ShapesScene(tuple(map(DrawnShape, kinds, colours, cells)))

    return _drawn(split, candidate)


def sample_word(rng: Random, split: Split) -> WordScene:
    """Draws a word in two colours."""

    def candidate() -> WordScene:
        ink, paper = rng.sample(tuple(COLOURS), 2)
        return WordScene(rng.choice(WORDS), ink, paper)

    return _drawn(split, candidate)


def sample_digit(rng: Random, split: Split) -> DigitScene:
    """Draws one of the scanned digits."""
    return _drawn(split, lambda: DigitScene(rng.randrange(len(scanned_digits()[1]))))


def _shape(rng: Random, cell: int) -> DrawnShape:
    return DrawnShape(rng.choice(KINDS), rng.choice(tuple(COLOURS)), cell)


def _drawn(split: Split, candidate: Callable[[], S]) -> S:
    """Draws scenes until one is on the wanted side of the split."""

    def keyed() -> tuple[str, S]:
        scene = candidate()
        return scene.key, scene

    return draw(split, keyed)[1]
