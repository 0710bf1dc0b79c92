"""All choices of the training run, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

from tools.evals.lists import KINDS, LENGTHS
from tools.training.network import NetworkShape

BATCH_TOKENS = 131_072
"""Tokens of one step: some 1,200 conversations, and enough for a large GPU to be busy."""

TARGET_SHARE = 0.25
"""Share of the packed tokens that the loss looks at: answers first, then tokens of prompts until it is full."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Training settings. `seconds` limits the training itself: the schedule follows the clock, so it always ends
    decayed."""

    seconds: float
    seed: int = 1
    batch_tokens: int = BATCH_TOKENS
    workers: int = 8
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    warm_up: float = 0.01
    decay: float = 0.5
    shape: NetworkShape = field(default_factory=NetworkShape)

    @property
    def batch_targets(self) -> int:
        """Number of positions of a batch that the loss uses."""
        return int(self.batch_tokens * TARGET_SHARE)

    def lr_scale(self, progress: float) -> float:
        """Returns the share of the peak learning rate at this share of the run: linear up, level, linear down to
        zero."""
        return min(1.0, progress / self.warm_up, (1.0 - progress) / self.decay)


CURRICULUM: tuple[tuple[float, int], ...] = ((0.03, 150), (0.06, 400), (0.12, 1000), (0.2, 2000), (1.0, 3500))
"""(share of the run, longest document until then, in tokens). Recall is learned on short documents first."""


def longest_document(progress: float) -> int:
    """Returns the curriculum's document limit at this share of the run."""
    return next((limit for until, limit in CURRICULUM if progress <= until), CURRICULUM[-1][1])


SHARES: dict[str, float] = {
    "recall": 0.48,
    "arithmetic": 0.12,
    "json": 0.05,
    "tools": 0.08,
    "lists": 0.09,
    "counting": 0.05,
    "echo": 0.04,
    "story": 0.02,
    "small_talk": 0.02,
    "conversation": 0.05,
}
"""Share of the tokens, prompts included, that each skill gets."""

SIZE_WEIGHTS: dict[str, dict[str, float]] = {
    "arithmetic": {
        "sum-1": 0.02,
        "sum-2": 0.13,
        "sum-3": 0.35,
        "difference-1": 0.02,
        "difference-2": 0.13,
        "difference-3": 0.35,
    },
    "counting": {"short": 0.4, "medium": 0.15, "long": 0.05, "down": 0.15, "steps": 0.2, "open": 0.05},
    "small_talk": {"talk": 0.6, "unknown": 0.25, "name": 0.15},
    "lists": {f"{kind}-{length}": 2.0 if kind == "sort-numbers" else 1.0 for kind in KINDS for length in LENGTHS},
}
"""How often a size class is drawn, where classes are not drawn evenly."""

TARGET_WEIGHTS: dict[str, float] = {"recall": 2.0, "counting": 0.3, "story": 0.3}
"""Weight of an answer's token in the loss where it is not 1: recall has few tokens, counts and stories have many."""

PROMPT_WEIGHT = 0.05
"""Weight of a token that the user wrote. It teaches which words go together, and costs nothing once that is known."""
