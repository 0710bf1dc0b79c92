"""Response format of /generate: the text so far and its metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.openai_edge import errors
from quire.services.frontend.openai_edge.answers.chunks import DONE, event
from quire.services.frontend.openai_edge.answers.format import FINISH_REASONS
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts, as_json
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.outcome import Finish, TokenLogprobs
from quire.shared.errors import QuireError

Json = dict[str, Any]


class _SampleOutput:
    """Output of one sample so far, which every event of a stream repeats."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish: Finish | None = None

    def add(self, delta: SampleDelta) -> None:
        """Appends a delta's text, ids and logprobs, and takes over its finish."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish = delta.finish


class SglangGenerateFormat:
    """Response format of /generate."""

    def __init__(self, texts: TokenTexts, *, several: bool, with_texts: bool) -> None:
        """Creates a format for one answer.

        `several`: the answer is a list, and events of a stream have an index. `with_texts`: log-probabilities include
        the tokens' texts.
        """
        self._texts = texts
        self._several = several
        self._with_texts = with_texts
        self._samples: dict[int, _SampleOutput] = {}

    def events(self, deltas: list[SampleDelta], generation: Generation) -> bytes:
        return b"".join([event(self._add(delta, generation)) for delta in deltas])

    def last_events(self, generation: Generation) -> bytes:
        return DONE

    def error_events(self, error: QuireError) -> bytes:
        return event(errors.as_object(error)) + DONE

    def refusal(self, error: QuireError) -> Response:
        return errors.as_response(error)

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> Any:
        outputs = [self._add(delta, generation) for delta in deltas]
        return outputs if self._several else outputs[0]

    def _add(self, delta: SampleDelta, generation: Generation) -> Json:
        """Adds the delta to its sample and returns the sample's whole output so far, since SGLang's streams are
        cumulative. Several samples carry an index."""
        so_far = self._samples.setdefault(delta.sample, _SampleOutput())
        so_far.add(delta)
        number = {"index": delta.sample} if self._several else {}
        return {
            "text": so_far.text,
            "output_ids": so_far.token_ids,
            "meta_info": self._meta_info(delta.sample, so_far, generation),
            **number,
        }

    def _meta_info(self, sample: int, so_far: _SampleOutput, generation: Generation) -> Json:
        """Returns a sample's metadata: finish reason, token counts, logprobs so far, and the latency in seconds
        since arrival."""
        usage = generation.sample_usage(sample)
        return {
            "id": generation.request.request_id,
            "finish_reason": _ending(so_far.finish, len(so_far.token_ids)),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": len(so_far.token_ids),
            "cached_tokens": usage.cached_tokens,
            "e2e_latency": asyncio.get_running_loop().time() - generation.request.arrival_s,
            **self._logprobs(so_far, generation),
        }

    def _logprobs(self, so_far: _SampleOutput, generation: Generation) -> Json:
        """Returns the logprob fields that the request asked for, cumulative; {} if it asked for none."""
        sampling = generation.request.sampling
        if sampling.logprobs is None:
            return {}
        logprobs: Json = {"output_token_logprobs": self._pairs(so_far.logprobs)}
        if sampling.logprobs:
            logprobs["output_top_logprobs"] = [self._top(entry) for entry in so_far.logprobs]
        if sampling.logprob_token_ids:
            logprobs["output_token_ids_logprobs"] = [self._top(entry) for entry in so_far.logprobs]
        if sampling.prompt_logprobs is not None:
            logprobs["input_token_logprobs"] = self._pairs(so_far.prompt_logprobs)
            if sampling.prompt_logprobs:
                logprobs["input_top_logprobs"] = [self._top(entry) for entry in so_far.prompt_logprobs]
        return logprobs

    def _pairs(self, entries: Sequence[TokenLogprobs]) -> list[Any]:
        return [self._entry(entry.token_id, entry.logprob) for entry in entries]

    def _top(self, entry: TokenLogprobs) -> list[Any]:
        return [self._entry(token_id, logprob) for token_id, logprob in entry.top]

    def _entry(self, token_id: int, logprob: float) -> tuple[float, int, str | None]:
        return as_json(logprob), token_id, self._texts.text(token_id) if self._with_texts else None


def _ending(finish: Finish | None, num_tokens: int) -> Json | None:
    """Returns finish_reason: None while the sample runs; `matched` is the stop string or token id, `length` the
    number of tokens."""
    if finish is None:
        return None
    reason = FINISH_REASONS[finish.reason]
    if reason == "length":
        return {"type": reason, "length": num_tokens}
    matched = finish.stop_token_id if finish.stop_string is None else finish.stop_string
    return {"type": reason, **({} if matched is None else {"matched": matched})}
