"""How much of a prompt a step may compute while others stream, so that the gaps in their streams stay short."""

from __future__ import annotations

FIRST = 512  # tokens, before a step has told
LEAST = 32  # a prompt gets on even where steps without any take too long
AIM = 0.9  # of the longest gap: steps of equal work differ by a few percent
SMOOTHING = 0.5
MOST_GROWTH = 2.0  # from one step to the next


class ChunkLimit:
    """Learns from steps that computed prompts beside streams: what takes too long is cut at once, what was short is
    raised little by little. A token costs more the further it is in its prompt, so it never stops learning."""

    def __init__(self, longest_gap_s: float, most: int) -> None:
        """`longest_gap_s`: 0: there is no limit. `most`: tokens of a step."""
        self._aim_s = AIM * longest_gap_s
        self._most = most
        self._tokens = float(min(FIRST, most))
        self._without_s = 0.0  # how long steps without prompts take, smoothed

    @property
    def enabled(self) -> bool:
        return self._aim_s > 0

    @property
    def num_tokens(self) -> int:
        return int(self._tokens)

    def observe(self, num_prompt_tokens: int, num_others: int, seconds: float) -> None:
        """Of a step in which `num_others` tokens were those of streams."""
        if not num_others or seconds <= 0:
            return
        if not num_prompt_tokens:
            self._without_s += SMOOTHING * (seconds - self._without_s)
            return
        for_prompts = max(seconds - self._without_s, seconds / 10)
        fitting = num_prompt_tokens * max(0.0, self._aim_s - self._without_s) / for_prompts
        if fitting > self._tokens:
            fitting = min(fitting, MOST_GROWTH * num_prompt_tokens)  # the short rest of a prompt tells little
            fitting = max(self._tokens, self._tokens + SMOOTHING * (fitting - self._tokens))
        self._tokens = min(max(fitting, LEAST), self._most)
