"""Converts items to training examples: conversations, their shares, and the tokens to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tools.evals import SKILLS, Split, load
from tools.evals.documents import sample_document
from tools.evals.item import Item, Message, assistant, user
from tools.training import recipe
from tools.training.chat import END_OF_TEXT, Segment, segments
from tools.training.tokenizer import FastEncoder

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are quire-tiny.",
    "You are quire-tiny, a small and friendly assistant.",
    "Answer briefly.",
    "Be polite and brief.",
    "You are a careful assistant. Answer exactly what is asked.",
    "You help people with short questions.",
    "Today is {weekday}.",
    "You are an assistant. Do not say more than you must.",
    "Be kind.",
)
SYSTEM_SHARE = 0.2
MAX_QUESTIONS = 24
CASUAL = ("arithmetic", "counting", "lists", "story", "tools")
"""Skills whose requests mean the same when typed carelessly. Scoring asks them properly."""

RAW_SHARES: dict[str, float] = {"story": 0.15, "counting": 0.1, "arithmetic": 0.05}
"""How often a skill's answer stands alone, as text to complete."""


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as tokens; `answers[i]` says whether token i is the model's to write."""

    skill: str
    tokens: list[int]
    answers: list[bool]


def with_system(rng: Random, messages: list[Message]) -> list[Message]:
    """Returns the messages, with a random system message before them in a share of SYSTEM_SHARE."""
    if rng.random() >= SYSTEM_SHARE:
        return messages
    day = rng.choice(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"))
    return [{"role": "system", "content": rng.choice(SYSTEM_TEXTS).format(weekday=day)}, *messages]


def recall_segments(rng: Random, longest: int) -> list[Segment]:
    """A document of up to `longest` tokens and several questions about it, one after another.

    Lengths are drawn evenly on a logarithmic scale: short documents, where recall is learned first, never go away.
    """
    budget = round(40 * (longest / 40) ** rng.random())
    # A question and its answer take about 30 tokens; the last ones must fit into the positions.
    room = (4000 - budget) // 30
    asked = rng.randint(1, max(1, min(MAX_QUESTIONS, room, budget // 30)))
    document = sample_document(rng, Split.TRAIN, budget, asked)
    messages: list[Message] = []
    between = rng.choices(("\n\n", "\n", " "), (0.8, 0.1, 0.1))[0]
    for fact in rng.sample(document.facts, asked):
        question = _casual(rng, fact.question(rng))
        messages += [user(question if messages else f"{document.text}{between}{question}"), assistant(fact.value)]
    return segments(with_system(rng, messages))


def item_segments(rng: Random, item: Item) -> list[Segment]:
    """A conversation that ends with the item's answer. Every earlier answer is learned as well."""
    messages = [*item.messages, assistant(item.expected)]
    if item.skill in CASUAL:
        messages[0] = user(_casual(rng, messages[0]["content"]))
    return segments(messages if item.tools else with_system(rng, messages), item.tools)


def raw_segments(item: Item) -> list[Segment]:
    """Returns the answer alone, as a text without a question, such as a completion request continues."""
    text = f"{item.key} = {item.expected}" if item.skill == "arithmetic" else item.expected
    return [(text + (END_OF_TEXT if item.ends else ""), True)]


def _casual(rng: Random, text: str) -> str:
    """Returns the text as casual typing, sometimes: without the final punctuation, without the first capital."""
    style = rng.random()
    if style < 0.08:
        text = text.rstrip(".?")
    return text[0].lower() + text[1:] if 0.04 < style < 0.12 else text


class Corpus:
    """An endless source of examples whose skills get their shares of the tokens."""

    def __init__(self, seed: str, encoder: FastEncoder) -> None:
        self._rng = Random(seed)
        self._encoder = encoder
        self._tokens = dict.fromkeys(SKILLS, 0.0)

    def next(self, progress: float, room: int) -> Example:
        """The next example, cut to `room` tokens, at this share of the run."""
        # The skill that is furthest behind its share: exact shares, whatever the lengths.
        skill = min(self._tokens, key=lambda name: self._tokens[name] / recipe.SHARES[name])
        tokens, answers = self._encode(self._segments(skill, progress))
        limit = min(room, 4096)
        self._tokens[skill] += min(len(tokens), limit)
        return Example(skill, tokens[:limit], answers[:limit])

    def _segments(self, skill: str, progress: float) -> list[Segment]:
        """Samples a training example of a skill; `progress` from 0 to 1 lets documents grow. Some examples are raw
        text, and open-ended ones are cut."""
        if skill == "recall":
            return recall_segments(self._rng, recipe.longest_document(progress))
        sizes = load(skill).sizes
        weights = recipe.SIZE_WEIGHTS.get(skill)
        size = self._rng.choices(sizes, [weights[s] for s in sizes])[0] if weights else self._rng.choice(sizes)
        item = load(skill).sample(self._rng, Split.TRAIN, size)
        if self._rng.random() < RAW_SHARES.get(skill, 0.0):
            return raw_segments(item)
        parts = item_segments(self._rng, item)
        return parts if item.ends else self.cut(parts)

    def cut(self, parts: Sequence[Segment]) -> list[Segment]:
        """Truncates an endless answer, so that it costs no more than others."""
        answer = next(i for i, (_, is_answer) in enumerate(parts) if is_answer)
        text = parts[answer][0].removesuffix("<|im_end|>")
        length = round(len(text) * self._rng.uniform(0.05, 1.0) ** 2)
        return [*parts[:answer], (text[:length], True)]

    def _encode(self, parts: Sequence[Segment]) -> tuple[list[int], list[bool]]:
        """Returns the tokens of all parts and, for each token, whether it is to be learned."""
        tokens: list[int] = []
        answers: list[bool] = []
        for text, is_answer in parts:
            ids = self._encoder.encode(text)
            tokens += ids
            answers += [is_answer] * len(ids)
        return tokens, answers
