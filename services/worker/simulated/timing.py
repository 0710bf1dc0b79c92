"""Duration of a simulated device's steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """A step takes a constant time, plus time per prompt token and per decoding sequence; in seconds."""

    step_s: float
    prompt_token_s: float
    sequence_s: float

    def seconds(self, num_tokens: int, num_decoding: int) -> float:
        """Returns the duration of a step of `num_tokens` tokens, `num_decoding` of which are of decoding sequences."""
        return self.step_s + (num_tokens - num_decoding) * self.prompt_token_s + num_decoding * self.sequence_s
