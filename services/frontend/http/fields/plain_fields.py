"""The fields of bodies that plain_parameters.py lists: every body that asks for tokens has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, create_model

from quire.services.frontend.http.fields.checked_body import CheckedBody
from quire.services.frontend.input_processor.sampling.plain_parameters import NAMES, PLAIN_PARAMETERS

if TYPE_CHECKING:
    PlainFields = CheckedBody
else:
    PlainFields = create_model(
        "PlainFields", __base__=CheckedBody, **{one.name: (float | None, None) for one in PLAIN_PARAMETERS}
    )


def given(body: BaseModel) -> dict[str, Any]:
    """By name; None where the body says nothing."""
    return {name: getattr(body, name) for name in NAMES}
