"""Limit of prompt tokens in a step while other sequences stream, so that the gaps in their streams stay short."""

from __future__ import annotations

INITIAL_TOKENS = 512  # tokens, before the first measurement
MIN_TOKENS = 32  # minimum progress of a prompt, even where steps without prompts take too long
TARGET_SHARE = 0.9  # target share of the longest gap: steps of equal work differ by a few percent
SMOOTHING = 0.5
MAX_GROWTH = 2.0  # from one step to the next


class ChunkLimit:
    """Adapts to the times of steps that computed prompts while others streamed: it is reduced at once after a step that
    took too long, and raised gradually after short ones. A token costs more the further back it is in its prompt, so
    the limit keeps adapting."""

    def __init__(self, longest_gap_s: float, most: int) -> None:
        """`longest_gap_s`: 0: no limit. `most`: maximum tokens of a step."""
        self._aim_s = TARGET_SHARE * longest_gap_s
        self._most = most
        self._tokens = float(min(INITIAL_TOKENS, most))
        self._without_s = 0.0  # smoothed duration of steps without prompts

    @property
    def enabled(self) -> bool:
        return self._aim_s > 0

    @property
    def num_tokens(self) -> int:
        return int(self._tokens)

    def observe(self, num_prompt_tokens: int, num_others: int, seconds: float) -> None:
        """Records the duration in seconds of a step with `num_others` tokens of streams besides its prompt tokens,
        and adapts the limit; steps without streams are ignored, steps without prompts only measure the streams'
        share."""
        if not num_others or seconds <= 0:
            return
        if not num_prompt_tokens:
            self._without_s += SMOOTHING * (seconds - self._without_s)
            return
        for_prompts = max(seconds - self._without_s, seconds / 10)
        fitting = num_prompt_tokens * max(0.0, self._aim_s - self._without_s) / for_prompts
        if fitting > self._tokens:
            fitting = min(fitting, MAX_GROWTH * num_prompt_tokens)  # the short remainder of a prompt is weak evidence
            fitting = max(self._tokens, self._tokens + SMOOTHING * (fitting - self._tokens))
        self._tokens = min(max(fitting, MIN_TOKENS), self._most)
