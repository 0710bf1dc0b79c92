"""Checks of pooling parameters, and their messages for workers."""

from __future__ import annotations

from collections.abc import Sequence

from quire.services.frontend.request.request import Pooling
from quire.services.frontend.tokenizer.encoder import Tokenized
from quire.shared.columns import u32_bytes
from quire.shared.errors import InvalidArgument
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.common.v1 import pooling_pb2
from quire.shared.pb.common.v1.pooling_pb2 import PoolingParams
from quire.shared.pb.worker.v1.worker_pb2 import AlignmentParams, SequenceParams

ALL, STEP = "all", "step"
POOLERS = {
    "": pooling_pb2.POOLER_UNSPECIFIED,
    "last": pooling_pb2.POOLER_LAST,
    "mean": pooling_pb2.POOLER_MEAN,
    "cls": pooling_pb2.POOLER_CLS,
    ALL: pooling_pb2.POOLER_ALL,
    STEP: pooling_pb2.POOLER_STEP,
}
LAST_TOKEN_POOLERS = ("", "last")  # only the last token's state is used, so that the prefix cache may be read
MOST_DIMENSIONS = 2**20
MOST_TOKENS = 2**31


def check(pooling: Pooling, classes: Sequence[str], *, late_interaction: bool = False) -> None:
    """Raises InvalidArgument for pooling parameters that the model does not support. `classes` are the labels of the
    model's classifier; `late_interaction` says that it has no single vector for all tokens."""
    if late_interaction and not (pooling.pooler or pooling.classify):
        text = f"pooler must be {ALL!r}: the model has a vector for each token; use /pooling or Embed."
        raise InvalidArgument(text, field="pooler")
    if pooling.classify and not classes:
        raise InvalidArgument(
            "model: it has no classifier (config.json: architectures); use /v1/embeddings or /pooling", field="model"
        )
    if pooling.pooler not in POOLERS:
        text = f"pooler must be one of {', '.join(filter(None, POOLERS))}, got {pooling.pooler!r:.64}."
        raise InvalidArgument(text, field="pooler")
    if (pooling.pooler == STEP) != (pooling.step_tag_id is not None):
        text = (
            f"step_tag_id and the pooler {STEP!r} require each other, got {pooling.step_tag_id} and {pooling.pooler!r}."
        )
        raise InvalidArgument(text, field="step_tag_id")
    if pooling.step_tag_id is not None and not 0 <= pooling.step_tag_id < MOST_TOKENS:
        text = f"step_tag_id must be in [0, {MOST_TOKENS - 1}], got {pooling.step_tag_id}."
        raise InvalidArgument(text, field="step_tag_id")
    if pooling.dimensions is not None and not 1 <= pooling.dimensions <= MOST_DIMENSIONS:
        text = f"dimensions must be in [1, {MOST_DIMENSIONS}], got {pooling.dimensions}."
        raise InvalidArgument(text, field="dimensions")


def params(pooling: Pooling, adapter: AdapterId | None, prompt: Tokenized) -> bytes:
    """Returns the serialized SequenceParams of a pooled prompt: pooler options, adapter, and the places in the
    prompt that pooling needs; or of a prompt that is aligned. Unset options mean the model's defaults."""
    if pooling.alignment is not None:
        asked = pooling.alignment
        alignment = AlignmentParams(first_position=asked.first_position, num_rows=asked.num_rows)
        return SequenceParams(alignment=alignment).SerializeToString()
    message = PoolingParams(
        pooler=POOLERS[pooling.pooler],
        dimensions=pooling.dimensions or 0,
        classify=pooling.classify,
    )
    if pooling.step_tag_id is not None:
        message.step_tag_id = pooling.step_tag_id
    if pooling.normalize is not None:
        message.normalize = pooling.normalize
    params = SequenceParams(
        pooling=message,
        adapter=adapter.name if adapter else "",
        adapter_digest=adapter.digest if adapter else b"",
        second_text_from=prompt.second_text_from,
        num_seen_tokens=prompt.num_seen,
        pooled_tokens=u32_bytes(prompt.pooled_tokens),
    )
    return params.SerializeToString()


def num_vectors(pooling: Pooling | None, prompt: Tokenized) -> int | None:
    """Returns the number of a prompt's token vectors; None for a single vector. Raises InvalidArgument if it would be
    0."""
    if pooling is not None and pooling.alignment is not None:
        return len(prompt.token_ids) - pooling.alignment.first_position
    if pooling is None or pooling.pooler not in (ALL, STEP):
        return None
    if prompt.pooled_tokens:
        return len(prompt.pooled_tokens)
    ids = prompt.token_ids
    count = len(ids) if pooling.pooler == ALL else sum(one == pooling.step_tag_id for one in ids)
    if not count:
        text = f"step_tag_id: {pooling.step_tag_id} is not a token of the input."
        raise InvalidArgument(text, field="step_tag_id")
    return count
