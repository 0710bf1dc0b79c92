"""Body fields of the parameters in scalar_parameters.py, shared by all bodies that generate tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, create_model

from quire.services.frontend.http.fields.checked_body import CheckedBody
from quire.services.frontend.request.scalar_parameters import NAMES, SCALAR_PARAMETERS

if TYPE_CHECKING:
    ScalarFields = CheckedBody
else:
    _FIELDS = {one.name: (int | None if one.is_integer else float | None, None) for one in SCALAR_PARAMETERS}
    ScalarFields = create_model("ScalarFields", __base__=CheckedBody, **_FIELDS)


def given(body: BaseModel) -> dict[str, Any]:
    """Returns the scalar parameters of the body by name; None for omitted ones."""
    return {name: getattr(body, name) for name in NAMES.intersection(type(body).model_fields)}
