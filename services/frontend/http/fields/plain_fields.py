"""The fields of bodies that plain_parameters.py lists: every body that asks for tokens has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, create_model

from quire.services.frontend.http.fields.checked_body import CheckedBody
from quire.services.frontend.request.plain_parameters import NAMES, PLAIN_PARAMETERS

if TYPE_CHECKING:
    PlainFields = CheckedBody
else:
    _FIELDS = {one.name: (int | None if one.is_integer else float | None, None) for one in PLAIN_PARAMETERS}
    PlainFields = create_model("PlainFields", __base__=CheckedBody, **_FIELDS)


def given(body: BaseModel) -> dict[str, Any]:
    """Returns those that the body has, by name; None where it leaves one out."""
    return {name: getattr(body, name) for name in NAMES.intersection(type(body).model_fields)}
