"""The tensors of the protocol, and the encoding of their values."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from quire.shared.errors import InvalidArgument
from quire.shared.pb.dialects import open_inference_pb2 as pb

BYTES, BOOL, FP32, UINT32 = "BYTES", "BOOL", "FP32", "UINT32"
ANY = -1
LENGTH = struct.Struct("<I")  # length prefix of each element of raw BYTES
PLATFORM = "quire"
VERSION_OF_MODELS = "1"  # each model has a single version

TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
IMAGE = "image"  # pictures for the placeholders of the text, in base64 or as URLs; the only input of several elements
STREAM, SAMPLING, WITHOUT_PROMPT = "stream", "sampling_parameters", "exclude_input_in_output"
# Returned if the boolean input `return_` + name is set.
FINISH_REASON, CUMULATIVE_LOGPROB, LOGPROBS = "finish_reason", "cumulative_logprob", "logprobs"
NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS = "num_input_tokens", "num_output_tokens"
RETURN = "return_"


Value = TypeVar("Value")


class TensorKind(NamedTuple):
    """Name, datatype and size of a tensor, as ModelMetadata describes it."""

    name: str
    datatype: str
    size: int  # of its only dimension; -1: one element per sample


OUTPUTS = (
    TensorKind(TEXT_OUTPUT, BYTES, ANY),
    TensorKind(FINISH_REASON, BYTES, ANY),
    TensorKind(CUMULATIVE_LOGPROB, FP32, ANY),
    TensorKind(LOGPROBS, BYTES, ANY),
    TensorKind(NUM_INPUT_TOKENS, UINT32, 1),
    TensorKind(NUM_OUTPUT_TOKENS, UINT32, ANY),
)
OUTPUTS_ON_REQUEST = tuple(kind.name for kind in OUTPUTS if kind.name != TEXT_OUTPUT)
INPUTS = (
    TensorKind(TEXT_INPUT, BYTES, 1),
    TensorKind(IMAGE, BYTES, ANY),
    TensorKind(STREAM, BOOL, 1),
    TensorKind(SAMPLING, BYTES, 1),
    TensorKind(WITHOUT_PROMPT, BOOL, 1),
    *(TensorKind(RETURN + name, BOOL, 1) for name in OUTPUTS_ON_REQUEST),
)
DATATYPES: Mapping[str, str] = {kind.name: kind.datatype for kind in INPUTS}
LISTS: Mapping[str, str] = {
    BYTES: "bytes_contents",
    BOOL: "bool_contents",
    FP32: "fp32_contents",
    UINT32: "uint_contents",
}


class Tensor(NamedTuple):
    """An output tensor; its shape is [len(values)]."""

    name: str
    datatype: str
    values: Sequence[Any]


def check(name: str, datatype: str) -> None:
    """Raises InvalidArgument unless there is an input of this name and datatype."""
    if name not in DATATYPES:
        raise InvalidArgument(f"the input {name!r} does not exist; available: {', '.join(DATATYPES)}", field="inputs")
    if datatype != DATATYPES[name]:
        raise InvalidArgument(f"{name} is {DATATYPES[name]}, got {datatype!r}", field="inputs")


def read_inputs(message: pb.ModelInferRequest) -> dict[str, Any]:
    """Returns the element of each input by name, a list for IMAGE, from its contents or the raw ones. Raises
    InvalidArgument for unknown or repeated names, other datatypes or shapes, and a different number of raw contents."""
    is_raw = bool(message.raw_input_contents)
    if is_raw and len(message.raw_input_contents) != len(message.inputs):
        given = f"{len(message.inputs)} inputs with {len(message.raw_input_contents)} raw_input_contents"
        text = f"{given}; one for each is needed"
        raise InvalidArgument(text, field="raw_input_contents")
    elements: dict[str, Any] = {}
    for number, tensor in enumerate(message.inputs):
        check(tensor.name, tensor.datatype)
        if tensor.name in elements:
            raise InvalidArgument(f"{tensor.name} occurs twice; send it once", field="inputs")
        if is_raw:
            elements[tensor.name] = decode_raw(tensor.name, tensor.shape, message.raw_input_contents[number])
        else:
            values = getattr(tensor.contents, LISTS[tensor.datatype])
            elements[tensor.name] = element(tensor.name, tensor.shape, values)
    return elements


def element(name: str, shape: Iterable[int], values: Sequence[Any]) -> Any:
    """Returns the single element of an input, or all of IMAGE. Raises InvalidArgument for another shape or number of
    values."""
    return list(values) if name == IMAGE else single_element(name, shape, values)


def single_element(name: str, shape: Iterable[int], values: Sequence[Value]) -> Value:
    """Returns the single element of an input. Raises InvalidArgument for another shape or number of values."""
    if any(size != 1 for size in shape) or len(values) != 1:
        text = f"{name} must have one element, got the shape {list(shape)} and {len(values)} values"
        raise InvalidArgument(text, field="inputs")
    return values[0]


def decode_raw(name: str, shape: Iterable[int], data: bytes | memoryview) -> Any:
    """Returns the single element of an input sent as bytes, or all of IMAGE; for BYTES views without the length
    prefixes. Raises InvalidArgument."""
    if name == IMAGE:
        return _split_texts(name, memoryview(data))
    if DATATYPES[name] == BOOL:
        return bool(single_element(name, shape, data))
    if len(data) < LENGTH.size:
        text = f"{name} begins with the length of its element in {LENGTH.size} bytes, got {len(data)} bytes"
        raise InvalidArgument(text, field="inputs")
    length, available = LENGTH.unpack_from(data)[0], len(data) - LENGTH.size
    if length != available:
        raise InvalidArgument(
            f"{name} must have one element: its length prefix says {length} bytes, {available} follow", field="inputs"
        )
    return single_element(name, shape, [memoryview(data)[LENGTH.size :]])


def _split_texts(name: str, data: memoryview) -> list[memoryview]:
    """Returns views of the elements, each after its length. Raises InvalidArgument if a length does not fit."""
    found: list[memoryview] = []
    while data:
        length = LENGTH.unpack_from(data)[0] if len(data) >= LENGTH.size else -1
        data = data[LENGTH.size :]
        if not 0 <= length <= len(data):
            text = f"{name}: the length prefix of element {len(found)} does not fit into the bytes that follow"
            raise InvalidArgument(text, field="inputs")
        found.append(data[:length])
        data = data[length:]
    return found


def write_outputs(response: pb.ModelInferResponse, tensors: Iterable[Tensor], *, is_raw: bool) -> None:
    """Adds the tensors to the response, in place. `is_raw`: their values as bytes in raw_output_contents."""
    for name, datatype, values in tensors:
        output = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        if is_raw:
            response.raw_output_contents.append(RAW[datatype](values))
        else:
            getattr(output.contents, LISTS[datatype]).extend(values)


def _raw_texts(values: Sequence[bytes]) -> bytes:
    return b"".join([LENGTH.pack(len(value)) + value for value in values])


RAW: Mapping[str, Callable[[Sequence[Any]], bytes]] = {
    BYTES: _raw_texts,
    FP32: lambda values: struct.pack(f"<{len(values)}f", *values),
    UINT32: lambda values: struct.pack(f"<{len(values)}I", *values),
}


def metadata(name: str) -> pb.ModelMetadataResponse:
    """Returns the ModelMetadata answer for the model `name`; the tensors are the same for all models."""
    kind = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=name,
        versions=[VERSION_OF_MODELS],
        platform=PLATFORM,
        inputs=[kind(name=one.name, datatype=one.datatype, shape=[one.size]) for one in INPUTS],
        outputs=[kind(name=one.name, datatype=one.datatype, shape=[one.size]) for one in OUTPUTS],
    )
