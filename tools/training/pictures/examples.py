"""Builds training conversations about drawn pictures, and packs them into batches of one size."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tools.evals import Split
from tools.evals.conversation import TURNS
from tools.evals.documents import sample_document
from tools.evals.item import Message, assistant, user
from tools.evals.pictures import scenes
from tools.evals.pictures.drawing import draw_scene
from tools.evals.pictures.questions import ask, sizes_of
from tools.training.chat import END_OF_TEXT, IMAGE, segments
from tools.training.corpus import with_system
from tools.training.pictures import recipe
from tools.training.pictures.guides import labels_of
from tools.training.tokenizer import FastEncoder, load_tokenizer

SAMPLERS: dict[str, Callable[[Random, Split], scenes.PictureScene]] = {
    "digit": scenes.sample_digit,
    "word": scenes.sample_word,
    "single": scenes.sample_single,
    "alike": scenes.sample_alike,
    "different": scenes.sample_different,
}

SIZES = ("digit", "word", "colour", "kind", "count", "position", "presence", "describe", "text")
"""Kinds of questions, for the log. `text` asks about something else than the picture."""


@dataclass(frozen=True, slots=True)
class PictureExample:
    """A conversation about a picture: its tokens, and for each token the kind of question that it answers or -1."""

    pixels: NDArray[np.uint8]  # [side, side, 3]
    tokens: list[int]
    kinds: list[int]
    shortest: int  # tokens up to the end of the first answer after the picture
    labels: list[int]  # see guides.labels_of


@dataclass(frozen=True, slots=True)
class PictureBatch:
    """Packed conversations, each about one picture, and the positions to learn from.

    pixels: [num_pictures, side, side, 3]. tokens, positions: [batch_tokens]. limits: where conversations begin and
    end, and at last the padding. picture_index: positions of the pictures' embeddings, picture by picture.
    target_index: [batch_targets], positions whose next token is `targets`; `weights` are 0 for padding.
    `kinds`: index in SIZES of the question that a target answers. `labels` [num_pictures, NUM_LABELS]: see guides.py.
    """

    pixels: NDArray[np.uint8]
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    limits: list[NDArray[np.int32]]
    picture_index: NDArray[np.int64]
    target_index: NDArray[np.int64]
    targets: NDArray[np.int64]
    weights: NDArray[np.float32]
    kinds: NDArray[np.int64]
    labels: NDArray[np.int64]


def font_files() -> list[str]:
    """Returns the files of DejaVu fonts on this machine, none of which is needed."""
    folders = ["/usr/share/fonts/truetype/dejavu"]
    try:
        import matplotlib
    except ImportError:
        pass
    else:
        folders.append(f"{matplotlib.get_data_path()}/fonts/ttf")
    for folder in folders:
        found = [file for kind in ("Sans", "Serif") for file in sorted(glob.glob(f"{folder}/DejaVu{kind}*.ttf"))]
        if found:
            return [file for file in found if "Display" not in file]
    return []


def resized(picture: Image.Image, side: int) -> NDArray[np.uint8]:
    """Returns the pixels [side, side, 3] of a picture, scaled as the frontend scales them for the model."""
    return np.asarray(picture.convert("RGB").resize((side, side), Image.Resampling.BICUBIC))


class PictureCorpus:
    """An endless source of conversations about pictures."""

    def __init__(self, seed: str, encoder: FastEncoder, chosen: recipe.PictureRecipe) -> None:
        self._rng, self._encoder, self._fonts = Random(seed), encoder, font_files()
        self._shape, self._scenes = chosen.shape, chosen.scenes

    def next(self) -> PictureExample:
        """Draws a scene, draws its picture, and asks one to four questions about it."""
        rng = self._rng
        kind = rng.choices(list(self._scenes), list(self._scenes.values()))[0]
        scene = SAMPLERS[kind](rng, Split.TRAIN)
        messages, sizes = self._conversation(scene)
        pixels = resized(draw_scene(scene, rng, self._fonts), self._shape.image_size)
        return PictureExample(pixels, *self._encode(messages, sizes), labels_of(scene))

    def _conversation(self, scene: scenes.PictureScene) -> tuple[list[Message], list[str]]:
        """Returns the messages and, for each answer in them, its kind of question."""
        rng = self._rng
        sizes = list(sizes_of(scene))
        rng.shuffle(sizes)
        asked = [ask(rng, scene, size) for size in sizes[: recipe.MOST_QUESTIONS]]
        turns = [(question.text, question.answer, question.size) for question in asked]
        before = ""
        if rng.random() < recipe.DOCUMENT_SHARE:
            document = sample_document(rng, Split.TRAIN, rng.randint(20, 60), 1)
            before = document.text + rng.choice(("\n\n", "\n", " "))
            if rng.random() < recipe.LATER_SHARE / recipe.DOCUMENT_SHARE:
                fact = document.facts[0]
                turns.insert(rng.randint(0, 1), (fact.question(rng), fact.value, "text"))
        messages: list[Message] = []
        names = [size for _, _, size in turns]
        if rng.random() < recipe.EARLIER_SHARE:
            messages, names = self._earlier(), ["text", *names]
        first, *later = turns
        parts = [{"type": "image"}, {"type": "text", "text": before + first[0]}]
        messages += [{"role": "user", "content": parts}, assistant(first[1])]
        for text, answer, _ in later:
            messages += [user(text), assistant(answer)]
        return with_system(rng, messages), names

    def _earlier(self) -> list[Message]:
        """Draws a short question without a picture, and its answer."""
        while True:
            skill, sizes = self._rng.choice(TURNS)
            item = skill.sample(self._rng, Split.TRAIN, self._rng.choice(sizes))
            if len(item.messages) == 1 and len(item.messages[0]["content"]) + len(item.expected) < 150:
                return [*item.messages, assistant(item.expected)]

    def _encode(self, messages: list[Message], sizes: list[str]) -> tuple[list[int], list[int], int]:
        """Returns the tokens, the picture's repeated for each embedding, the kinds of answers, and the shortest part
        that has the first answer about the picture."""
        tokens: list[int] = []
        kinds: list[int] = []
        shortest = 0
        names = iter(sizes)
        image = self._encoder.encode(IMAGE)
        for text, is_answer in segments(messages):
            ids = self._encoder.encode(text)
            if image[0] in ids:
                at = ids.index(image[0])
                ids = ids[:at] + image * self._shape.num_patches + ids[at + 1 :]
            tokens += ids
            kinds += [SIZES.index(next(names)) if is_answer else -1] * len(ids)
            if is_answer and not shortest and image[0] in tokens:
                shortest = len(tokens)
        return tokens, kinds, shortest


def pack(examples: list[PictureExample], chosen: recipe.PictureRecipe, image: int, padding: int) -> PictureBatch:
    """Lays the conversations end to end, those that no longer fit without their end. `image`, `padding`: tokens."""
    reserved = sum(example.shortest for example in examples)
    if reserved > chosen.batch_tokens:
        raise ValueError(f"{len(examples)} conversations of {reserved} tokens, of at most {chosen.batch_tokens}")
    tokens: list[int] = []
    kinds: list[int] = []
    limits = [0]
    for example in examples:
        reserved -= example.shortest
        most = chosen.batch_tokens - len(tokens) - reserved
        tokens += example.tokens[:most]
        kinds += example.kinds[:most]
        limits.append(len(tokens))
    left, least = chosen.batch_tokens - len(tokens), chosen.shape.num_patches
    while limits[-1] < chosen.batch_tokens:
        limits.append(min(limits[-1] + least, chosen.batch_tokens))
    packed = np.array(tokens + [padding] * left, dtype=np.int32)
    answered = np.array(kinds + [-1] * left)
    index = np.flatnonzero(answered[1:] >= 0)[: chosen.batch_targets]
    weights = np.zeros(chosen.batch_targets, dtype=np.float32)
    weights[: len(index)] = _answer_weights(answered)[index + 1]
    index = np.concatenate((index, np.zeros(chosen.batch_targets - len(index), dtype=np.int64)))
    lengths = np.diff(limits)
    return PictureBatch(
        np.stack([example.pixels for example in examples]),
        packed,
        (np.arange(limits[-1]) - np.repeat(limits[:-1], lengths)).astype(np.int32),
        [np.array(limits, dtype=np.int32)],
        np.flatnonzero(packed == image),
        index,
        packed[index + 1].astype(np.int64),
        weights,
        answered[index + 1],
        np.array([example.labels for example in examples]),
    )


def _answer_weights(kinds: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns a weight for each token of an answer, the inverse root of the answer's length, so that descriptions do
    not outweigh short answers; 0 elsewhere."""
    limits = np.flatnonzero(np.diff(kinds, prepend=-1, append=-1))
    lengths = np.diff(limits, append=len(kinds))
    weights = np.zeros(len(kinds), dtype=np.float32)
    weights[limits[0] :] = np.repeat(lengths**-0.5, lengths) if len(limits) else 0.0
    return np.where(kinds >= 0, weights, 0.0).astype(np.float32)


def produce(
    number: int, progress: Synchronized[float], out: Any, chosen: recipe.PictureRecipe, tokenizer: Path
) -> None:
    """Puts packed batches into the queue `out` for ever, in a process of its own."""
    encoder = FastEncoder(load_tokenizer(tokenizer))
    corpus = PictureCorpus(f"pictures/{chosen.seed}/{number}", encoder, chosen)
    image, padding = encoder.encode(IMAGE)[0], encoder.encode(END_OF_TEXT)[0]
    while True:
        examples = [corpus.next() for _ in range(chosen.pictures)]
        out.put(pack(examples, chosen, image, padding))
