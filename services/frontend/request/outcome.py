"""Results of a sample: log-probabilities of its tokens, and why it ended."""

from __future__ import annotations

from typing import NamedTuple

from quire.shared.pb.common.v1.finish_pb2 import FinishReason


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one position."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: list[tuple[int, float]]  # (token id, logprob): the most likely tokens, best first, or the requested ones


class Finish(NamedTuple):
    """Why a sample ended, and for STOP what matched; neither field set: the end-of-sequence token."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None
    score: float | None = None  # of a beam search result
    weight_version: str = ""  # version of the weights that computed the last token; empty: no token was computed
