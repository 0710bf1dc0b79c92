"""Builds the messages that stream a checkpoint's tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from quire.shared.errors import InvalidArgument
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.common.v1.weights_stream_pb2 import BroadcastContent, TensorHead, TensorHeads, WeightsPiece
from quire.shared.tensor_headers import DTYPES, MAX_HEADERS_PER_PIECE

PIECE_BYTES = 512 * 1024


def messages(
    begin: pb.UpdateWeightsRequest, named_tensors: Iterable[tuple[str, Any]]
) -> Iterator[pb.StreamWeightsRequest]:
    """Yields the messages. Raises InvalidArgument for an object that is not a torch tensor."""
    tensors = list(named_tensors)
    return _stream(begin, tensors, [head(name, tensor) for name, tensor in tensors])


def header_messages(begin: pb.UpdateWeightsRequest, heads: list[TensorHead]) -> Iterator[pb.StreamWeightsRequest]:
    """Yields the request and then the tensors' headers, at most MAX_HEADERS_PER_PIECE in a message."""
    yield pb.StreamWeightsRequest(begin=begin)
    for start in range(0, len(heads), MAX_HEADERS_PER_PIECE):
        part = TensorHeads(tensors=heads[start : start + MAX_HEADERS_PER_PIECE])
        yield pb.StreamWeightsRequest(piece=WeightsPiece(heads=part))


def broadcast_messages(
    begin: pb.UpdateWeightsRequest, heads: list[TensorHead], content: BroadcastContent
) -> Iterator[pb.StreamWeightsRequest]:
    """Yields the messages that announce a broadcast: request, headers, where the content comes from, and an empty
    end."""
    yield from header_messages(begin, heads)
    yield pb.StreamWeightsRequest(piece=WeightsPiece(broadcast=content))
    yield pb.StreamWeightsRequest(piece=WeightsPiece(end=b""))


def _stream(
    begin: pb.UpdateWeightsRequest, tensors: list[tuple[str, Any]], heads: list[TensorHead]
) -> Iterator[pb.StreamWeightsRequest]:
    """Yields the header, the tensors' bytes in pieces, and an end with the SHA-256 of all bytes."""
    yield from header_messages(begin, heads)
    digest = hashlib.sha256()
    for _, tensor in tensors:
        content = tensor_bytes(tensor)
        digest.update(content)
        for start in range(0, len(content), PIECE_BYTES):
            part_of_it = bytes(content[start : start + PIECE_BYTES])
            yield pb.StreamWeightsRequest(piece=WeightsPiece(content=part_of_it))
    yield pb.StreamWeightsRequest(piece=WeightsPiece(end=digest.digest()))


def head(name: str, tensor: Any) -> TensorHead:
    """Returns a tensor's name, dtype and shape; raises InvalidArgument for objects that are no tensors of a known
    dtype."""
    dtype = DTYPES.get(str(getattr(tensor, "dtype", "")).removeprefix("torch."))
    if dtype is None or not hasattr(tensor, "detach"):
        raise InvalidArgument(
            f"named_tensors: {name} must be a tensor with one of the dtypes {', '.join(DTYPES)}", field="named_tensors"
        )
    return TensorHead(name=name, dtype=dtype, shape=list(tensor.shape))


def tensor_bytes(tensor: Any) -> memoryview:
    """Returns a tensor's contents as bytes in row-major order; copies if it is on a GPU or not contiguous."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return memoryview(flat.numpy())
