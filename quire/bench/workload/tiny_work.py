"""Questions that the bundled model can answer, for what depends on the text: speculative decoding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from quire import bundled, source_tree
from quire.bench.workload.workloads import BenchRequest, Workload
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from evals.item import Item as Question

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
    """Greedy answers, as long as they are known to be. InvalidArgument outside a checkout, where questions are."""
    from tokenizers import Tokenizer

    try:
        source_tree.make_importable()
        from training.chat import prompt
    except ImportError as error:
        text = f"work: {name!r}: the questions are in the source tree only (no module {error.name})"
        raise InvalidArgument(text, field="work") from error

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
    from evals import Split, items

    seen = set()
    for question in items(skill, Split.HELD_BACK, size, group=4):
        if question.key not in seen:
            seen.add(question.key)
            yield question
