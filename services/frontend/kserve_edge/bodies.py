"""JSON bodies under /v2/models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.frontend.kserve_edge import tensors
from services.frontend.kserve_edge.asked import Infer
from shared.errors import InvalidArgument


class InputBody(BaseModel):
    """One tensor."""

    model_config = ConfigDict(extra="forbid")

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] = Field(description="its elements, also as lists in lists")
    parameters: dict[str, Any] | None = Field(None, description="read over")


class OutputBody(BaseModel):
    """One tensor that is wanted."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, Any] | None = Field(None, description="read over")


class InferBody(BaseModel):
    """POST /v2/models/{name}/infer"""

    model_config = ConfigDict(extra="forbid")

    id: str = ""
    parameters: dict[str, Any] | None = Field(
        None, description="sampling parameters, where the tensor sampling_parameters is not there"
    )
    inputs: list[InputBody]
    outputs: list[OutputBody] | None = Field(None, description="those that are wanted; default: all that there are")

    def infer(self, model: str, version: str) -> Infer:
        inputs: dict[str, Any] = {}
        for tensor in self.inputs:
            tensors.check(tensor.name, tensor.datatype)
            element = tensors.only(tensor.name, tensor.shape, list(_flat(tensor.data)))
            inputs[tensor.name] = _of_its_type(tensor.name, element)
        wanted = [output.name for output in self.outputs or ()]
        return Infer(model, version, self.id, inputs, self.parameters or {}, wanted)


class GenerateBody(BaseModel):
    """POST /v2/models/{name}/generate, Triton's shorter way: tensors are fields, other fields are parameters."""

    model_config = ConfigDict(extra="allow")

    id: str = ""
    text_input: str
    parameters: dict[str, Any] | None = Field(None, description="sampling parameters")

    def infer(self, model: str, version: str, *, stream: bool) -> Infer:
        """`stream`: whether the path says so, which is answered in a stream."""
        named = self.model_extra or {}
        inputs = {name: _of_its_type(name, value) for name, value in named.items() if name in tensors.DATATYPES}
        if bool(inputs.get(tensors.STREAM, stream)) != stream:
            raise InvalidArgument(f"stream is {not stream}: that is another path", field=tensors.STREAM)
        inputs |= {tensors.TEXT_INPUT: self.text_input, tensors.STREAM: stream}
        rest = {name: value for name, value in named.items() if name not in tensors.DATATYPES}
        return Infer(model, version, self.id, inputs, rest | (self.parameters or {}), ())


def _flat(values: list[Any]) -> Iterator[Any]:
    pending = [*values[::-1]]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value[::-1]
        else:
            yield value


def _of_its_type(name: str, value: Any) -> Any:
    kind = bool if tensors.DATATYPES[name] == tensors.BOOL else str
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} is {tensors.DATATYPES[name]}, got {type(value).__name__}", field=name)
    return value
