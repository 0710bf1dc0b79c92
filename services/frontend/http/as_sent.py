"""Errors in the words of the body that they are about: inside, a field has one name; each API has its own."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

from quire.shared.errors import QuireError

RESPONSES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "structured_output": "text.format",
}

OLLAMA = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty", "structured_output": "format"}

COHERE = {"prompt": "texts", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}

# Path -> inner name -> the API's.
NAMES: Mapping[str, Mapping[str, str]] = {
    "/v1/chat/completions": {"prompt": "messages"},
    "/v1/chat/completions/batch": {"prompt": "messages"},
    "/v1/embeddings": {"prompt": "input"},
    "/pooling": {"prompt": "input"},
    "/classify": {"prompt": "input"},
    **{path: {"prompt": "documents"} for path in ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")},
    "/v1/embed": COHERE,
    "/v2/embed": COHERE,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES,
    "/v1/messages": {"prompt": "messages", "stop": "stop_sequences", "structured_output": "output_config.format"},
    "/v1/messages/count_tokens": {"prompt": "messages"},
    "/api/chat": {**OLLAMA, "prompt": "messages"},
    "/api/generate": OLLAMA,
    "/api/embed": {"prompt": "input"},
    "/generate": {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"},
}


def as_sent(path: str, error: QuireError, form_field: str = "") -> QuireError:
    """The same error, its field and the first mention of it in its message named as clients of `path` name it.

    `form_field`: the one that asked for a form of the output, where there are several that can."""
    name = NAMES.get(path, {}).get(error.field)
    if error.field == "structured_output" and form_field:
        name = form_field
    if name is None:
        return error
    renamed = copy.copy(error)
    renamed.field = name
    renamed.message = re.sub(rf"\b{re.escape(error.field)}\b", name, error.message, count=1)
    return renamed
