"""Fields of vLLM's and OpenAI's APIs that are known but not supported yet.

One table for both edges: the field's name and the values that request nothing. A new feature removes its rows.
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
    # deprecated by OpenAI in favour of tools: their answers have another shape
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
    # answer options
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
    """Raises Unimplemented for the first field that requests an unsupported feature; ignores unknown names.

    `harmless`: by name, the values that request nothing; `place`: prefix of the names, as in `options.`.
    """
    for name, value in fields.items():
        if name in harmless and value not in harmless[name]:
            raise Unimplemented(f"{place}{name} is not supported by this server yet{_remedy(name)}", field=place + name)


PENALTIES: Mapping[str, Sequence[Any]] = {  # by name, the values that change nothing
    **{one.name: (None, one.default) for one in SCALAR_PARAMETERS if one.is_penalty},
    "repeat_penalty": (None, 1),
}


def without_inactive_windows(fields: Mapping[str, Any], body: object) -> Mapping[str, Any]:
    """Returns the fields without the windows of penalties if `body` requests no penalty."""
    if any(getattr(body, name, None) not in harmless for name, harmless in PENALTIES.items()):
        return fields
    return {name: value for name, value in fields.items() if name not in PENALTY_WINDOWS}


def _remedy(name: str) -> str:
    return f"; send {REPLACEMENTS[name]} instead" if name in REPLACEMENTS else "; leave it out"
