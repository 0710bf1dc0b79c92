"""Body fields of the parameters in scalar_parameters.py, for all bodies that generate tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, create_model

from quire.services.frontend.http.fields.checked_body import CheckedBody
from quire.services.frontend.request.scalar_parameters import NAMES, SCALAR_PARAMETERS

OTHER_NAMES = ("repetition_penalty", "top_n_sigma")  # parameters that Ollama lacks, or has under another name

if TYPE_CHECKING:
    ScalarFields = CheckedBody
    OllamaScalarFields = CheckedBody
else:
    _FIELDS = {one.name: (int | None if one.is_integer else float | None, None) for one in SCALAR_PARAMETERS}
    ScalarFields = create_model("ScalarFields", __base__=CheckedBody, **_FIELDS)
    OllamaScalarFields = create_model(
        "OllamaScalarFields",
        __base__=CheckedBody,
        **{name: field for name, field in _FIELDS.items() if name not in OTHER_NAMES},
    )


def given(body: BaseModel) -> dict[str, Any]:
    """Returns the scalar parameters of the body by name; None for omitted ones."""
    return {name: getattr(body, name) for name in NAMES.intersection(type(body).model_fields)}
