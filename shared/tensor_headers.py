"""Headers of a checkpoint's tensors, sent before their content: names, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1.weights_stream_pb2 import TensorHead

DEFAULT_GROUP = "weight_update_group"  # process group of a trainer's broadcast
MAX_HEADERS_PER_PIECE = 512
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip


def tensor_headers(names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[TensorHead]:
    """Returns tensor headers. `dtypes`: torch dtypes or their names. Raises InvalidArgument."""
    if not len(names) == len(dtypes) == len(shapes):
        text = f"names: {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes"
        raise InvalidArgument(text, field="names")
    found = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        known = DTYPES.get(str(dtype).removeprefix("torch."))
        if known is None:
            text = f"dtypes: {name:.80}: {dtype!s:.40} is not supported; supported: {', '.join(DTYPES)}"
            raise InvalidArgument(text, field="dtypes")
        found.append(TensorHead(name=name, dtype=known, shape=list(shape)))
    return found
