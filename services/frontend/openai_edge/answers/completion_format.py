"""Response format of /v1/completions."""

from __future__ import annotations

from typing import Any

from quire.services.frontend.calls.measurements import Usage
from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.openai_edge.answers.format import AnswerFrame, ending, usage_object
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts, completion_logprobs
from quire.services.frontend.openai_edge.answers.metrics import metrics
from quire.services.frontend.openai_edge.answers.prompt_logprobs import echoed_logprobs, joined, prompt_logprobs
from quire.services.frontend.openai_edge.answers.prompt_only import FULL
from quire.services.frontend.openai_edge.body.requests import AnswerOptions
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.outcome import TokenLogprobs
from quire.services.frontend.request.request import Request
from quire.services.frontend.tokenizer.tokenizer import Tokenizer

# Fields that are null in a whole answer unless requested, as in vLLM.
UNREQUESTED_FIELDS = {"prompt_logprobs": None, "token_ids": None, "prompt_token_ids": None}


class CompletionFormat:
    """Format of completions: stream chunks and whole answers have the same choices."""

    def __init__(self, request: Request, options: AnswerOptions, tokenizer: Tokenizer, model: str) -> None:
        self._frame = AnswerFrame(f"cmpl-{request.request_id}", "text_completion", model, options.created_unix_s)
        self._options = options
        self._texts = TokenTexts(
            tokenizer, as_ids=options.tokens_as_ids, without_special=request.sampling.skip_special_tokens
        )
        self._n = request.sampling.n
        self._start = request.sampling.prompt_logprob_start
        self._offsets: dict[int, int] = {}  # by sample: offset at which its next token's text begins
        # by prompt: prompt log-probabilities, which come with its first sample
        self._prompts: dict[int, list[TokenLogprobs]] = {}

    def chunks(self, delta: SampleDelta, generation: Generation) -> list[dict[str, Any]]:
        """Converts a delta to one chunk, with the sample's usage so far if continuous usage was requested."""
        more = {}
        if self._options.continuous_usage:
            more["usage"] = usage_object(self._counted(generation.sample_usage(delta.sample)))
        return [self._frame([self._choice(delta, generation)], **more)]

    def last_chunk(self, generation: Generation) -> dict[str, Any] | None:
        """Returns the chunk without choices that ends a stream, with usage and times; None if neither was requested."""
        usage = {"usage": usage_object(self._counted(generation.usage))} if self._options.include_usage else {}
        fields = usage | metrics(self._options, generation)
        return self._frame([], **fields) if fields else None

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> dict[str, Any]:
        choices = [UNREQUESTED_FIELDS | self._choice(delta, generation) for delta in deltas]
        times = metrics(self._options, generation)
        return self._frame(choices, usage=usage_object(self._counted(generation.usage)), **times)

    def _counted(self, usage: Usage) -> Usage:
        return usage._replace(completion_tokens=0) if self._options.no_output else usage

    def _choice(self, delta: SampleDelta, generation: Generation) -> dict[str, Any]:
        """Returns a choice for a delta and advances the sample's text offset. Echoed text, prompt logprobs and
        prompt ids are only in the first choice of a sample."""
        if self._options.no_output:
            delta = delta._replace(token_ids=[], text="", logprobs=[], finish=FULL)
        prompt = delta.sample // self._n
        is_first = delta.sample not in self._offsets
        prefix = self._options.prefix[prompt] if is_first and self._options.prefix else ""
        offset = self._offsets.setdefault(delta.sample, len(prefix))
        choice: dict[str, Any] = {"index": delta.sample, "text": prefix + delta.text, "logprobs": None}
        prepared_prompt = generation.prepared[prompt]
        if is_first and (self._options.prompt_logprobs or self._options.echoed_logprobs):
            entries = self._prompts.setdefault(prompt, delta.prompt_logprobs)
            if self._options.prompt_logprobs:
                choice["prompt_logprobs"] = prompt_logprobs(entries, self._start, self._texts)
            if self._options.echoed_logprobs:
                choice["logprobs"], offset = echoed_logprobs(prepared_prompt.token_ids[0], entries, self._texts)
        if delta.logprobs:
            output, offset = completion_logprobs(delta.logprobs, self._texts, offset)
            choice["logprobs"] = joined(choice["logprobs"], output)
        self._offsets[delta.sample] = offset
        choice |= ending(delta.finish)
        if self._options.token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = prepared_prompt.token_ids if is_first else None
        if self._options.prompt_text and is_first:
            choice["prompt_text"] = self._texts.prompt(prepared_prompt.token_ids)
        return choice
