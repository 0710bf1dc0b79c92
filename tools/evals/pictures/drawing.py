"""Draws scenes at varied sizes, aspects, backgrounds and qualities. Equal random generators give equal pictures."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tools.evals.pictures.scenes import (
    COLOURS,
    DigitScene,
    DrawnShape,
    PictureScene,
    ShapesScene,
    WordScene,
    scanned_digits,
)

Rgb = tuple[int, int, int]
Point = tuple[float, float]

SIDES = (64, 320)  # pixels; drawn evenly on a logarithmic scale
ASPECT = 0.3  # largest logarithm of width through height
JITTER = 14  # largest change of a named colour, per channel
CONTRAST = 110.0  # least distance of a background from what is drawn on it
READABLE = 90.0  # least difference in brightness between a word or digit and its background
NOISE_SHARE, GRADIENT_SHARE, JPEG_SHARE = 0.4, 0.3, 0.15


def draw_scene(scene: PictureScene, rng: Random, fonts: Sequence[str] = ()) -> Image.Image:
    """Returns the picture of a scene in RGB.

    `fonts`: files of fonts to choose from, with Pillow's own font as often as all of them together.
    """
    side, aspect = math.exp(rng.uniform(*map(math.log, SIDES))), math.exp(rng.uniform(-ASPECT, ASPECT) / 2)
    width, height = round(side * aspect), round(side / aspect)
    if isinstance(scene, DigitScene):
        picture = _digit(scene, rng, width, height)
    elif isinstance(scene, WordScene):
        picture = _word(scene, rng, width, height, fonts)
    else:
        picture = _shapes(scene, rng, width, height)
    return _degraded(picture, rng)


def _shapes(scene: ShapesScene, rng: Random, width: int, height: int) -> Image.Image:
    """Draws the shapes of a scene, twice as large where the picture is small, and scales them down."""
    inks = [_near(rng, COLOURS[shape.colour]) for shape in scene.shapes[: 1 if scene.is_alike else None]]
    scale = 2 if min(width, height) < 160 else 1
    picture = _background(rng, width * scale, height * scale, _paper(rng, inks))
    brush = ImageDraw.Draw(picture)
    short = min(picture.size)
    largest = 0.155 if len(scene.shapes) > 1 else 0.42 if scene.shapes[0].cell == 4 else 0.2
    common = short * rng.uniform(0.085, largest)
    for number, shape in enumerate(scene.shapes):
        radius = common * rng.uniform(0.9, 1.1) if len(scene.shapes) > 1 else common
        centre = _centre(shape, rng, picture.size, radius)
        corners = _corners(shape.kind, centre, radius, math.radians(rng.uniform(-12, 12)))
        brush.polygon(corners, fill=inks[number % len(inks)])
    return picture.reduce(scale) if scale > 1 else picture


def _centre(shape: DrawnShape, rng: Random, size: tuple[int, int], radius: float) -> Point:
    """Returns a point in the shape's cell, off its middle as far as the shape stays within the cell."""
    middle = ((shape.cell % 3 + 0.5) * size[0] / 3, (shape.cell // 3 + 0.5) * size[1] / 3)
    x, y = (
        at + rng.uniform(-1, 1) * max(extent / 3 * 0.06, extent / 6 - radius - 1) * 0.7
        for at, extent in zip(middle, size, strict=True)
    )
    return x, y


def _corners(kind: str, centre: Point, radius: float, turn: float) -> list[Point]:
    """Returns the corners of a shape around `centre`, turned by an angle in radians."""
    return [_turned(centre, radius, turn, point) for point in _OUTLINES[kind]()]


def _turned(centre: Point, radius: float, turn: float, point: Point) -> Point:
    (x, y), (sin, cos) = point, (math.sin(turn), math.cos(turn))
    return centre[0] + radius * (x * cos - y * sin), centre[1] + radius * (x * sin + y * cos)


def _star() -> list[Point]:
    radii = (1.1, 0.45) * 5
    return [(r * math.sin(n * math.pi / 5), -r * math.cos(n * math.pi / 5)) for n, r in enumerate(radii)]


def _cross() -> list[Point]:
    arm = 0.3
    quarter = [(arm, -1.0), (arm, -arm), (1.0, -arm)]
    points = list(quarter)
    for _ in range(3):
        quarter = [(-y, x) for x, y in quarter]
        points += quarter
    return points


_OUTLINES: dict[str, Callable[[], list[Point]]] = {
    "circle": lambda: [(math.sin(n * math.pi / 24), math.cos(n * math.pi / 24)) for n in range(48)],
    "square": lambda: [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "triangle": lambda: [(0.0, -1.0), (1.0, 0.8), (-1.0, 0.8)],
    "star": _star,
    "cross": _cross,
}
"""Corners of a shape of radius 1 around the origin; y points down."""


def _word(scene: WordScene, rng: Random, width: int, height: int, fonts: Sequence[str]) -> Image.Image:
    """Prints the word over half to nearly all of the width, slightly turned at times."""
    paper = _near(rng, COLOURS[scene.paper])
    ink = _near(rng, COLOURS[scene.ink])
    ink = _readable(ink, paper)
    text = _cased(rng, scene.word)
    width = max(width, 80)
    font = _font(rng, fonts, text, width * rng.uniform(0.7, 0.95), height * 0.8)
    mask = Image.new("L", (width, height))
    left, top, right, bottom = font.getbbox(text)
    x, y = rng.uniform(0.03, 0.97) * (width - (right - left)), rng.uniform(0.1, 0.9) * (height - (bottom - top))
    ImageDraw.Draw(mask).text((x - left, y - top), text, fill=255, font=font)
    if rng.random() < 0.4:
        mask = mask.rotate(rng.uniform(-8, 8), Image.Resampling.BILINEAR)
    return _inked(_background(rng, width, height, paper), mask, ink)


def _cased(rng: Random, word: str) -> str:
    style = rng.random()
    return word.upper() if style < 0.15 else word.capitalize() if style < 0.3 else word


def _font(rng: Random, fonts: Sequence[str], text: str, width: float, height: float) -> ImageFont.FreeTypeFont:
    """Chooses a font and the size in which the text fits into width and height."""
    file = rng.choice(fonts) if fonts and rng.random() < 0.5 else None
    probe = _sized(file, 40.0)
    left, top, right, bottom = probe.getbbox(text)
    return _sized(file, max(8.0, 40.0 * min(width / (right - left), height / (bottom - top))))


def _sized(file: str | None, size: float) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


def _digit(scene: DigitScene, rng: Random, width: int, height: int) -> Image.Image:
    """Scales a scan up over a part of the picture, dark on light or light on dark."""
    paper = _paper(rng, [])
    ink = _near(rng, COLOURS[rng.choice(tuple(COLOURS))])
    ink = _readable(ink, paper)
    scan = Image.fromarray((scanned_digits()[0][scene.index] * 15.9).astype(np.uint8))
    side = round(min(width, height) * rng.uniform(0.6, 1.0))
    way = rng.choice((Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC))
    mask = Image.new("L", (width, height))
    scaled = scan.resize((side, side), way)
    if rng.random() < 0.5:
        slant = rng.uniform(-0.2, 0.2)
        about_middle = (1, slant, -slant * side / 2, 0, 1, 0)
        scaled = scaled.transform((side, side), Image.Transform.AFFINE, about_middle, Image.Resampling.BILINEAR)
    mask.paste(scaled, (rng.randint(0, width - side), rng.randint(0, height - side)))
    if rng.random() < 0.4:
        mask = mask.rotate(rng.uniform(-10, 10), Image.Resampling.BILINEAR)
    return _inked(_background(rng, width, height, paper), mask, ink)


def _inked(picture: Image.Image, mask: Image.Image, ink: Rgb) -> Image.Image:
    picture.paste(ink, (0, 0), mask)
    return picture


def _near(rng: Random, colour: Rgb) -> Rgb:
    red, green, blue = (_clip(c + rng.randint(-JITTER, JITTER)) for c in colour)
    return red, green, blue


def _brightness(colour: Rgb) -> float:
    return 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2]


def _readable(ink: Rgb, paper: Rgb) -> Rgb:
    """Returns the ink, made lighter or darker until it contrasts with the paper."""
    step = 12 if _brightness(paper) < 128 else -12
    while abs(_brightness(ink) - _brightness(paper)) < READABLE:
        ink = (_clip(ink[0] + step), _clip(ink[1] + step), _clip(ink[2] + step))
    return ink


def _clip(value: int) -> int:
    return min(255, max(0, value))


def _paper(rng: Random, inks: Sequence[Rgb]) -> Rgb:
    """Returns a background colour, often light or dark, that contrasts with all inks."""
    while True:
        style = rng.random()
        if style < 0.35:
            paper: Rgb = _near(rng, (245, 243, 240))
        elif style < 0.5:
            paper = _near(rng, (20, 20, 24))
        else:
            paper = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
        if all(math.dist(paper, ink) >= CONTRAST for ink in inks):
            return paper


def _background(rng: Random, width: int, height: int, colour: Rgb) -> Image.Image:
    """Returns a plain background, or one that grows lighter in some direction."""
    if rng.random() >= GRADIENT_SHARE:
        return Image.new("RGB", (width, height), colour)
    x, y = rng.uniform(-20, 20), rng.uniform(-20, 20)
    ramp = x * np.linspace(-1, 1, width)[None, :] + y * np.linspace(-1, 1, height)[:, None]
    return Image.fromarray(_clipped(np.asarray(colour, np.float32) + ramp[..., None].astype(np.float32)))


def _degraded(picture: Image.Image, rng: Random) -> Image.Image:
    """Adds noise to a share of the pictures, and compresses a share as JPEG."""
    if rng.random() < NOISE_SHARE:
        pixels = np.asarray(picture, np.float32)
        noise = np.random.default_rng(rng.getrandbits(64))
        grain = noise.standard_normal(pixels.shape, np.float32) * np.float32(rng.uniform(2, 14))
        picture = Image.fromarray(_clipped(pixels + grain))
    if rng.random() < JPEG_SHARE:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=rng.randint(50, 92))
        picture = Image.open(file).convert("RGB")
    return picture


def _clipped(pixels: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.clip(pixels, 0, 255).astype(np.uint8)
