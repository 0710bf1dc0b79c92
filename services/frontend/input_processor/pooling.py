"""What may be asked of a pooled prompt, and how workers are told."""

from __future__ import annotations

from collections.abc import Sequence

from services.frontend.request import Pooling
from shared.errors import InvalidArgument
from shared.pb.common.v1 import pooling_pb2
from shared.pb.common.v1.pooling_pb2 import PoolingParams
from shared.pb.worker.v1.worker_pb2 import SequenceParams

POOLERS = {
    "": pooling_pb2.POOLER_UNSPECIFIED,
    "last": pooling_pb2.POOLER_LAST,
    "mean": pooling_pb2.POOLER_MEAN,
    "cls": pooling_pb2.POOLER_CLS,
}
READ_ONE = ("", "last")  # the last token's state alone, behind which a prefix may be cached
MOST_DIMENSIONS = 2**20


def check(pooling: Pooling, classes: Sequence[str]) -> None:
    """`classes`: of the model. Raises InvalidArgument; how many dimensions the model has only workers know."""
    if pooling.classify and not classes:
        raise InvalidArgument("model: it has no classifier (config.json: architectures)", field="model")
    if pooling.pooler not in POOLERS:
        text = f"pooler must be one of {', '.join(filter(None, POOLERS))}, got {pooling.pooler!r:.64}."
        raise InvalidArgument(text, field="pooler")
    if pooling.dimensions is not None and not 1 <= pooling.dimensions <= MOST_DIMENSIONS:
        text = f"dimensions must be in [1, {MOST_DIMENSIONS}], got {pooling.dimensions}."
        raise InvalidArgument(text, field="dimensions")


def params(pooling: Pooling, adapter: str) -> bytes:
    """A serialized SequenceParams."""
    message = PoolingParams(
        pooler=POOLERS[pooling.pooler],
        normalize=pooling.normalize,
        dimensions=pooling.dimensions or 0,
        classify=pooling.classify,
    )
    return SequenceParams(pooling=message, adapter=adapter).SerializeToString()
