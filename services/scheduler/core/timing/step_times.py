"""Durations of a worker's steps, and what is derived from them: expected step and prompt times, the number of steps in
flight, and the limit of prompt tokens in a step."""

from __future__ import annotations

import math

SMOOTHING = 0.2

# Pace of prompts.
PROMPT_STEP_TOKENS = 64  # minimum tokens per sampling slot for a step to count as a prompt step

# Steps in flight.
DEFAULT_DEPTH = 2  # the worker has the next step before it finishes one
MAX_DEPTH = 3
# Shorter steps end before the round trip is over (1 ms through both services on an H200's host): a third step in flight
# hides it. For longer steps it would only delay new sequences.
SHORT_STEP_S = 0.0015
# The step after a long one is planned shortly before that one ends, so that it includes every sequence that arrives
# until then. (Planned at once, 32 prompts on a CPU were computed as: the first one, then the few that had arrived a
# moment later, then all others after both.)
LONG_STEP_S = 0.02
LEAD_SHARE = 0.2  # share of the step's expected time: time to plan, send and prepare, and for steps that end early
# With 6 ms, 256 prompts with a shared prefix of 2,048 tokens took a fifth longer where steps take 24 ms (a simulated
# worker with an H200's times); a GPU worker also launches such steps kernel by kernel, for 9 to 15 ms.
MIN_LEAD_S = 0.02

# Prompt tokens in a step while other sequences stream, so that the gaps in their streams stay short.
INITIAL_TOKENS = 512  # tokens, before the first measurement
MIN_TOKENS = 32  # minimum progress of a prompt, even where steps without prompts take too long
TARGET_SHARE = 0.9  # target share of the longest gap: steps of equal work differ by a few percent
CHUNK_SMOOTHING = 0.5
MAX_GROWTH = 2.0  # from one step to the next


class StepTimes:
    """Step times from returned steps. Prefers estimates that are too short over ones that are too long."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[float, float]
        ] = {}  # seconds per token by size class: smoothed, and of the last step

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records a returned step of `num_tokens` tokens, whose seconds per token are smoothed by the bit length of
        that number."""
        rate = seconds / num_tokens
        smoothed, _ = self._known.get(num_tokens.bit_length(), (rate, rate))
        self._known[num_tokens.bit_length()] = (smoothed + SMOOTHING * (rate - smoothed), rate)

    def expected(self, num_tokens: int) -> float:
        """Returns the expected seconds; 0 if no step of about that size has been measured."""
        known = self._known.get(num_tokens.bit_length())
        return 0.0 if known is None else num_tokens * min(known)


class PromptPace:
    """Smoothed seconds per prompt token; None before the first measurement."""

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None

    def observe(self, num_tokens: int, num_sampled: int, seconds: float) -> None:
        """Records the duration in seconds of a step with `num_tokens` computed tokens and `num_sampled` sampling
        slots; ignores steps with few tokens per sampling slot, which mostly decode."""
        if num_tokens < PROMPT_STEP_TOKENS * max(1, num_sampled):
            return
        measured = seconds / num_tokens
        known = self._seconds_per_token
        self._seconds_per_token = measured if known is None else known + SMOOTHING * (measured - known)

    def seconds_for(self, num_tokens: int) -> float:
        """Returns the minimum seconds until the first token of a prompt with `num_tokens` to compute; 0 without a
        measurement."""
        return 0.0 if self._seconds_per_token is None else num_tokens * self._seconds_per_token


class PipelineDepth:
    """Fixed depth, or one adapted to the step time. A worker with several pipeline stages has one step for each stage,
    plus the next one."""

    def __init__(self, fixed: int, num_stages: int = 1) -> None:
        """`fixed`: 0: adapted to the step time."""
        self._fixed, self.num_stages = fixed, num_stages
        self._step_s = SHORT_STEP_S  # smoothed

    def observe(self, seconds: float) -> None:
        """Records the duration of a step, without the time that it waited for the one before."""
        self._step_s += SMOOTHING * (seconds - self._step_s)

    @property
    def max_steps(self) -> int:
        """Number of steps that may be in flight now."""
        if self._fixed:
            return max(self._fixed, self.num_stages)
        return (MAX_DEPTH if self._step_s < SHORT_STEP_S else DEFAULT_DEPTH) + self.num_stages - 1

    def next_at(self, begun: float, expected_s: float) -> float:
        """Returns the time before which the step after those in flight is not planned. The oldest one started at
        `begun` and takes about `expected_s`."""
        if self._fixed or expected_s < LONG_STEP_S:
            return -math.inf
        return begun + expected_s - max(MIN_LEAD_S, LEAD_SHARE * expected_s)

    @staticmethod
    def max_steps_for(fixed: int, num_stages: int = 1) -> int:
        return max(fixed, num_stages) if fixed else MAX_DEPTH + num_stages - 1


class ChunkLimit:
    """Limit of prompt tokens in a step while other sequences stream. Adapts to the times of steps that computed prompts
    meanwhile: it is reduced at once after a step that took too long, and raised gradually after short ones. A token
    costs more the further back it is in its prompt, so the limit keeps adapting."""

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
            self._without_s += CHUNK_SMOOTHING * (seconds - self._without_s)
            return
        for_prompts = max(seconds - self._without_s, seconds / 10)
        fitting = num_prompt_tokens * max(0.0, self._aim_s - self._without_s) / for_prompts
        if fitting > self._tokens:
            fitting = min(fitting, MAX_GROWTH * num_prompt_tokens)  # the short remainder of a prompt is weak evidence
            fitting = max(self._tokens, self._tokens + CHUNK_SMOOTHING * (fitting - self._tokens))
        self._tokens = min(max(fitting, MIN_TOKENS), self._most)
