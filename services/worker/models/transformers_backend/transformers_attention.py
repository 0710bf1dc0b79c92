"""Paged attention registered as an attention implementation of transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from quire.kernels import Ops
from quire.services.worker.attention.port import AttentionBackend
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.models.transformers_backend.transformers_config import TransformersConfig
from quire.shared.errors import InvalidArgument

_numbers = itertools.count()
NOT_DONE = ("softcap", "s_aux", "position_bias")  # unsupported attention arguments


class PagedAttention:
    """Attention of one model, called by all attention modules of transformers with their layer index."""

    def __init__(self, config: TransformersConfig, backend: AttentionBackend, ops: Ops, identity: Tensor) -> None:
        """Registers this object with transformers as the attention `name`, which is unique in the process.

        `identity` is a rotary table without rotation, because transformers has rotated already.
        """
        self.name = f"quire_{next(_numbers)}"
        self._config, self._backend, self._ops, self._identity = config, backend, ops, identity
        self._batch: ForwardBatch | None = None
        self._caches: Sequence[LayerCache] = ()
        self._layers_seen: set[int] = set()
        AttentionInterface.register(self.name, self)

    @contextmanager
    def over(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Iterator[None]:
        """Sets batch and caches for the attention calls of one step.

        Raises InvalidArgument at the end if not every layer called this attention.
        """
        self._batch, self._caches = batch, caches
        self._layers_seen.clear()
        try:
            yield
        finally:
            self._batch, self._caches = None, ()
        if len(self._layers_seen) != self._config.num_layers:
            raise InvalidArgument(
                f"model: {len(self._layers_seen)} of {self._config.num_layers} layers use an attention that can be "
                "replaced (transformers)",
                field="model",
            )

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Stores keys and values in the layer's cache and attends over its pages; returns (result, None).

        query [1, num_q_heads, num_tokens, head_dim], key and value [1, num_kv_heads, num_tokens, head_dim] -> [1,
        num_tokens, num_q_heads, head_dim]. Raises InvalidArgument for what the module asks for and this attention
        lacks.
        """
        assert self._batch is not None
        layer, config = int(module.layer_idx), self._config  # type: ignore[arg-type]
        self._layers_seen.add(layer)
        window = config.sliding_windows[layer]
        self._check_shapes(query, key, value)
        _check_asked(sliding_window or 0, window, others)
        cache, q = self._caches[layer], query[0].transpose(0, 1)
        batch = self._batch.for_cache(cache)
        qkv = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (query, key, value)], dim=1)
        q = self._ops.qk_norm_rope_store(
            qkv,
            None,
            None,
            0.0,
            self._identity,
            batch.positions,
            batch.slot_mapping,
            cache.k,
            cache.v,
            config.num_q_heads,
            config.num_kv_heads,
        )
        scale = config.head_dim**-0.5 if scaling is None else scaling
        attended = self._backend.attend(q, cache.k, cache.v, batch.attention, scale=scale, window=window)
        return attended[None], None

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raises InvalidArgument if numbers or sizes of heads differ from the configuration."""
        config = self._config
        for name, tensor, heads in (
            ("queries", query, config.num_q_heads),
            ("keys", key, config.num_kv_heads),
            ("values", value, config.num_kv_heads),
        ):
            if (tensor.size(1), tensor.size(3)) != (heads, config.head_dim):
                actual = f"{name} of {tensor.size(1)} heads of {tensor.size(3)}"
                text = f"model: its layers have {actual}, where {heads} of {config.head_dim} were read (transformers)"
                raise InvalidArgument(text, field="model")


def _check_asked(asked: int, window: int, others: dict[str, Any]) -> None:
    """Raises InvalidArgument if the window a layer asks for differs from the configuration or an unsupported argument
    is set."""
    if asked != window:
        text = f"model: a layer's window is {asked}, where {window} was read (transformers)"
        raise InvalidArgument(text, field="model")
    for name in NOT_DONE:
        if others.get(name) is not None:
            raise InvalidArgument(f"model: attention with {name} is not supported (transformers)", field="model")
