"""Builds the items of the picture skills: a picture as a data URL, and a question about it."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from random import Random

from PIL import Image

from tools.evals.item import Item, Message, Skill, Split, exact
from tools.evals.pictures.drawing import draw_scene
from tools.evals.pictures.questions import ask
from tools.evals.pictures.scenes import PictureScene

SceneSampler = Callable[[Random, Split], PictureScene]


def picture_message(picture: Image.Image, text: str) -> Message:
    """Returns a user's message with a picture, as PNG in a data URL, and a text."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def picture_skill(name: str, samplers: dict[str, Sequence[SceneSampler]]) -> Skill:
    """Returns the skill that asks about scenes. `samplers`: by size class, the kinds of scene that it asks about."""

    def sample(rng: Random, split: Split, size: str) -> Item:
        scene = rng.choice(samplers[size])(rng, split)
        question = ask(rng, scene, size)
        message = picture_message(draw_scene(scene, rng), question.text)
        return Item(name, size, (message,), question.answer, f"{scene.key}|{question.text}", max_tokens=48)

    return Skill(name, tuple(samplers), sample, exact)
