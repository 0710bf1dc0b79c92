"""Fields that clients of vLLM and OpenAI may send and that are known here, but not offered yet.

One table for both edges: the name as the client wrote it, and whether a value asks for the feature at all. A feature
that arrives deletes its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import Unimplemented

Asks = Callable[[Any], bool]


def _given(value: Any) -> bool:
    """Anything but nothing."""
    return value not in (None, False, 0, "", [], {})


def _present(value: Any) -> bool:
    """Anything, zero included."""
    return value is not None


def _not(*harmless: Any) -> Asks:
    return lambda value: value is not None and value not in harmless


ASKS: Mapping[str, Asks] = {
    # what OpenAI has replaced with tools: their answers have another shape
    "functions": _given,
    "function_call": _not("none", "auto"),
    # other prompts and outputs
    "prompt_embeds": _given,
    "suffix": _given,
    "modalities": _not(["text"]),
    "audio": _given,
    "web_search_options": _given,
    "moderation": _given,
    "media_io_kwargs": _given,
    "mm_processor_kwargs": _given,
    # ways to answer
    "return_weight_versions": _given,
    "watermarking": _given,
    # transfers between engines
    "kv_transfer_params": _given,
    "ec_transfer_params": _given,
    "vllm_xargs": _given,
}


def refuse_not_offered(fields: Mapping[str, Any]) -> None:
    """Raises Unimplemented for the first field that asks for something missing; unknown names are not its business."""
    for name, value in fields.items():
        asks = ASKS.get(name)
        if asks is not None and asks(value):
            raise Unimplemented(f"{name} is not offered by this server yet", field=name)
