"""How long a step of a simulated device takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """A step costs a constant, plus its prompt tokens, plus its decoding sequences; seconds."""

    step_s: float
    prompt_token_s: float
    sequence_s: float

    def seconds(self, num_tokens: int, num_decoding: int) -> float:
        return self.step_s + (num_tokens - num_decoding) * self.prompt_token_s + num_decoding * self.sequence_s
