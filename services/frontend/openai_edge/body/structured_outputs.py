"""Constraints on the output in OpenAI's form (response_format) and in vLLM's (structured_outputs)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.services.frontend.http.fields.ranges import exactly_one
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2 as pb

TAG = ("format", "structures", "triggers")  # fields of a structural tag
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class JsonSchemaFormat(BaseModel):
    """Schema of response_format; name, description and strict have no effect: every schema is enforced."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's response_format with vLLM's structural tags."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(
        default=None, alias="schema", description="json_schema.schema as clients of llama.cpp write it"
    )
    format: Any = Field(default=None, description="of a structural_tag")
    structures: Any = Field(default=None, description="of a structural_tag, in its legacy form")
    triggers: Any = Field(default=None, description="of a structural_tag, in its legacy form")

    @property
    def requested_schema(self) -> dict[str, Any] | bool | None:
        """Schema in either of its places."""
        nested = None if self.json_schema is None else self.json_schema.schema_
        return self.schema_ if nested is None else nested


class StructuredOutputsBody(BaseModel):
    """vLLM's structured_outputs with exactly one constraint; StructuredOutput of sampling.proto."""

    model_config = ConfigDict(extra="allow", populate_by_name=True, json_schema_extra=exactly_one(*CONSTRAINTS))

    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, json_schema_extra={"minItems": 1, "items": {"minLength": 1}})
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


@dataclass(frozen=True, slots=True)
class FormatFieldNames:
    """Names that an API gives to the format of an answer and its schema."""

    form: str = "response_format"
    schema: str = "json_schema.schema"


CHAT_FIELD_NAMES = FormatFieldNames()


def constraint(
    response_format: ResponseFormat | None,
    outputs: StructuredOutputsBody | None,
    names: FormatFieldNames = CHAT_FIELD_NAMES,
) -> Any:
    """Returns the constraint of response_format or structured_outputs, None without either. Raises InvalidArgument
    if both constrain the output; `names` are the fields' names in the dialect, for error texts."""
    requested = None if response_format is None else _from_response_format(response_format, names)
    if outputs is None:
        return requested
    if requested is not None:
        raise InvalidArgument(
            f"{names.form} and structured_outputs both constrain the output: send one of them.",
            field="structured_outputs",
        )
    return _from_structured_outputs(outputs)


def _from_response_format(response_format: ResponseFormat, names: FormatFieldNames) -> pb.StructuredOutput | None:
    """Converts a response format; None for plain text. Raises InvalidArgument for json_schema without a schema,
    under the dialect's field names in `names`."""
    schema = response_format.requested_schema
    match response_format.type:
        case "json_object" if schema in (None, {}):
            return pb.StructuredOutput(json_object=True)
        case "json_object" | "json_schema":
            if schema is None:
                raise InvalidArgument(f"{names.form} of type json_schema needs {names.schema}", field=names.form)
            return pb.StructuredOutput(json_schema=json.dumps(schema))
        case "structural_tag":
            given = {name: value for name in TAG if (value := getattr(response_format, name)) is not None}
            return pb.StructuredOutput(structural_tag=json.dumps({"type": response_format.type, **given}))
    return None


def _from_structured_outputs(outputs: StructuredOutputsBody) -> pb.StructuredOutput:
    """Converts vLLM's structured_outputs; raises InvalidArgument unless exactly one constraint is set."""
    given = [name for name in CONSTRAINTS if getattr(outputs, "json_" if name == "json" else name) is not None]
    if len(given) != 1:
        names = ", ".join(given) or "none"
        raise InvalidArgument(
            f"structured_outputs must have exactly one of {', '.join(CONSTRAINTS)}, got {names}.",
            field="structured_outputs",
        )
    wanted = pb.StructuredOutput(
        disable_any_whitespace=outputs.disable_any_whitespace,
        disable_additional_properties=outputs.disable_additional_properties,
        whitespace_pattern=outputs.whitespace_pattern or "",
    )
    match given[0]:
        case "json":
            wanted.json_schema = _text(outputs.json_)
        case "regex":
            wanted.regex = outputs.regex or ""
        case "choice":
            wanted.choice.options.extend(outputs.choice or ())
            wanted.choice.SetInParent()
        case "grammar":
            wanted.grammar = outputs.grammar or ""
        case "json_object":
            wanted.json_object = bool(outputs.json_object)
        case "structural_tag":
            wanted.structural_tag = _text(outputs.structural_tag)
    return wanted


def _text(document: Any) -> str:
    return document if isinstance(document, str) else json.dumps(document)
