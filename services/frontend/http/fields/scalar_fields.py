"""The fields of bodies that scalar_parameters.py lists: every body that asks for tokens has them."""

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
    """Returns those that the body has, by name; None where it leaves one out."""
    return {name: getattr(body, name) for name in NAMES.intersection(type(body).model_fields)}
