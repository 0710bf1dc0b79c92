"""What came of a sample: the log-probabilities of its tokens, and how it ended."""

from __future__ import annotations

from typing import NamedTuple

from quire.shared.pb.common.v1.finish_pb2 import FinishReason


class TokenLogprobs(NamedTuple):
    """Of one position."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: list[tuple[int, float]]  # the most likely tokens, best first, or those that were named


class Finish(NamedTuple):
    """Why a sample ended, and what matched with STOP (neither: end of sequence)."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None
    score: float | None = None  # of a beam search's result
    weight_version: str = ""  # of the weights that computed its last token; empty: none was computed
