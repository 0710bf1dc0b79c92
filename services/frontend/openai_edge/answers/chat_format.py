"""Response format of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.openai_edge.answers.format import AnswerFrame, ending, usage_object
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts, chat_logprobs
from quire.services.frontend.openai_edge.answers.message_parts import (
    TextInputCalls,
    TextInputDelta,
    delta_of,
    has_calls,
    message_of,
)
from quire.services.frontend.openai_edge.answers.metrics import metrics
from quire.services.frontend.openai_edge.answers.prompt_logprobs import prompt_logprobs
from quire.services.frontend.openai_edge.body.requests import AnswerOptions
from quire.services.frontend.output_processor.answer_parser import Part
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.request import Request
from quire.services.frontend.tokenizer.tokenizer import Tokenizer

TOOL_CALLS = "tool_calls"


class ChatFormat:
    """Format of chat completions: a stream opens each choice with the role; a whole answer has messages, not deltas."""

    def __init__(self, request: Request, options: AnswerOptions, tokenizer: Tokenizer, model: str) -> None:
        kind = "chat.completion.chunk" if options.stream else "chat.completion"
        self._frame = AnswerFrame(f"chatcmpl-{request.request_id}", kind, model, options.created_unix_s)
        self._options = options
        self._texts = TokenTexts(tokenizer, as_ids=options.tokens_as_ids)
        self._start = request.sampling.prompt_logprob_start
        self._with_sampled = bool(request.sampling.logprob_token_ids)
        self._opened: set[int] = set()
        self._called: set[int] = set()  # samples with tool calls
        self._was_free = request.tool_use is None or not request.tool_use.name
        self._n = request.sampling.n
        tools = request.tool_use.tools if request.tool_use is not None else ()
        names = frozenset(tool.name for tool in tools if tool.text_input is not None)
        self._text_calls = [TextInputCalls(names) for _ in range(request.num_samples)]

    def chunks(self, delta: SampleDelta, generation: Generation) -> list[dict[str, Any]]:
        """Converts a delta to chunks. The first delta of a sample is preceded by a chunk with the role; a delta that
        holds nothing to send gives no chunk of its own."""
        chunks = []
        if delta.sample not in self._opened:
            self._opened.add(delta.sample)
            chunks.append(self._opening(delta.sample, generation))
        message_delta = {"content": delta.text} if delta.parts is None else delta_of(self._read(delta))
        details = self._details(delta)
        if message_delta or delta.finish is not None or delta.logprobs or self._options.token_ids:
            choice = {"index": delta.sample, "delta": message_delta, **details}
            chunks.append(self._frame([choice], **self._usage(delta.sample, generation)))
        return chunks

    def _opening(self, sample: int, generation: Generation) -> dict[str, Any]:
        """Returns the first chunk of a sample: the role, with an echoed prefix as its content."""
        message = {"role": "assistant", "content": self._prefix(sample)}
        choice = {"index": sample, "delta": message, "logprobs": None, "finish_reason": None}
        return self._frame([choice], **self._usage(sample, generation, opening=True), **self._prompt(generation))

    def last_chunk(self, generation: Generation) -> dict[str, Any] | None:
        """Returns the chunk without choices that ends a stream, with usage and times; None if neither was requested."""
        usage = {"usage": usage_object(generation.usage)} if self._options.include_usage else {}
        fields = usage | metrics(self._options, generation)
        return self._frame([], **fields) if fields else None

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> dict[str, Any]:
        """Returns the unary answer from one complete delta per sample; prompt logprobs are those of the first
        sample."""
        choices = [self._choice(delta) for delta in deltas]
        more = {"prompt_logprobs": None, "prompt_token_ids": None, **self._prompt(generation)}
        if self._options.prompt_logprobs:
            more["prompt_logprobs"] = prompt_logprobs(deltas[0].prompt_logprobs, self._start, self._texts)
        return self._frame(choices, usage=usage_object(generation.usage), **more, **metrics(self._options, generation))

    def _choice(self, delta: SampleDelta) -> dict[str, Any]:
        return {"index": delta.sample, "message": self._message(delta), "token_ids": None, **self._details(delta)}

    def _prefix(self, sample: int) -> str:
        return self._options.prefix[sample // self._n] if self._options.prefix else ""

    def _message(self, delta: SampleDelta) -> dict[str, Any]:
        """Returns a choice's message; an echoed prefix of the sample is put before its content."""
        message = {"content": delta.text} if delta.parts is None else message_of(self._read(delta))
        if prefix := self._prefix(delta.sample):
            message["content"] = prefix + (message["content"] or "")
        return {"role": "assistant", "refusal": None, "annotations": [], **message}

    def _read(self, delta: SampleDelta) -> list[Part | TextInputDelta]:
        calls = self._text_calls[delta.sample]
        return calls.convert(delta.parts or (), ended=delta.finish is not None)

    def _details(self, delta: SampleDelta) -> dict[str, Any]:
        """Returns a choice's fields other than its message: logprobs (None if not requested), finish reason and
        token ids."""
        entries = delta.logprobs
        logprobs = chat_logprobs(entries, self._texts, with_sampled=self._with_sampled) if entries else None
        token_ids = {"token_ids": delta.token_ids} if self._options.token_ids else {}
        return {"logprobs": logprobs, **self._ending(delta), **token_ids}

    def _ending(self, delta: SampleDelta) -> dict[str, Any]:
        """Returns the finish fields; as in OpenAI's API, a call that the client forced by name ends with "stop"."""
        if delta.parts and has_calls(delta.parts):
            self._called.add(delta.sample)
        end = ending(delta.finish)
        if end["finish_reason"] == "stop" and delta.sample in self._called and self._was_free:
            end["finish_reason"] = TOOL_CALLS
        return end

    def _usage(self, sample: int, generation: Generation, *, opening: bool = False) -> dict[str, Any]:
        """Returns the field `usage` with a sample's tokens so far, {} unless continuous usage was requested.
        `opening` sets output tokens to 0, for the chunk before the first token."""
        if not self._options.continuous_usage:
            return {}
        usage = generation.sample_usage(sample)
        return {"usage": usage_object(usage._replace(completion_tokens=0, reasoning_tokens=0) if opening else usage)}

    def _prompt(self, generation: Generation, prompt: int = 0) -> dict[str, Any]:
        """Returns the fields prompt_token_ids and prompt_text of one prompt, each only if it was requested."""
        prepared_prompt = generation.prepared[prompt]
        ids = {"prompt_token_ids": prepared_prompt.token_ids} if self._options.token_ids else {}
        return ids | (
            {"prompt_text": self._texts.prompt(prepared_prompt.token_ids)} if self._options.prompt_text else {}
        )


class BatchFormat(ChatFormat):
    """Format for several conversations, each answered once: fields about a prompt are part of its choice."""

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> dict[str, Any]:
        choices = [self._choice(delta) | self._prompt(generation, delta.sample) for delta in deltas]
        times = metrics(self._options, generation)
        return self._frame(choices, usage=usage_object(generation.usage), **times)
