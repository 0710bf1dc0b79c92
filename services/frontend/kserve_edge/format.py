"""Formats answers as tensors with one element per sample."""

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

UNFINISHED = b"None"  # as Triton's vLLM backend writes it


class _SampleOutput:
    """Output of one sample since the last answer, collected from its deltas."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0
        self.logprobs: list[TokenLogprobs] = []
        self.finish: Finish | None = None

    def add(self, delta: SampleDelta) -> None:
        """Adds a delta's text, tokens, log-probabilities and finish reason."""
        self.text += delta.text
        self.num_tokens += len(delta.token_ids)
        self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish


class TensorWriter:
    """Formats the answers of one request as output tensors, in one piece or several."""

    def __init__(self, call: OpenInferenceCall, texts: TokenTexts) -> None:
        self._call = call
        self._texts = texts
        self._sums: defaultdict[int, float] = defaultdict(float)  # sample -> cumulative log-probability
        self._prefix = call.text if call.with_prompt else ""
        self._num_unfinished = 0
        self._has_begun = False

    @property
    def is_last(self) -> bool:
        """Whether the last answer formatted was the request's last."""
        return self._has_begun and not self._num_unfinished

    def tensors(self, deltas: Sequence[SampleDelta], generation: Generation) -> list[Tensor]:
        """Returns the requested output tensors for these deltas, with one element per sample (one in all for the number
        of input tokens); the prompt, if asked for, is put in front of the first texts."""
        samples = [_SampleOutput() for _ in range(generation.request.num_samples)]
        if not self._has_begun:
            self._has_begun, self._num_unfinished = True, len(samples)
        for delta in deltas:
            samples[delta.sample].add(delta)
            self._num_unfinished -= delta.finish is not None
            self._sums[delta.sample] += sum(entry.logprob for entry in delta.logprobs)
        values: dict[str, Sequence[Any]] = {
            tensors.TEXT_OUTPUT: [(self._prefix + output.text).encode() for output in samples],
            tensors.FINISH_REASON: [_reason(output.finish) for output in samples],
            tensors.CUMULATIVE_LOGPROB: [self._sums[sample] for sample in range(len(samples))],
            tensors.NUM_INPUT_TOKENS: [generation.usage.prompt_tokens],
            tensors.NUM_OUTPUT_TOKENS: [output.num_tokens for output in samples],
        }
        if tensors.LOGPROBS in self._call.outputs:
            values[tensors.LOGPROBS] = [self._logprobs(output, generation) for output in samples]
        self._prefix = ""
        return [
            Tensor(kind.name, kind.datatype, values[kind.name])
            for kind in tensors.OUTPUTS
            if kind.name in self._call.outputs
        ]

    def _logprobs(self, output: _SampleOutput, generation: Generation) -> bytes:
        """Returns the sample's log-probabilities as JSON, candidates by token id per token; null if not requested."""
        if generation.request.sampling.logprobs is None:
            return b"null"
        return orjson.dumps([self._candidates(entry) for entry in output.logprobs], option=orjson.OPT_NON_STR_KEYS)

    def _candidates(self, entry: TokenLogprobs) -> dict[int, Any]:
        """Returns the candidates at one position by token id, the sampled one first, each once."""
        candidates = {entry.token_id: self._candidate(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, 1):
            candidates.setdefault(token_id, self._candidate(token_id, logprob, rank))
        return candidates

    def _candidate(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": as_json(logprob), "rank": rank, "decoded_token": self._texts.text(token_id)}


def _reason(finish: Finish | None) -> bytes:
    return UNFINISHED if finish is None else FINISH_REASONS[finish.reason].encode()
