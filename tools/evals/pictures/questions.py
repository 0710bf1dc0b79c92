"""Questions about scenes and their answers, by kind of question."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.evals import vocabulary as v
from tools.evals.pictures.scenes import CELLS, KINDS, DigitScene, DrawnShape, PictureScene, ShapesScene, WordScene

DESCRIBE = (
    "Describe the picture.",
    "Describe this image.",
    "What is in the picture?",
    "What is in this image?",
    "What's in this image?",
    "What do you see?",
    "What can you see in the picture?",
    "What does the picture show?",
)
DIGIT = (
    "Which digit is this?",
    "What digit is this?",
    "What digit do you see?",
    "Which digit is in the picture?",
    "What number is this?",
    "Which number is in the picture?",
    "Read the digit.",
)
WORD = (
    "What word is written?",
    "Which word is written in the picture?",
    "What does it say?",
    "What is written in the picture?",
    "What is written here?",
    "Read the word.",
    "What word do you see?",
)
COLOUR = (
    "What colour is the {kind}?",
    "What color is the {kind}?",
    "Which colour does the {kind} have?",
    "Tell me the colour of the {kind}.",
)
COLOUR_ALIKE = ("What colour are the {kind}?", "What color are the {kind}?", "Which colour do the {kind} have?")
KIND = ("Which shape is {colour}?", "What shape is {colour}?", "What is the {colour} shape?")
KIND_SINGLE = (
    "What shape is this?",
    "Which shape is this?",
    "Which shape is in the picture?",
    "What shape do you see?",
)
COUNT = (
    "How many {kind} are there?",
    "How many {kind} do you see?",
    "How many {kind} are in the picture?",
    "Count the {kind}.",
)
POSITION = ("Where is the {name}?", "Where in the picture is the {name}?", "Where do you see the {name}?")
PRESENCE = ("Is there {name}?", "Do you see {name}?", "Is there {name} in the picture?")
SHAPE_SIZES = ("colour", "kind", "count", "position", "presence", "describe")


@dataclass(frozen=True, slots=True)
class PictureQuestion:
    """A question about a picture, its size class, and the answer."""

    size: str
    text: str
    answer: str


def plural(kind: str) -> str:
    """Returns the plural of a kind of shape."""
    return kind + ("es" if kind.endswith("s") else "s")


def ask(rng: Random, scene: PictureScene, size: str) -> PictureQuestion:
    """Draws a question of this size class about a scene that allows it."""
    if size == "describe":
        return PictureQuestion(size, rng.choice(DESCRIBE), describe(scene))
    if isinstance(scene, DigitScene):
        return PictureQuestion(size, rng.choice(DIGIT), str(scene.number))
    if isinstance(scene, WordScene):
        return PictureQuestion(size, rng.choice(WORD), scene.word)
    return _SHAPES[size](rng, scene)


def sizes_of(scene: PictureScene) -> tuple[str, ...]:
    """Returns the size classes of questions that a scene allows."""
    if isinstance(scene, DigitScene):
        return ("digit", "describe")
    if isinstance(scene, WordScene):
        return ("word", "describe")
    return tuple(size for size in SHAPE_SIZES if size != "position" or not scene.is_alike)


def describe(scene: PictureScene) -> str:
    """Returns the sentence that describes a scene."""
    if isinstance(scene, DigitScene):
        return f"The digit {scene.number}."
    if isinstance(scene, WordScene):
        return f'The word "{scene.word}".'
    first = scene.shapes[0]
    if scene.is_alike:
        return f"{len(scene.shapes)} {first.colour} {plural(first.kind)}."
    if len(scene.shapes) == 1:
        return f"A{_named(first)[1:]} {CELLS[first.cell]}."
    names = [_named(shape) for shape in scene.shapes]
    text = f"{', '.join(names[:-1])} and {names[-1]}."
    return text[0].upper() + text[1:]


def _named(shape: DrawnShape) -> str:
    return v.with_article(shape.name)


def _colour(rng: Random, scene: ShapesScene) -> PictureQuestion:
    shape = rng.choice(scene.shapes)
    if scene.is_alike:
        return PictureQuestion("colour", rng.choice(COLOUR_ALIKE).format(kind=plural(shape.kind)), shape.colour)
    kind = "shape" if len(scene.shapes) == 1 and rng.random() < 0.2 else shape.kind
    return PictureQuestion("colour", rng.choice(COLOUR).format(kind=kind), shape.colour)


def _kind(rng: Random, scene: ShapesScene) -> PictureQuestion:
    shape = rng.choice(scene.shapes)
    if scene.is_alike:
        return PictureQuestion(
            "kind", rng.choice(("What shapes are these?", "Which shapes are these?")), plural(shape.kind)
        )
    single = len(scene.shapes) == 1 and rng.random() < 0.5
    return PictureQuestion("kind", rng.choice(KIND_SINGLE if single else KIND).format(colour=shape.colour), shape.kind)


def _count(rng: Random, scene: ShapesScene) -> PictureQuestion:
    style = rng.random()
    kind = rng.choice(KINDS) if style < 0.15 else rng.choice(scene.shapes).kind
    if style > 0.65:
        return PictureQuestion("count", rng.choice(COUNT).format(kind="shapes"), str(len(scene.shapes)))
    number = sum(shape.kind == kind for shape in scene.shapes)
    return PictureQuestion("count", rng.choice(COUNT).format(kind=plural(kind)), str(number))


def _position(rng: Random, scene: ShapesScene) -> PictureQuestion:
    shape = rng.choice(scene.shapes)
    name = rng.choice((shape.kind, shape.name, f"{shape.colour} shape"))
    return PictureQuestion("position", rng.choice(POSITION).format(name=name), CELLS[shape.cell])


def _presence(rng: Random, scene: ShapesScene) -> PictureQuestion:
    present = {shape.kind for shape in scene.shapes}
    is_present = rng.random() < 0.5
    kind = rng.choice(sorted(present if is_present else set(KINDS) - present))
    name = v.with_article(kind)
    return PictureQuestion("presence", rng.choice(PRESENCE).format(name=name), "yes" if is_present else "no")


_SHAPES = {"colour": _colour, "kind": _kind, "count": _count, "position": _position, "presence": _presence}
