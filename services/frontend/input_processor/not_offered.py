"""Fields that clients of vLLM and OpenAI may send and that are known here, but not offered yet.

One table for both edges: the name as the client wrote it, and the values that ask for nothing. A feature that arrives
deletes its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import Unimplemented

NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})

HARMLESS: Mapping[str, Sequence[Any]] = {
    # what OpenAI has replaced with tools: their answers have another shape
    "functions": NOTHING,
    "function_call": (None, "none", "auto"),
    # other prompts and outputs
    "prompt_embeds": NOTHING,
    "suffix": NOTHING,
    "modalities": (None, ["text"]),
    "audio": NOTHING,
    "web_search_options": NOTHING,
    "moderation": NOTHING,
    "media_io_kwargs": NOTHING,
    "mm_processor_kwargs": NOTHING,
    # ways to answer
    "return_weight_versions": NOTHING,
    "watermarking": NOTHING,
    # transfers between engines
    "kv_transfer_params": NOTHING,
    "ec_transfer_params": NOTHING,
    "vllm_xargs": NOTHING,
}


def refuse_not_offered(fields: Mapping[str, Any]) -> None:
    """Raises Unimplemented for the first field that asks for something missing; unknown names are not its business."""
    for name, value in fields.items():
        if name in HARMLESS and value not in HARMLESS[name]:
            raise Unimplemented(f"{name} is not offered by this server yet", field=name)
