"""JSON bodies of the paths under /v2/models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from quire.services.frontend.http.fields.ranges import given, needs
from quire.services.frontend.kserve_edge import binary, tensors
from quire.services.frontend.kserve_edge.binary import BinaryTail
from quire.services.frontend.kserve_edge.inference_call import ReceivedInference
from quire.shared.errors import InvalidArgument

# Parameters of an output that would change its content or destination.
NOT_OFFERED = ("classification", "shared_memory_region")

NAMES: dict[str, Any] = {"enum": [*tensors.DATATYPES]}
DATATYPES: dict[str, Any] = {"enum": sorted({*tensors.DATATYPES.values()})}
# Each tensor but image has one element of its type, in `data` or after the JSON.
RULES: list[dict[str, Any]] = [
    needs("name", {"not": {"const": tensors.IMAGE}}, "shape", {"items": {"const": 1}}),
    *(needs("name", {"const": name}, "datatype", {"const": kind}) for name, kind in tensors.DATATYPES.items()),
    {"oneOf": [given("data"), {"required": ["parameters"], "properties": {"parameters": given(binary.SIZE)}}]},
]


class InputTensorBody(BaseModel):
    """One input tensor of an inference body, whose elements are in the JSON or in the bytes after it."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"allOf": [*RULES]})

    name: str = Field(json_schema_extra=NAMES)
    datatype: str = Field(json_schema_extra=DATATYPES)
    shape: list[int] = Field(description="[1], except for image")
    data: list[Any] | None = Field(None, description="elements, flat or as nested lists")
    parameters: dict[str, Any] | None = Field(
        None, description="binary_data_size: length of its bytes after the JSON, instead of data"
    )

    def element(self, tail: BinaryTail) -> Any:
        """Returns the tensor's single element, or the list of image's, from the JSON or from the bytes after it. Raises
        InvalidArgument for another shape or type, or if both or neither hold it."""
        tensors.check(self.name, self.datatype)
        size = (self.parameters or {}).get(binary.SIZE)
        if self.data is None and size is None:
            raise InvalidArgument(f"{self.name} has neither data nor a {binary.SIZE}", field="inputs")
        if size is None:
            return _check_type(self.name, tensors.element(self.name, self.shape, list(_flat(self.data or []))))
        if self.data is not None:
            raise InvalidArgument(f"{self.name} has both data and a {binary.SIZE}", field="inputs")
        return tensors.decode_raw(self.name, self.shape, tail.next_bytes(self.name, size))


class OutputBody(BaseModel):
    """One requested output tensor of an inference body, and whether it is sent as bytes."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, Any] | None = Field(
        None, description="binary_data: whether it is sent as bytes after the JSON"
    )


class InferBody(BaseModel):
    """Body of POST /v2/models/{name}/infer."""

    model_config = ConfigDict(extra="forbid")

    id: str = ""
    parameters: dict[str, Any] | None = Field(
        None, description="sampling parameters, if there is no tensor sampling_parameters"
    )
    inputs: list[InputTensorBody] = Field(
        json_schema_extra={"contains": {"required": ["name"], "properties": {"name": {"const": tensors.TEXT_INPUT}}}}
    )
    outputs: list[OutputBody] | None = Field(None, description="requested outputs; default: all")

    def infer(self, model: str, version: str, tail: BinaryTail) -> ReceivedInference:
        """Returns the inference with the element of each input. Raises InvalidArgument if a tensor occurs twice or
        bytes of the tail are left."""
        inputs: dict[str, Any] = {}
        for tensor in self.inputs:
            element = tensor.element(tail)
            if tensor.name in inputs:
                raise InvalidArgument(f"{tensor.name} occurs twice; send it once", field="inputs")
            inputs[tensor.name] = element
        tail.check_end()
        requested = [output.name for output in self.outputs or ()]
        return ReceivedInference(model, version, self.id, inputs, self.parameters or {}, requested)

    def binary_outputs(self) -> frozenset[str]:
        """Returns the outputs to send as bytes after the JSON: those that ask for it, or all if the body does. Raises
        InvalidArgument for an output with shared memory or classification."""
        everything = binary.flag(self.parameters, binary.ALL_REQUESTED, "parameters", otherwise=False)
        if not self.outputs:
            return frozenset(kind.name for kind in tensors.OUTPUTS if everything)
        for output in self.outputs:
            for name in NOT_OFFERED:
                if name in (output.parameters or {}):
                    raise InvalidArgument(f"{output.name}: {name} is not supported", field="outputs")
        return frozenset(
            output.name
            for output in self.outputs
            if binary.flag(output.parameters, binary.REQUESTED, "outputs", otherwise=everything)
        )


class TritonGenerateBody(BaseModel):
    """Body of POST /v2/models/{name}/generate, Triton's short form: tensors are fields, other fields are parameters."""

    model_config = ConfigDict(extra="allow")

    id: str = ""
    text_input: str
    parameters: dict[str, Any] | None = Field(None, description="sampling parameters")

    def infer(self, model: str, version: str, *, stream: bool) -> ReceivedInference:
        """Returns the inference: fields named like tensors are inputs, others parameters. `stream`: whether the path is
        the streaming one. Raises InvalidArgument if the field `stream` asks for the other path."""
        named = self.model_extra or {}
        if isinstance(image := named.get(tensors.IMAGE), str):
            named = {**named, tensors.IMAGE: [image]}
        inputs = {name: _check_type(name, value) for name, value in named.items() if name in tensors.DATATYPES}
        if bool(inputs.get(tensors.STREAM, stream)) != stream:
            raise InvalidArgument(
                f"stream={not stream} needs the other path: /generate, or /generate_stream for streams",
                field=tensors.STREAM,
            )
        inputs |= {tensors.TEXT_INPUT: self.text_input, tensors.STREAM: stream}
        rest = {name: value for name, value in named.items() if name not in tensors.DATATYPES}
        return ReceivedInference(model, version, self.id, inputs, rest | (self.parameters or {}), ())


def _flat(values: list[Any]) -> Iterator[Any]:
    """Yields the elements of nested lists in order, without recursion."""
    pending = [*values[::-1]]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value[::-1]
        else:
            yield value


def _check_type(name: str, value: Any) -> Any:
    """Returns the value if it has the JSON type of the tensor `name`, or is a list of them for image. Raises
    InvalidArgument."""
    if name == tensors.IMAGE and isinstance(value, list):
        wrong = next((type(one).__name__ for one in value if not isinstance(one, str)), "")
        if wrong:
            raise InvalidArgument(f"{name} holds base64 or URLs as texts, got {wrong}", field=name)
        return value
    kind = bool if tensors.DATATYPES[name] == tensors.BOOL else str
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} is {tensors.DATATYPES[name]}, got {type(value).__name__}", field=name)
    return value
