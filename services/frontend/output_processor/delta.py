"""What an edge reads: what came for one sample since it last looked."""

from __future__ import annotations

from typing import NamedTuple

from quire.services.frontend.output_processor.answer_parser import Part
from quire.services.frontend.request.outcome import Finish, TokenLogprobs


class SampleDelta(NamedTuple):
    """Several steps' worth when the reader was slow."""

    sample: int  # prompt number * n + number of the sample
    token_ids: list[int]
    text: str  # may lag behind the tokens
    logprobs: list[TokenLogprobs]  # one per token if asked for, else empty
    finish: Finish | None
    parts: list[Part] | None = None  # the text taken apart, if the request asks for that and there is a format for it
    prompt_logprobs: list[TokenLogprobs] = []  # noqa: RUF012 - in the first one of a prompt's first sample, if asked for
