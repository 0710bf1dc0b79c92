"""Outputs that an edge reads for one sample."""

from __future__ import annotations

from typing import NamedTuple

from quire.services.frontend.output_processor.answer_parser import Part
from quire.services.frontend.request.outcome import Finish, TokenLogprobs


class SampleDelta(NamedTuple):
    """New output of one sample: several steps' worth when the reader is slow."""

    sample: int  # prompt index * n + index of the sample within its prompt
    token_ids: list[int]
    text: str  # may lag behind token_ids
    logprobs: list[TokenLogprobs]  # one per token if requested, else empty
    finish: Finish | None
    parts: list[Part] | None = None  # the parsed text, if the request asks for parsing and a format exists
    prompt_logprobs: list[TokenLogprobs] = []  # noqa: RUF012 - in the first one of a prompt's first sample, if asked for
