"""POST /v1/completions, POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.frontend.catalogue import Catalogue
from services.frontend.generator import Generator
from services.frontend.http import headers
from services.frontend.http.answer import Answer
from services.frontend.http.body import BodyBounds
from services.frontend.input_processor.processor import InputProcessor
from services.frontend.openai_edge.bodies import ChatBody, CompletionBody
from services.frontend.openai_edge.chat_format import ChatFormat
from services.frontend.openai_edge.chunks import Chunks
from services.frontend.openai_edge.completion_format import CompletionFormat
from services.frontend.openai_edge.prompt_only import prompt_only
from services.frontend.openai_edge.requests import answer_options, chat_request, completion_request
from services.frontend.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from services.frontend.tokenizer.tokenizer import Tokenizer


class GenerationRoutes:
    """Bodies to requests, requests to answers."""

    def __init__(
        self,
        generator: Generator,
        processor: InputProcessor,
        tokenizer: Tokenizer,
        catalogue: Catalogue,
        bounds: BodyBounds,
    ) -> None:
        self._generator = generator
        self._processor = processor
        self._tokenizer = tokenizer
        self._catalogue = catalogue
        self.router = APIRouter(tags=["generation"], route_class=bounds.route())
        self.router.add_api_route("/v1/completions", self.complete, methods=["POST"], response_class=Response)
        self.router.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_class=Response)

    async def complete(self, body: CompletionBody, http: Request) -> Response:
        """Continues one prompt or several."""
        body.refuse_unknown()
        request = completion_request(body, headers.read(http), self._tokenizer.defaults)
        skip = request.sampling.skip_special_tokens
        options = answer_options(body, [self._text(p, skip) for p in request.prompts] if body.echo else [])
        if body.echo and body.max_tokens == 0:
            request = replace(request, sampling=replace(request.sampling, max_tokens=1))
            options = replace(options, no_output=True)
            if not request.asks_prompt_logprobs:
                self._processor.check(request)
                return await prompt_only(request, options, self._processor, self._catalogue.entry(body.model))
        answer_format = CompletionFormat(request, options, self._tokenizer, self._catalogue.name)
        chunks = Chunks(answer_format, include_usage=options.include_usage)
        return Answer(self._generator, request, chunks, stream=options.stream)

    def _text(self, prompt: Prompt, skip_special_tokens: bool) -> str:
        match prompt:
            case TextPrompt(text):
                return text
            case TokenPrompt(token_ids):
                return self._processor.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
            case ChatPrompt():
                raise AssertionError("completions have no conversations")

    async def chat(self, body: ChatBody, http: Request) -> Response:
        """Answers a conversation."""
        body.refuse_unknown()
        request = chat_request(body, headers.read(http), self._tokenizer.defaults)
        options = answer_options(body, _last_answer(request.prompts) if body.echo else [])
        answer_format = ChatFormat(request, options, self._tokenizer, self._catalogue.name)
        chunks = Chunks(answer_format, include_usage=options.include_usage)
        return Answer(self._generator, request, chunks, stream=options.stream)


def _last_answer(prompts: Sequence[Prompt]) -> list[str]:
    """What the assistant said last, if its turn goes on: echo repeats it."""
    messages = [message for prompt in prompts if isinstance(prompt, ChatPrompt) for message in prompt.messages]
    if not messages or messages[-1]["role"] != "assistant":
        return []
    return [str(messages[-1]["content"] or "")]
