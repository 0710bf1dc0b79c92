"""Pictures with known contents: the split, the drawing, and the answers."""

from __future__ import annotations

import base64
import io
import math
from itertools import islice
from random import Random

import numpy as np
import pytest
from PIL import Image

from tools.evals import Split, check, held_back_items, items, load
from tools.evals.item import split_of
from tools.evals.pictures import scenes
from tools.evals.pictures.drawing import draw_scene
from tools.evals.pictures.questions import ask, describe, sizes_of
from tools.evals.pictures.scenes import CELLS, COLOURS, DigitScene, DrawnShape, ShapesScene, WordScene
from tools.evals.registry import PICTURE_SKILLS

SAMPLERS = (
    scenes.sample_digit,
    scenes.sample_word,
    scenes.sample_single,
    scenes.sample_alike,
    scenes.sample_different,
)
EVERY_SIZE = [(name, size) for name in PICTURE_SKILLS for size in load(name).sizes]
THREE = ShapesScene((DrawnShape("circle", "red", 0), DrawnShape("star", "orange", 4), DrawnShape("cross", "gray", 8)))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_scenes_are_drawn_from_their_side_of_the_split(sampler: object) -> None:
    assert callable(sampler)
    for split in Split:
        rng = Random(1)
        assert all(split_of(sampler(rng, split).key) is split for _ in range(200))


def test_training_and_held_back_digits_are_different_scans() -> None:
    rng = Random(2)
    trained, held_back = ({scenes.sample_digit(rng, split).index for _ in range(8000)} for split in Split)
    assert trained.isdisjoint(held_back)
    assert len(trained) > 1500
    assert len(held_back) > 150
    assert {DigitScene(index).number for index in held_back} == set(range(10))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_equal_generators_give_equal_pictures(sampler: object) -> None:
    assert callable(sampler)
    scene = sampler(Random(3), Split.TRAIN)
    pictures = [np.asarray(draw_scene(scene, Random(seed))) for seed in (4, 4, 5)]
    assert np.array_equal(pictures[0], pictures[1])
    assert pictures[0].shape != pictures[2].shape or not np.array_equal(pictures[0], pictures[2])


def test_a_shape_has_its_colour_and_lies_in_its_cell() -> None:
    rng = Random(6)
    for _ in range(100):
        shape = DrawnShape("square", rng.choice(tuple(COLOURS)), rng.randrange(9))
        picture = draw_scene(ShapesScene((shape,)), rng)
        pixels = np.asarray(picture, dtype=float)
        distance = np.sqrt(((pixels - np.array(COLOURS[shape.colour])) ** 2).sum(-1))
        rows, columns = np.nonzero(distance < 60)
        x, y = columns.mean() / picture.width, rows.mean() / picture.height
        assert int(y * 3) * 3 + int(x * 3) == shape.cell


def test_every_shape_of_a_scene_is_drawn() -> None:
    for seed in range(20):
        pixels = np.asarray(draw_scene(THREE, Random(seed)), dtype=float)
        for shape in THREE.shapes:
            nearest = np.sqrt(((pixels - np.array(COLOURS[shape.colour])) ** 2).sum(-1)).min()
            assert nearest < 45, (seed, shape)


def test_words_and_digits_stand_out_from_their_background() -> None:
    for seed in range(30):
        for scene in (WordScene("lamp", "brown", "blue"), DigitScene(seed)):
            gray = np.asarray(draw_scene(scene, Random(seed)).convert("L"), dtype=float)
            assert np.ptp(np.percentile(gray, (0.5, 99.5))) > 45, (seed, scene)


def test_sizes_and_aspects_vary() -> None:
    rng = Random(7)
    sizes = [draw_scene(scenes.sample_single(rng, Split.TRAIN), rng).size for _ in range(200)]
    assert min(map(min, sizes)) < 80
    assert max(map(max, sizes)) > 280
    assert {math.copysign(1, width - height) for width, height in sizes if width != height} == {1, -1}


def test_descriptions_name_the_contents_in_reading_order() -> None:
    assert describe(THREE) == "A red circle, an orange star and a gray cross."
    assert describe(ShapesScene(THREE.shapes[1:2])) == "An orange star in the middle."
    assert describe(ShapesScene(tuple(DrawnShape("cross", "pink", c) for c in (1, 2)))) == "2 pink crosses."
    assert describe(WordScene("lamp", "red", "white")) == 'The word "lamp".'
    assert describe(DigitScene(7)) == f"The digit {DigitScene(7).number}."


def test_answers_are_those_of_the_scene() -> None:
    rng = Random(8)
    by_kind = {shape.kind: shape for shape in THREE.shapes}
    by_colour = {shape.colour: shape for shape in THREE.shapes}
    for _ in range(50):
        found = {size: ask(rng, THREE, size) for size in sizes_of(THREE)}
        words = {size: question.text.rstrip("?.").split() for size, question in found.items()}
        asked = next(by_kind[word] for word in words["colour"] if word in by_kind)
        assert found["colour"].answer == asked.colour
        asked = next(by_colour[word] for word in words["kind"] if word in by_colour)
        assert found["kind"].answer == asked.kind
        asked = next((by_kind | by_colour)[word] for word in words["position"] if word in by_kind | by_colour)
        assert found["position"].answer == CELLS[asked.cell]
        kinds = [word for word in words["presence"] if word in scenes.KINDS]
        assert found["presence"].answer == ("yes" if kinds[0] in by_kind else "no")
        counted = [word.removesuffix("s").removesuffix("e") for word in words["count"]]
        number = 3 if "shapes" in words["count"] else sum(kind.removesuffix("e") in counted for kind in by_kind)
        assert found["count"].answer == str(number)


@pytest.mark.parametrize(("name", "size"), EVERY_SIZE)
def test_items_carry_their_picture_and_are_judged_exactly(name: str, size: str) -> None:
    for item in islice(items(name, Split.HELD_BACK, size), 5):
        picture, text = item.messages[0]["content"]
        kind, _, content = picture["image_url"]["url"].partition(",")
        assert kind == "data:image/png;base64"
        assert Image.open(io.BytesIO(base64.b64decode(content))).mode == "RGB"
        assert text["text"]
        assert check(item, item.expected).right
        assert not check(item, item.expected + " 7").right


def test_the_evaluation_set_is_the_same_in_every_run() -> None:
    first, second = (held_back_items(2, ("picture_shapes",)) for _ in range(2))
    assert first == second
    assert len(first) == 2 * len(load("picture_shapes").sizes)
