"""Packing conversations into batches of one fixed size, and making them in many processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tools.evals import SKILLS
from tools.training import recipe
from tools.training.corpus import Corpus, Example
from tools.training.tokenizer import FastEncoder, load_tokenizer

SPAN_LENGTHS = (128, 512, 4096)
"""Longest conversation of each span. Attention is launched once for each, at the cost of its longest."""

PROMPT = len(SKILLS)
"""Stands in the place of a skill's number for targets that are part of a prompt."""


B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Packed conversations and the positions to learn from.

    tokens, positions: [batch_tokens]. limits: for each span, where its conversations begin and end, counted from the
    batch's start. target_index: [batch_targets], positions whose next token is `targets`, with `weights` and `skills`.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    limits: list[NDArray[np.int32]]
    target_index: NDArray[np.int32]
    targets: NDArray[np.int64]
    weights: NDArray[np.float32]
    skills: NDArray[np.int64]


def collect(corpus: Corpus, batch_tokens: int, progress: float) -> list[Example]:
    """Examples of `batch_tokens` tokens in all, shortest first; the last one drawn is cut to fit."""
    examples: list[Example] = []
    room = batch_tokens
    while room > 0:
        examples.append(corpus.next(progress, room))
        room -= len(examples[-1].tokens)
    return sorted(examples, key=lambda example: len(example.tokens))


def pack(examples: list[Example], batch_targets: int, rng: np.random.Generator) -> PackedBatch:
    """Lays the examples end to end and chooses `batch_targets` positions to learn, with weights by skill."""
    lengths = np.array([len(e.tokens) for e in examples], dtype=np.int32)
    limits = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = np.concatenate([np.asarray(e.tokens, dtype=np.int32) for e in examples])
    answers = np.concatenate([np.asarray(e.answers, dtype=bool) for e in examples])
    numbers = {name: number for number, name in enumerate(SKILLS)}
    skills = np.repeat([numbers[e.skill] for e in examples], lengths)
    index = _choose_targets(answers, limits, batch_targets, rng)
    is_answer = answers[index + 1]
    by_skill = np.array([recipe.TARGET_WEIGHTS.get(name, 1.0) for name in SKILLS], dtype=np.float32)
    return PackedBatch(
        tokens,
        (np.arange(limits[-1]) - np.repeat(limits[:-1], lengths)).astype(np.int32),
        _spans(lengths, limits),
        index.astype(np.int32),
        tokens[index + 1].astype(np.int64),
        np.where(is_answer, by_skill[skills[index]], np.float32(recipe.PROMPT_WEIGHT)).astype(np.float32),
        np.where(is_answer, skills[index], PROMPT).astype(np.int64),
    )


def _choose_targets(
    answers: NDArray[np.bool_], limits: NDArray[np.int32], count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Chooses `count` positions to learn the next token of: those before answers first, then any others, at random
    in both."""
    has_next = np.ones(len(answers), dtype=bool)
    has_next[limits[1:] - 1] = False
    before_answer = np.roll(answers, -1) & has_next
    wanted = rng.permutation(np.flatnonzero(before_answer))[:count]
    others = rng.permutation(np.flatnonzero(has_next & ~before_answer))[: count - len(wanted)]
    return np.concatenate((wanted, others))


def _spans(lengths: NDArray[np.int32], limits: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    cuts = [0, *(int(np.searchsorted(lengths, longest, side="right")) for longest in SPAN_LENGTHS)]
    return [limits[a : b + 1] for a, b in pairwise(cuts) if b > a]


def produce(number: int, progress: Synchronized[float], out: Any, chosen: recipe.Recipe, tokenizer: Path) -> None:
    """Puts packed batches into the queue `out` for ever, in a process of its own; `progress` is shared with the
    training loop."""
    corpus = Corpus(f"{chosen.seed}/{number}", FastEncoder(load_tokenizer(tokenizer)))
    rng = np.random.default_rng([chosen.seed, number])
    while True:
        examples = collect(corpus, chosen.batch_tokens, progress.value)
        out.put(pack(examples, chosen.batch_targets, rng))


class Feed(Generic[B]):
    """Batches from several processes, in the order in which they are ready."""

    def __init__(self, produce: Callable[..., None], workers: int, *arguments: Any) -> None:
        """Starts `workers` processes that run produce(number, progress, out, *arguments)."""
        context = multiprocessing.get_context("spawn")
        self.progress: Synchronized[float] = context.Value("d", 0.0)
        self._queue = context.Queue(maxsize=2 * workers)
        self._processes = [
            context.Process(target=produce, args=(number, self.progress, self._queue, *arguments), daemon=True)
            for number in range(workers)
        ]
        for process in self._processes:
            process.start()

    def __iter__(self) -> Iterator[B]:
        while True:
            yield self._queue.get()

    @property
    def waiting(self) -> int:
        """How many batches are ready; none means that training waits for text."""
        return int(self._queue.qsize())

    def close(self) -> None:
        """Ends the worker processes."""
        for process in self._processes:
            process.kill()
            process.join()
