"""Long documents: facts worth asking about, spread through sentences that say nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from tools.evals import vocabulary as v
from tools.evals.facts import Fact, Subjects, sample_fact
from tools.evals.item import Split

_PIECE = re.compile(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s")

FILLERS: tuple[str, ...] = (
    "The {adj} {obj} had been there for years.",
    "A {mood} {animal} crossed the road near the {place}.",
    "{person} looked out of the window and said nothing.",
    "Nobody in {town} could remember such a long winter.",
    "On {weekday} it rained until the evening.",
    "The smell of {food} filled the {place}.",
    "{person} and {other} talked for a while about the weather.",
    "Somebody had left the {adj} {obj} next to the door.",
    "In {month} the road to {town} is often closed.",
    "The {place} was {mood} that morning.",
    "There were {food} on the table, and the {obj} stood beside them.",
    "{person} promised to write a letter soon.",
    "The {colour} flag moved slowly in the wind.",
    "The old people of {town} tell many stories about the {animal}.",
    "Every {weekday} the market sells {food} and {food2}.",
    "{person} bought {food} and went home early.",
    "It was a {mood} day, and the {animal} slept in the sun.",
    "The {obj} made a strange noise, but no one was worried.",
    "The {animal} was seen behind the {place} again.",
    "{person} has never liked {food}.",
    "The bus from {town} was late again.",
    "After the storm the {place} had to be repaired.",
    "Children from {town} painted the wall in {colour} and {colour2}.",
    "{person} is fond of {subject} and speaks some {language}.",
)


TOKENS_PER_SENTENCE = 13
"""Mean length of a sentence here, in tokens."""


@dataclass(frozen=True, slots=True)
class FactDocument:
    """A text and the facts that it states, each exactly once."""

    text: str
    facts: tuple[Fact, ...]


def approximate_tokens(text: str) -> int:
    """About how many tokens the bundled tokenizer makes of a generated text: one a word, digit or mark."""
    return len(_PIECE.findall(text))


def filler(rng: Random) -> str:
    """Draws a sentence that states no fact, from a template and word lists."""
    return rng.choice(FILLERS).format(
        adj=rng.choice(v.ADJECTIVES),
        obj=rng.choice(v.OBJECTS),
        mood=rng.choice(v.MOODS),
        animal=rng.choice(v.ANIMALS),
        place=rng.choice(v.PLACES),
        person=v.person(rng),
        other=v.person(rng),
        town=rng.choice(v.TOWNS),
        weekday=rng.choice(v.WEEKDAYS),
        month=rng.choice(v.MONTHS),
        food=rng.choice(v.FOODS),
        food2=rng.choice(v.FOODS),
        colour=rng.choice(v.COLOURS),
        colour2=rng.choice(v.COLOURS),
        subject=rng.choice(v.SUBJECTS),
        language=rng.choice(v.LANGUAGES),
    )


def _sample_facts(rng: Random, split: Split, count: int, asked: int) -> list[Fact]:
    """`count` facts on distinct topics, the first `asked` of them from `split` and the others from training."""
    facts: list[Fact] = []
    topics: set[tuple[str, str]] = set()
    named: Subjects = {}
    while len(facts) < count:
        fact = sample_fact(rng, split if len(facts) < asked else Split.TRAIN, named)
        if fact.topic not in topics:
            topics.add(fact.topic)
            named.setdefault(fact.relation.subject, []).append(fact.subject)
            facts.append(fact)
    return facts


def _paragraphs(rng: Random, sentences: list[str]) -> str:
    """Joins the sentences in paragraphs of three to seven."""
    paragraphs = []
    start = 0
    while start < len(sentences):
        stop = start + rng.randint(3, 7)
        paragraphs.append(" ".join(sentences[start:stop]))
        start = stop
    return "\n".join(paragraphs)


def sample_document(rng: Random, split: Split, budget: int, asked: int) -> FactDocument:
    """A document of about `budget` tokens whose first `asked` facts come from `split`.

    Between a quarter and six tenths of its sentences state facts. Those that are not asked about come from training.
    """
    count = max(asked, 2, round(budget / TOKENS_PER_SENTENCE * rng.uniform(0.25, 0.6)))
    facts = _sample_facts(rng, split, count, asked)
    sentences = [fact.statement(rng) for fact in facts]
    left = budget - sum(map(approximate_tokens, sentences))
    while left > TOKENS_PER_SENTENCE:
        sentence = filler(rng)
        sentences.append(sentence)
        left -= approximate_tokens(sentence)
    rng.shuffle(sentences)
    return FactDocument(_paragraphs(rng, sentences), tuple(facts))
