"""Routes of Ollama's API: answers, vectors, and the list of models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import Request
from starlette.responses import Response

from quire.services.frontend.generation.catalogue import CatalogueEntry
from quire.services.frontend.http import headers, text_errors
from quire.services.frontend.http.dialect_route import dialect_route
from quire.services.frontend.http.responses import GenerationResponse
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.ollama_edge.bodies import (
    AnswerBody,
    EmbedBody,
    EmbeddingsBody,
    OllamaChatBody,
    OllamaGenerateBody,
    ShowBody,
)
from quire.services.frontend.ollama_edge.embed_format import EmbedFormat
from quire.services.frontend.ollama_edge.format import LINES, LineFormat, OllamaChatFormat, OllamaGenerateFormat
from quire.services.frontend.ollama_edge.requests import chat_request, check_options, embed_request, generate_request
from quire.services.frontend.openai_edge.answers.logprobs import TokenTexts
from quire.services.frontend.request.request import Request as Asked
from quire.shared.errors import InvalidArgument
from quire.shared.version import VERSION

PREFIX = "/api/"


class OllamaRoutes:
    """Routes of Ollama's API: converts bodies to requests, and requests to responses."""

    def __init__(self, context: ServingContext) -> None:
        self._generator = context.generator
        self._processor = context.processor
        self._tokenizer = context.tokenizer
        self._catalogue = context.catalogue
        self._facts = context.facts
        self._unknown = context.bounds.unknown_fields
        # `curl -d`, as in Ollama's documentation, sends a form's content type.
        route = dialect_route(context.bounds, text_errors.ERRORS, any_type=True)
        self.router = Router(tags=["ollama"], route_class=route, prefix=PREFIX.rstrip("/"))
        self.router.add_api_route("/chat", self.chat, methods=["POST"], response_class=Response)
        self.router.add_api_route("/generate", self.generate, methods=["POST"], response_class=Response)
        self.router.add_api_route("/embed", self.embed, methods=["POST"], response_class=Response)
        self.router.add_api_route("/embeddings", self.embed_one, methods=["POST"], response_class=Response)
        self.router.add_api_route("/show", self.show, methods=["POST"])
        self.router.add_api_route("/tags", self.tags, methods=["GET"])
        self.router.add_api_route("/ps", self.loaded, methods=["GET"])
        self.router.add_api_route("/version", self.version, methods=["GET"])

    async def chat(self, body: OllamaChatBody, http: Request) -> Response:
        """Answers the last message of a conversation; without messages, confirms that the model is loaded."""
        body.refuse_unknown(self._unknown)
        model = self._catalogue.entry(body.model_name).name
        if not body.messages:
            _refuse_other_call(body, "prompt", "messages", "/api/generate")
            check_options(body.given_options, self._tokenizer.defaults)
            return _load_response(OllamaChatFormat(model, self._texts))
        request = chat_request(body, headers.read(http), self._tokenizer.defaults)
        return self._answer(request, OllamaChatFormat(model, self._texts), stream=body.stream)

    async def generate(self, body: OllamaGenerateBody, http: Request) -> Response:
        """Answers a prompt, rendered as a conversation unless raw; without a prompt, confirms that the model is
        loaded."""
        body.refuse_unknown(self._unknown)
        model = self._catalogue.entry(body.model_name).name
        if not body.prompt:
            _refuse_other_call(body, "messages", "prompt", "/api/chat")
            check_options(body.given_options, self._tokenizer.defaults)
            return _load_response(OllamaGenerateFormat(model, self._texts))
        request = generate_request(body, headers.read(http), self._tokenizer.defaults)
        return self._answer(request, OllamaGenerateFormat(model, self._texts), stream=body.stream)

    async def embed(self, body: EmbedBody, http: Request) -> Response:
        """Returns a vector for each input; options are validated but have no effect."""
        body.refuse_unknown(self._unknown)
        check_options(body.given_options, self._tokenizer.defaults)
        texts = [body.input] if isinstance(body.input, str) else body.input
        request = embed_request(body, texts, headers.read(http), truncate=body.truncate, dimensions=body.dimensions)
        return self._vectors(request)

    async def embed_one(self, body: EmbeddingsBody, http: Request) -> Response:
        """Returns the vector of a prompt, truncated if it is too long."""
        body.refuse_unknown(self._unknown)
        check_options(body.given_options, self._tokenizer.defaults)
        request = embed_request(body, [body.prompt], headers.read(http), truncate=True, dimensions=None)
        return self._vectors(request, only_one=True)

    def _vectors(self, request: Asked, *, only_one: bool = False) -> Response:
        answer_format = EmbedFormat(self._catalogue.served_name(request.model), only_one=only_one)
        return GenerationResponse(self._generator, request, answer_format, stream=False)

    def _answer(self, request: Asked, answer_format: LineFormat, *, stream: bool) -> Response:
        """Returns the response that runs the request and sends lines of JSON, or one object."""
        return GenerationResponse(
            self._generator,
            request,
            answer_format,
            stream=stream,
            stream_type=LINES,
            keep_alive=answer_format.keep_alive,
        )

    @property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self._tokenizer, as_ids=False)

    async def tags(self) -> dict[str, Any]:
        """Lists the served model, its aliases and its adapters."""
        return {"models": [self._listed(entry) for entry in self._catalogue.entries()]}

    async def loaded(self) -> dict[str, Any]:
        """Lists the models that a worker serves."""
        ready = [entry for entry in self._catalogue.entries() if entry.ready]
        return {"models": [{**self._listed(entry), "context_length": entry.max_model_len} for entry in ready]}

    def _listed(self, entry: CatalogueEntry) -> dict[str, Any]:
        """Returns the entry of a model in a list, with the fields that Ollama's clients read."""
        return {
            "name": entry.name,
            "model": entry.name,
            "modified_at": _time(entry),
            "size": 0,  # size of the files, unknown to a frontend
            "digest": self._facts.digest,
            "details": self._details(entry),
        }

    def _details(self, entry: CatalogueEntry) -> dict[str, Any]:
        """Returns a model's details; size and quantization are unknown to a frontend and empty."""
        family = self._facts.family
        return {
            "parent_model": entry.adapter_of,
            "format": "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        }

    async def show(self, body: ShowBody) -> dict[str, Any]:
        """Returns the details of a model: chat template, architecture, context length, capabilities. Raises
        NotFound."""
        body.refuse_unknown(self._unknown)
        check_options(body.given_options, self._tokenizer.defaults)
        entry, family = self._catalogue.entry(body.model_name), self._facts.family
        return {
            "modelfile": "",
            "parameters": "",
            "template": str(self._tokenizer.template.default or ""),
            "modified_at": _time(entry),
            "details": self._details(entry),
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": entry.max_model_len,
                f"{family}.vocab_size": entry.vocab_size,
            },
            "capabilities": self._capabilities(entry),
        }

    def _capabilities(self, entry: CatalogueEntry) -> list[str]:
        """Returns what the model can do, in Ollama's words; tools and thinking depend on its chat template and
        tokens."""
        if self._processor.classes:
            return ["classify"]
        capabilities = ["completion", "embedding"]
        if "image" in entry.input_modalities:
            capabilities.append("vision")
        if "audio" in entry.input_modalities:
            capabilities.append("audio")
        if self._tokenizer.template.supports_tools:
            capabilities.append("tools")
        return [*capabilities, "thinking"] if self._tokenizer.thinking_token_ids is not None else capabilities

    async def version(self) -> dict[str, str]:
        return {"version": VERSION}


def _time(entry: CatalogueEntry) -> str:
    return datetime.fromtimestamp(entry.created_unix_s, UTC).isoformat().replace("+00:00", "Z")


def _load_response(answer_format: LineFormat) -> Response:
    """Returns the answer to a call without a prompt, which asks to load the model; it is always loaded."""
    return Response(
        orjson.dumps({**answer_format.empty_answer(), "done_reason": "load"}), media_type="application/json"
    )


def _refuse_other_call(body: AnswerBody, given: str, missing: str, path: str) -> None:
    """Raises InvalidArgument for a call that lacks its own input but has that of `path`; it would be answered like a
    call that loads the model."""
    if (body.model_extra or {}).get(given):
        raise InvalidArgument(f"{missing} must not be empty; {given} is a field of {path}", field=missing)
