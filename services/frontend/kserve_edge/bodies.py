"""JSON bodies under /v2/models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from quire.services.frontend.http.fields.ranges import given, needs
from quire.services.frontend.kserve_edge import binary, tensors
from quire.services.frontend.kserve_edge.binary import BinaryTail
from quire.services.frontend.kserve_edge.inference_call import ReceivedInference
from quire.shared.errors import InvalidArgument

# Of an output's parameters: what would make another answer of it, or put it elsewhere.
NOT_OFFERED = ("classification", "shared_memory_region")

NAMES: dict[str, Any] = {"enum": [*tensors.DATATYPES]}
DATATYPES: dict[str, Any] = {"enum": sorted({*tensors.DATATYPES.values()})}
# An element each, of the tensor's type, which stands here or behind the JSON.
RULES: list[dict[str, Any]] = [
    *(needs("name", {"const": name}, "datatype", {"const": kind}) for name, kind in tensors.DATATYPES.items()),
    {"oneOf": [given("data"), {"required": ["parameters"], "properties": {"parameters": given(binary.SIZE)}}]},
]


class InputTensorBody(BaseModel):
    """One tensor."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"allOf": [*RULES]})

    name: str = Field(json_schema_extra=NAMES)
    datatype: str = Field(json_schema_extra=DATATYPES)
    shape: list[int] = Field(json_schema_extra={"items": {"const": 1}})
    data: list[Any] | None = Field(None, description="its elements, also as lists in lists")
    parameters: dict[str, Any] | None = Field(
        None, description="binary_data_size: how many bytes behind the JSON it has instead of data"
    )

    def element(self, behind: BinaryTail) -> Any:
        """Its only one."""
        tensors.check(self.name, self.datatype)
        size = (self.parameters or {}).get(binary.SIZE)
        if self.data is None and size is None:
            raise InvalidArgument(f"{self.name} has neither data nor a {binary.SIZE}", field="inputs")
        if size is None:
            return _of_its_type(self.name, tensors.single_element(self.name, self.shape, list(_flat(self.data or []))))
        if self.data is not None:
            raise InvalidArgument(f"{self.name} has both data and a {binary.SIZE}", field="inputs")
        return tensors.decode_raw(self.name, self.shape, behind.take(self.name, size))


class OutputBody(BaseModel):
    """One tensor that is wanted."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, Any] | None = Field(None, description="binary_data: whether it comes behind the JSON")


class InferBody(BaseModel):
    """POST /v2/models/{name}/infer"""

    model_config = ConfigDict(extra="forbid")

    id: str = ""
    parameters: dict[str, Any] | None = Field(
        None, description="sampling parameters, where the tensor sampling_parameters is not there"
    )
    inputs: list[InputTensorBody] = Field(
        json_schema_extra={"contains": {"required": ["name"], "properties": {"name": {"const": tensors.TEXT_INPUT}}}}
    )
    outputs: list[OutputBody] | None = Field(None, description="those that are wanted; default: all that there are")

    def infer(self, model: str, version: str, behind: BinaryTail) -> ReceivedInference:
        inputs: dict[str, Any] = {}
        for tensor in self.inputs:
            element = tensor.element(behind)
            if tensor.name in inputs:
                raise InvalidArgument(f"{tensor.name} is there twice", field="inputs")
            inputs[tensor.name] = element
        behind.check_end()
        wanted = [output.name for output in self.outputs or ()]
        return ReceivedInference(model, version, self.id, inputs, self.parameters or {}, wanted)

    def binary_outputs(self) -> frozenset[str]:
        """Which come behind the JSON, of those that come. Raises InvalidArgument."""
        everything = binary.flag(self.parameters, binary.ALL_WANTED, "parameters", otherwise=False)
        if not self.outputs:
            return frozenset(kind.name for kind in tensors.OUTPUTS if everything)
        for output in self.outputs:
            for name in NOT_OFFERED:
                if name in (output.parameters or {}):
                    raise InvalidArgument(f"{output.name}: {name} is not offered", field="outputs")
        return frozenset(
            output.name
            for output in self.outputs
            if binary.flag(output.parameters, binary.WANTED, "outputs", otherwise=everything)
        )


class TritonGenerateBody(BaseModel):
    """POST /v2/models/{name}/generate, Triton's shorter way: tensors are fields, other fields are parameters."""

    model_config = ConfigDict(extra="allow")

    id: str = ""
    text_input: str
    parameters: dict[str, Any] | None = Field(None, description="sampling parameters")

    def infer(self, model: str, version: str, *, stream: bool) -> ReceivedInference:
        """`stream`: whether the path says so, which is answered in a stream."""
        named = self.model_extra or {}
        inputs = {name: _of_its_type(name, value) for name, value in named.items() if name in tensors.DATATYPES}
        if bool(inputs.get(tensors.STREAM, stream)) != stream:
            raise InvalidArgument(f"stream is {not stream}: that is another path", field=tensors.STREAM)
        inputs |= {tensors.TEXT_INPUT: self.text_input, tensors.STREAM: stream}
        rest = {name: value for name, value in named.items() if name not in tensors.DATATYPES}
        return ReceivedInference(model, version, self.id, inputs, rest | (self.parameters or {}), ())


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
