"""Routes of POST /tokenize, POST /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.openai_edge.body.bodies import DetokenizeBody, TokenizeBody
from quire.services.frontend.openai_edge.body.prompts import chat_prompt
from quire.services.frontend.request.request import Prompt, TextPrompt
from quire.shared.errors import InvalidArgument


class TokenRoutes:
    """Routes that convert text and messages to token ids, as generation does, and back."""

    def __init__(self, context: ServingContext) -> None:
        self._processor = context.processor
        self._tokenizer = context.tokenizer
        self._catalogue = context.catalogue
        self._unknown = context.bounds.unknown_fields
        self.router = Router(tags=["tokens"], route_class=context.bounds.route(at_once=False))
        self.router.add_api_route("/tokenize", self.tokenize, methods=["POST"], response_model=dict[str, Any])
        # The maximum number of ids per body is one unit of work of a thread: one such body at a time.
        self.router.add_api_route(
            "/detokenize",
            self.detokenize,
            methods=["POST"],
            route_class_override=context.bounds.route(),
            response_model=dict[str, Any],
        )
        self.router.add_api_route("/tokenizer_info", self.info, methods=["GET"])

    async def tokenize(self, body: TokenizeBody) -> Response:
        """POST /tokenize: the ids of a prompt or a rendered conversation, with their texts if return_token_strs is
        set."""
        body.refuse_unknown(self._unknown)
        entry = self._catalogue.entry(body.model)
        token_ids = await self._processor.tokenize(_prompt(body), entry.max_model_len)
        names = [self._tokenizer.token_name(i) for i in token_ids] if body.return_token_strs else None
        answer = {
            "count": len(token_ids),
            "max_model_len": entry.max_model_len,
            "tokens": token_ids,
            "token_strs": names,
        }
        return Response(orjson.dumps(answer), media_type="application/json")  # FastAPI would inspect every id

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """POST /detokenize: the text of token ids, including special tokens."""
        body.refuse_unknown(self._unknown)
        self._catalogue.check(body.model)
        text = await self._processor.detokenize_long(body.tokens, skip_special_tokens=False)
        return Response(orjson.dumps({"prompt": text}), media_type="application/json")

    async def info(self) -> dict[str, Any]:
        """Returns the content of tokenizer_config.json with the chat template in use."""
        return self._tokenizer.info


def _prompt(body: TokenizeBody) -> Prompt:
    """Returns the prompt of a body, messages before text; raises InvalidArgument if it has neither."""
    if body.messages is not None:
        return chat_prompt(body, body.messages, {}, body.tools or ())
    if body.prompt is None:
        raise InvalidArgument("either prompt or messages must be given", field="prompt")
    return TextPrompt(body.prompt, add_special_tokens=body.add_special_tokens is not False)
