"""Request body of /v2/embed and /v1/embed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field

from quire.services.frontend.http.fields.checked_body import CheckedBody
from quire.services.frontend.http.fields.known_fields import body_schema_extra
from quire.services.frontend.http.fields.model_field import ModelField
from quire.services.frontend.http.fields.ranges import given
from quire.services.frontend.http.fields.unknown_fields import UnknownFields
from quire.shared.errors import InvalidArgument

# Pictures, and texts combined with them; by name, the values that request nothing.
NOT_OFFERED: Mapping[str, Sequence[Any]] = dict.fromkeys(("images", "inputs"), (None, []))

TRUNCATE_CONFLICT = {
    "required": ["truncate", "max_tokens"],
    "properties": {"truncate": {"const": "NONE"}, "max_tokens": {"type": "integer"}},
}
RULES = (given("texts"), {"not": TRUNCATE_CONFLICT})

InputType = Literal["search_document", "search_query", "classification", "clustering"]
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class CohereEmbedBody(CheckedBody):
    """Request body of POST /v2/embed and /v1/embed."""

    model_config = ConfigDict(extra="allow", json_schema_extra=body_schema_extra((), NOT_OFFERED, RULES))

    unavailable = NOT_OFFERED
    remedy = "; send texts"

    model: ModelField = ""
    texts: list[str] | None = Field(None, min_length=1, json_schema_extra={"items": {"minLength": 1}})
    input_type: InputType | None = Field(
        None, description="selects the prompt of this name from the model's folder, if there is one"
    )
    embedding_types: list[EmbeddingType] | None = Field(None, description="one or several; default: float")
    output_dimension: int | None = Field(None, ge=1, description="number of leading elements to keep, normalised again")
    max_tokens: int | None = Field(None, ge=1, description="maximum per text; default: the model's context")
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="the end at which longer texts are truncated; NONE: they are refused. Default: END"
    )
    priority: int | None = None

    def check_rules(self, unknown: UnknownFields) -> None:
        """Raises InvalidArgument if there are no texts, or max_tokens is set with truncate=NONE."""
        if not self.texts:
            raise InvalidArgument("texts must hold at least one text", field="texts")
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise InvalidArgument("max_tokens requires truncate START or END, got NONE", field="truncate")
