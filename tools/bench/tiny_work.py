"""Questions that the bundled model can answer, for benchmarks that depend on the text: speculative decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from tokenizers import Tokenizer

from quire import bundled
from quire.bench.workload.workloads import BenchRequest, Workload
from tools.evals import Split, items
from tools.evals.item import Item as Question
from tools.training.chat import prompt

COUNT = 32
MAX_OUTPUT = 160  # tokens of an endless answer
# Skill and size class of each workload, from predictable to free: copying, counting, stories, filling in.
CLASSES = {
    "tiny_recall": ("recall", "256"),
    "tiny_json": ("json", "4"),
    "tiny_counting": ("counting", "long"),
    "tiny_story": ("story", "named"),
    "tiny_echo": ("echo", "words"),
}


def work(name: str) -> Workload:
    """Returns a workload of questions whose greedy answers are known; each generates as many tokens as its answer
    has, at most MAX_OUTPUT."""
    tokenizer = Tokenizer.from_file(str(bundled.FOLDER / "tokenizer.json"))

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    asked = [
        BenchRequest(
            tokens(prompt(question.messages, question.tools)), min(len(tokens(question.expected)) + 1, MAX_OUTPUT)
        )
        for question in islice(_distinct(*CLASSES[name]), COUNT)
    ]
    return Workload(name, tuple(asked), temperature=0.0)


def _distinct(skill: str, size: str) -> Iterator[Question]:
    """Yields held-back questions of a skill, each key only once; never ends."""
    seen = set()
    for question in items(skill, Split.HELD_BACK, size, group=4):
        if question.key not in seen:
            seen.add(question.key)
            yield question


WORKLOADS: Mapping[str, Callable[[], Workload]] = {name: functools.partial(work, name) for name in CLASSES}
