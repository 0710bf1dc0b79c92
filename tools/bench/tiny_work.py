"""Questions that the bundled model can answer, for what depends on the text: speculative decoding."""

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
MOST_OUTPUT = 160  # tokens of an answer that has no end
# Skill and size class of each workload, by what is left to guess: copied, counted, told, filled in.
CLASSES = {
    "tiny_recall": ("recall", "256"),
    "tiny_json": ("json", "4"),
    "tiny_counting": ("counting", "long"),
    "tiny_story": ("story", "named"),
    "tiny_echo": ("echo", "words"),
}


def work(name: str) -> Workload:
    """Returns greedy answers, as long as they are known to be."""
    tokenizer = Tokenizer.from_file(str(bundled.FOLDER / "tokenizer.json"))

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    asked = [
        BenchRequest(
            tokens(prompt(question.messages, question.tools)), min(len(tokens(question.expected)) + 1, MOST_OUTPUT)
        )
        for question in islice(_distinct(*CLASSES[name]), COUNT)
    ]
    return Workload(name, tuple(asked), temperature=0.0)


def _distinct(skill: str, size: str) -> Iterator[Question]:
    seen = set()
    for question in items(skill, Split.HELD_BACK, size, group=4):
        if question.key not in seen:
            seen.add(question.key)
            yield question


WORKLOADS: Mapping[str, Callable[[], Workload]] = {name: functools.partial(work, name) for name in CLASSES}
