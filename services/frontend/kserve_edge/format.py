"""TensorWriter as tensors: an element for each sample."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import orjson

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.kserve_edge import tensors
from quire.services.frontend.kserve_edge.inference_call import OpenInferenceCall
from quire.services.frontend.kserve_edge.tensors import Tensor
from quire.services.frontend.openai_edge.answers.format import FINISH_REASONS
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts, as_json
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.outcome import Finish, TokenLogprobs

UNFINISHED = b"None"  # what the vLLM backend writes


class _News:
    """Of one sample, since the last answer."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0
        self.logprobs: list[TokenLogprobs] = []
        self.finish: Finish | None = None

    def add(self, delta: SampleDelta) -> None:
        self.text += delta.text
        self.num_tokens += len(delta.token_ids)
        self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish


class TensorWriter:
    """Of one request."""

    def __init__(self, call: OpenInferenceCall, texts: TokenTexts) -> None:
        self._call = call
        self._texts = texts
        self._sums: defaultdict[int, float] = defaultdict(float)  # of log-probabilities, by sample
        self._prefix = call.text if call.with_prompt else ""
        self._num_unfinished = 0
        self._has_begun = False

    @property
    def is_last(self) -> bool:
        """Whether the answer that was made last is the request's last."""
        return self._has_begun and not self._num_unfinished

    def tensors(self, deltas: Sequence[SampleDelta], generation: Generation) -> list[Tensor]:
        samples = [_News() for _ in range(generation.request.num_samples)]
        if not self._has_begun:
            self._has_begun, self._num_unfinished = True, len(samples)
        for delta in deltas:
            samples[delta.sample].add(delta)
            self._num_unfinished -= delta.finish is not None
            self._sums[delta.sample] += sum(entry.logprob for entry in delta.logprobs)
        values: dict[str, Sequence[Any]] = {
            tensors.TEXT_OUTPUT: [(self._prefix + news.text).encode() for news in samples],
            tensors.FINISH_REASON: [_reason(news.finish) for news in samples],
            tensors.CUMULATIVE_LOGPROB: [self._sums[sample] for sample in range(len(samples))],
            tensors.NUM_INPUT_TOKENS: [generation.usage.prompt_tokens],
            tensors.NUM_OUTPUT_TOKENS: [news.num_tokens for news in samples],
        }
        if tensors.LOGPROBS in self._call.outputs:
            values[tensors.LOGPROBS] = [self._logprobs(news, generation) for news in samples]
        self._prefix = ""
        return [
            Tensor(kind.name, kind.datatype, values[kind.name])
            for kind in tensors.OUTPUTS
            if kind.name in self._call.outputs
        ]

    def _logprobs(self, news: _News, generation: Generation) -> bytes:
        if generation.request.sampling.logprobs is None:
            return b"null"
        return orjson.dumps([self._candidates(entry) for entry in news.logprobs], option=orjson.OPT_NON_STR_KEYS)

    def _candidates(self, entry: TokenLogprobs) -> dict[int, Any]:
        """By token, the sampled one first."""
        found = {entry.token_id: self._candidate(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, 1):
            found.setdefault(token_id, self._candidate(token_id, logprob, rank))
        return found

    def _candidate(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": as_json(logprob), "rank": rank, "decoded_token": self._texts.text(token_id)}


def _reason(finish: Finish | None) -> bytes:
    return UNFINISHED if finish is None else FINISH_REASONS[finish.reason].encode()
