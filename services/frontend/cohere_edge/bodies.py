"""Request body of /v2/embed and /v1/embed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.services.frontend.http.fields.checked_body import CheckedBody
from quire.services.frontend.http.fields.known_fields import body_schema_extra
from quire.services.frontend.http.fields.model_field import ModelField
from quire.services.frontend.http.fields.ranges import exactly_one
from quire.services.frontend.http.fields.unknown_fields import UnknownFields
from quire.shared.errors import InvalidArgument

TRUNCATE_CONFLICT = {
    "required": ["truncate", "max_tokens"],
    "properties": {"truncate": {"const": "NONE"}, "max_tokens": {"type": "integer"}},
}
RULES = (exactly_one("texts", "images", "inputs"), {"not": TRUNCATE_CONFLICT})

InputType = Literal["search_document", "search_query", "classification", "clustering"]
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class EmbedInput(BaseModel):
    """One input of texts and pictures together."""

    model_config = ConfigDict(extra="forbid")

    content: list[dict[str, Any]] = Field(
        min_length=1, description="parts: {type: text, text} or {type: image_url, image_url: {url}}"
    )


class CohereEmbedBody(CheckedBody):
    """Request body of POST /v2/embed and /v1/embed."""

    model_config = ConfigDict(extra="allow", json_schema_extra=body_schema_extra((), {}, RULES))

    model: ModelField = ""
    texts: list[str] | None = Field(None, min_length=1, json_schema_extra={"items": {"minLength": 1}})
    images: list[str] | None = Field(None, min_length=1, description="data URLs, each of which has a vector")
    inputs: list[EmbedInput] | None = Field(None, min_length=1, description="texts with pictures, a vector each")
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
        """Raises InvalidArgument unless there is one kind of input, and if max_tokens is set with truncate=NONE."""
        if sum(map(bool, (self.texts, self.images, self.inputs))) != 1:
            text = "exactly one of texts, images and inputs must hold at least one entry"
            raise InvalidArgument(text, field="texts")
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise InvalidArgument("max_tokens requires truncate START or END, got NONE", field="truncate")
