"""Routes of POST /v1/completions, POST /v1/chat/completions and its /batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import Request
from starlette.responses import Response

from quire.services.frontend.http import headers
from quire.services.frontend.http.responses import GenerationResponse
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.openai_edge.answers.chat_format import BatchFormat, ChatFormat
from quire.services.frontend.openai_edge.answers.chunks import ChunkEventFormat
from quire.services.frontend.openai_edge.answers.completion_format import CompletionFormat
from quire.services.frontend.openai_edge.answers.prompt_only import prompt_only
from quire.services.frontend.openai_edge.body.bodies import ChatBatchBody, ChatBody, CompletionBody
from quire.services.frontend.openai_edge.body.requests import (
    AnswerOptions,
    answer_options,
    batch_request,
    chat_request,
    completion_request,
)
from quire.services.frontend.openai_edge.resumable import FormattedRequest, ResumableHttp
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.request import ChatPrompt, PairPrompt, Prompt, TextPrompt, TokenPrompt
from quire.services.frontend.request.request import Request as GeneratorRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class GenerationRoutes:
    """Routes that turn bodies into requests, and requests into answers."""

    def __init__(self, context: ServingContext, resumable: ResumableHttp) -> None:
        self._generator = context.generator
        self._processor = context.processor
        self._tokenizer = context.tokenizer
        self._catalogue = context.catalogue
        self._resumable = resumable
        self._unknown = context.bounds.unknown_fields
        resumable.register(COMPLETIONS, self._rebuild_completion)
        resumable.register(CHAT, self._rebuild_chat)
        self.router = Router(tags=["generation"], route_class=context.bounds.route())
        self.router.add_api_route(COMPLETIONS, self.complete, methods=["POST"], response_class=Response)
        self.router.add_api_route(CHAT, self.chat, methods=["POST"], response_class=Response)
        self.router.add_api_route(f"{CHAT}/batch", self.batch, methods=["POST"], response_class=Response)

    async def complete(self, body: CompletionBody, http: Request) -> Response:
        """Generates text for one prompt or several. An echo with max_tokens=0 is answered without a scheduler unless
        it needs logprobs; `resumable` starts a stream that outlives this call."""
        body.refuse_unknown(self._unknown)
        sent = headers.read(http)
        request, options = self._completion(body, sent)
        if options.no_output and not request.asks_prompt_logprobs:
            self._processor.check(request)
            return await prompt_only(request, options, self._processor, self._catalogue.entry(body.model))
        if body.resumable:
            return self._resumable.answer(COMPLETIONS, body, sent, self._rebuild_completion, body.retention_s)
        answer_format = CompletionFormat(request, options, self._tokenizer, self._catalogue.served_name(request.model))
        return GenerationResponse(self._generator, request, ChunkEventFormat(answer_format), stream=options.stream)

    def _rebuild_completion(self, body: bytes, sent: CallHeaders, created_unix_s: int) -> FormattedRequest:
        """Rebuilds request and format from the stored body of a resumable stream, with its original creation time in
        Unix seconds."""
        request, options = self._completion(CompletionBody.model_validate_json(body), sent)
        options = replace(options, created_unix_s=created_unix_s)
        answer_format = CompletionFormat(request, options, self._tokenizer, self._catalogue.served_name(request.model))
        return FormattedRequest(request, ChunkEventFormat(answer_format))

    def _completion(self, body: CompletionBody, sent: CallHeaders) -> tuple[GeneratorRequest, AnswerOptions]:
        """Converts a body to its request and answer options. Echo with max_tokens=0 generates one token, which the
        answer hides."""
        request = completion_request(body, sent, self._tokenizer.defaults)
        skip = request.sampling.skip_special_tokens
        options = answer_options(body, [self._text(p, skip) for p in request.prompts] if body.echo else [])
        if body.echo and body.max_tokens == 0:
            request = replace(request, sampling=replace(request.sampling, max_tokens=1))
            options = replace(options, no_output=True)
        return request, options

    def _text(self, prompt: Prompt, skip_special_tokens: bool) -> str:
        """Returns a prompt's text for echo; token ids are detokenized."""
        match prompt:
            case TextPrompt(text):
                return text
            case TokenPrompt(token_ids):
                return self._processor.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
            case ChatPrompt() | PairPrompt():
                raise AssertionError("completions have no conversations")

    async def chat(self, body: ChatBody, http: Request) -> Response:
        """Answers a conversation with n samples, as JSON or a stream; `resumable` starts a stream that outlives this
        call."""
        body.refuse_unknown(self._unknown)
        sent = headers.read(http)
        if body.resumable:
            return self._resumable.answer(CHAT, body, sent, self._rebuild_chat, body.retention_s)
        request, answer_format = self._chat(body, sent)
        return GenerationResponse(self._generator, request, ChunkEventFormat(answer_format), stream=bool(body.stream))

    def _rebuild_chat(self, body: bytes, sent: CallHeaders, created_unix_s: int) -> FormattedRequest:
        """Rebuilds request and format from the stored body of a resumable stream, with its original creation time in
        Unix seconds."""
        request, answer_format = self._chat(ChatBody.model_validate_json(body), sent, created_unix_s)
        return FormattedRequest(request, ChunkEventFormat(answer_format))

    def _chat(
        self, body: ChatBody, sent: CallHeaders, created_unix_s: int | None = None
    ) -> tuple[GeneratorRequest, ChatFormat]:
        """Converts a body to its request and format; `created_unix_s` is set if a resumable stream is rebuilt."""
        request = chat_request(body, sent, self._tokenizer)
        options = answer_options(body, _last_answers(request.prompts) if body.echo else [])
        options = replace(options, created_unix_s=created_unix_s)
        return request, ChatFormat(request, options, self._tokenizer, self._catalogue.served_name(request.model))

    async def batch(self, body: ChatBatchBody, http: Request) -> Response:
        """Answers several conversations with the same options, each once, in one unary answer."""
        body.refuse_unknown(self._unknown)
        request = batch_request(body, headers.read(http), self._tokenizer)
        options = answer_options(body, _last_answers(request.prompts) if body.echo else [])
        answer_format = BatchFormat(request, options, self._tokenizer, self._catalogue.served_name(request.model))
        return GenerationResponse(self._generator, request, ChunkEventFormat(answer_format), stream=False)


def _last_answers(prompts: Sequence[Prompt]) -> list[str]:
    """Returns the assistant's last text of each conversation that continues it, which echo repeats."""
    return [_last_answer(prompt) for prompt in prompts if isinstance(prompt, ChatPrompt)]


def _last_answer(prompt: ChatPrompt) -> str:
    """Returns the content of the last message if it is the assistant's, otherwise ""."""
    if not prompt.messages or prompt.messages[-1]["role"] != "assistant":
        return ""
    return str(prompt.messages[-1]["content"] or "")
