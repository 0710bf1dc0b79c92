"""What an edge reads: what came for one sample since it last looked."""

from __future__ import annotations

from typing import NamedTuple

from quire.services.frontend.output_processor.answer_parser import Part
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


class SampleDelta(NamedTuple):
    """Several steps' worth when the reader was slow."""

    sample: int  # prompt number * n + number of the sample
    token_ids: list[int]
    text: str  # may lag behind the tokens
    logprobs: list[TokenLogprobs]  # one per token if asked for, else empty
    finish: Finish | None
    parts: list[Part] | None = None  # the text taken apart, if the request asks for that and there is a format for it
    prompt_logprobs: list[TokenLogprobs] = []  # noqa: RUF012 - in the first one of a prompt's first sample, if asked for
