"""Recall: a long document, then a question whose answer stands in it, word for word.

The document comes first and the question last, so that questions about one document share it as a prefix.
"""

from __future__ import annotations

from random import Random

from tools.evals.documents import FactDocument, sample_document
from tools.evals.facts import Fact
from tools.evals.item import Item, Skill, Split, exact, user

BUDGETS: dict[str, int] = {"256": 230, "1k": 950, "2k": 1900, "3.5k": 3330}
"""Size class to the document's length as `approximate_tokens` counts; real prompts stay below the class's name."""


def _item(document: FactDocument, fact: Fact, size: str, rng: Random) -> Item:
    messages = (user(f"{document.text}\n\n{fact.question(rng)}"),)
    return Item("recall", size, messages, fact.value, fact.key, max_tokens=32)


def sample_group(rng: Random, split: Split, size: str, count: int) -> list[Item]:
    """`count` questions about one document of this size class."""
    budget = round(BUDGETS[size] * rng.uniform(0.85, 1.0))
    document = sample_document(rng, split, budget, asked=count)
    return [_item(document, fact, size, rng) for fact in document.facts[:count]]


def sample(rng: Random, split: Split, size: str) -> Item:
    """One question about a document of this size class."""
    return sample_group(rng, split, size, 1)[0]


SKILL = Skill("recall", tuple(BUDGETS), sample, exact, sample_group)
