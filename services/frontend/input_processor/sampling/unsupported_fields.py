"""Fields that clients of vLLM and OpenAI may send and that are known here, but not offered yet.

One table for both edges: the name as the client wrote it, and the values that ask for nothing. A feature that arrives
deletes its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.input_processor.sampling.unsupported_samplers import (
    PENALTY_WINDOWS,
    REPLACEMENTS,
    UNSET_VALUES,
)
from quire.services.frontend.request.scalar_parameters import SCALAR_PARAMETERS
from quire.shared.errors import Unimplemented

NO_OP_VALUES: Mapping[str, Sequence[Any]] = {
    # what OpenAI has replaced with tools: their answers have another shape
    "functions": UNSET_VALUES,
    "function_call": (None, "none", "auto"),
    # other prompts and outputs
    "prompt_embeds": UNSET_VALUES,
    "suffix": UNSET_VALUES,
    "modalities": (None, ["text"]),
    "audio": UNSET_VALUES,
    "web_search_options": UNSET_VALUES,
    "moderation": UNSET_VALUES,
    "media_io_kwargs": UNSET_VALUES,
    "mm_processor_kwargs": UNSET_VALUES,
    # ways to answer
    "return_weight_versions": UNSET_VALUES,
    "watermarking": UNSET_VALUES,
    # transfers between engines
    "kv_transfer_params": UNSET_VALUES,
    "ec_transfer_params": UNSET_VALUES,
    "vllm_xargs": UNSET_VALUES,
}


def reject_unsupported(
    fields: Mapping[str, Any], harmless: Mapping[str, Sequence[Any]] = NO_OP_VALUES, place: str = ""
) -> None:
    """Raises Unimplemented for the first field that asks for something missing; unknown names are not its business.
    `harmless`: by name the values that ask for nothing; `place`: prefix of the names, as in `options.`."""
    for name, value in fields.items():
        if name in harmless and value not in harmless[name]:
            raise Unimplemented(f"{place}{name} is not offered by this server yet{_remedy(name)}", field=place + name)


PENALTIES: Mapping[str, Sequence[Any]] = {  # by name, the values that change nothing
    **{one.name: (None, one.default) for one in SCALAR_PARAMETERS if one.is_penalty},
    "repeat_penalty": (None, 1),
}


def without_inactive_windows(fields: Mapping[str, Any], body: object) -> Mapping[str, Any]:
    """Returns the fields without the windows of penalties where `body` asks for no penalty."""
    if any(getattr(body, name, None) not in harmless for name, harmless in PENALTIES.items()):
        return fields
    return {name: value for name, value in fields.items() if name not in PENALTY_WINDOWS}


def _remedy(name: str) -> str:
    return f"; send {REPLACEMENTS[name]} instead" if name in REPLACEMENTS else "; leave it out"
