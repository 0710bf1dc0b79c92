"""Lower bound of a step's cost from the model's sizes: floating-point operations and bytes read and written.

A multiplication and an addition are two operations. Weights are read once a step, keys and values once for each row;
activations, which mostly stay in caches, are left out. For a mixture of experts a token uses top_k experts, and a step
reads the experts that at least one token uses, assuming an even choice.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from quire.kernels.state_pages import WORD_BYTES
from quire.services.worker.layers.placement import Destination, memory_of
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.metrics.worker import NO_COST, StepCost

OPERATIONS_ON_STATE = 7  # per element and token: decay, product with k, update, product with q
MATRIX = 2  # dimensions of a matrix; biases and norm weights have one and cost next to nothing
ROUTED = re.compile(r"\.experts\.")
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|wpe|embed_positions)\.")
HEAD = re.compile(r"(^|\.)lm_head\.")


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """Numbers of elements of a model's weight matrices, by how often a step multiplies them."""

    dense: int  # multiplied with every token
    routed: int  # of all routed experts
    head: int  # multiplied with every sampled token
    element_bytes: int

    @classmethod
    def of(
        cls, destinations: Iterable[tuple[str, Destination]], config: DecoderConfig, *, expert_ranks: int = 1
    ) -> WeightCounts:
        """Counts the elements of the matrices of all ranks, by kind: dense, routed experts, output head.

        `destinations`: names and tensors of the model as it is loaded. `expert_ranks`: ranks that own disjoint sets of
        experts. Vectors and embeddings count as nothing.
        """
        dense = routed = 0
        element_bytes = 1
        for name, destination in destinations:
            if len(destination.shape) < MATRIX:
                continue
            tensor, size = memory_of(destination), math.prod(destination.shape)
            if ROUTED.search(name):
                routed += size * expert_ranks if len(destination.shape) == MATRIX else size
            elif not EMBEDDING.search(name) and not HEAD.search(name):
                dense += size
            element_bytes = max(element_bytes, tensor.element_size() if tensor.is_floating_point() else 1)
        return cls(dense, routed, config.vocab_size * config.hidden_size, element_bytes)

    def of_all_stages(self, total: Callable[[int], int]) -> WeightCounts:
        """Sums the counts over pipeline stages; `total` sums a number over all stages."""
        return replace(self, dense=total(self.dense), routed=total(self.routed))


class CostModel:
    """Computes a lower bound of the floating-point operations and bytes of a worker's steps.

    Steps must be passed in order. Costs a few array operations a step; none if steps follow from each other and no
    layer has a window.
    """

    def __init__(self, config: DecoderConfig, weights: WeightCounts, kv_element_bytes: int) -> None:
        experts, size = config.experts, weights.element_bytes
        self._taken = taken = (
            experts.routing.top_k / experts.num_experts if experts else 0.0
        )  # fraction of the experts used by a token
        windows = [window for window, attends in zip(config.sliding_windows, config.attends, strict=True) if attends]
        self._layers = tuple(Counter(windows).items())  # (window or 0, number of layers with it)
        self._num_layers, self._chunked = len(windows), config.attention.chunked_windows
        shape = None if config.recurrent is None else config.recurrent.state
        num_states = 0 if config.recurrent is None else sum(config.recurrent.layers)  # recurrent layers
        state_words = 0 if shape is None else shape.num_words
        state_flops = 0 if shape is None else OPERATIONS_ON_STATE * shape.num_heads * shape.head_words
        self._state_bytes = float(num_states * state_words * WORD_BYTES)  # of a row
        # Operations of a token, without attention, and of a sampled token.
        self._token_flops = 2.0 * (weights.dense + weights.routed * taken) + num_states * state_flops
        self._sample_flops = 2.0 * weights.head
        self._dense_bytes, self._head_bytes = float(weights.dense * size), float(weights.head * size)
        self._routed_bytes = float(weights.routed * size)
        # Elements per token and layer: cached, and read by a head.
        cached, read_elements = 2 * config.num_kv_heads * config.head_dim, 2 * config.head_dim
        if config.latent is not None:
            cached, read_elements = config.latent.cached_dim, config.latent.cached_dim + config.latent.kv_rank
        self._attention_flops = 2.0 * config.num_q_heads * read_elements  # per pair of tokens and layer
        self._kv_bytes = float(cached * kv_element_bytes)  # of a token, in a layer
        self._written_bytes = self._kv_bytes * self._num_layers  # of a token
        self._has_windows = any(window for window, _ in self._layers)
        self._last, self._last_read = 0, 0  # number of the previous step and the tokens its rows read

    def cost_of(self, inputs: StepInputs) -> StepCost:
        """Returns a step's floating-point operations and the bytes it reads and writes."""
        num_tokens, num_samples = inputs.num_tokens, inputs.num_samples
        attended, kept = self._in_windows(inputs) if self._has_windows else self._without_windows(inputs)
        weight_bytes = self._dense_bytes + (self._head_bytes if num_samples else 0.0)
        if self._routed_bytes:  # each expert is read if a token uses it
            weight_bytes += self._routed_bytes * (1.0 - (1.0 - self._taken) ** num_tokens)
        states = inputs.num_rows * self._state_bytes
        return StepCost(
            num_tokens * self._token_flops + num_samples * self._sample_flops + attended * self._attention_flops,
            weight_bytes,
            kept * self._kv_bytes + states,
            num_tokens * self._written_bytes + states,
        )

    def _without_windows(self, inputs: StepInputs) -> tuple[int, int]:
        """Returns the tokens attended to by the step's tokens and those read by its rows, over all layers.

        Remembers the step: if the next one follows from it, each row has grown by one token and no array is summed.
        """
        follows = inputs.follows
        if follows and follows == self._last:  # each row grew by one token
            looked_at = read = self._last_read + inputs.num_tokens
        else:
            looked_at = _sum(inputs.positions, 0) + len(inputs.positions)
            read = _sum(inputs.seq_lens, 0)
        self._last, self._last_read = inputs.number, read
        return self._num_layers * looked_at, self._num_layers * read

    def _in_windows(self, inputs: StepInputs) -> tuple[int, int]:
        """Returns the tokens attended to by the step's tokens and those read by its rows, over all layers, for models
        with sliding or chunked windows."""
        attended = kept = 0
        for window, num_layers in self._layers:
            if window and self._chunked:
                looked_at, read_back = _in_chunks(inputs, window)
            else:
                looked_at, read_back = _sum(inputs.positions + 1, window), _sum(inputs.seq_lens, window)
            attended += num_layers * looked_at
            kept += num_layers * read_back
        return attended, kept


def _in_chunks(inputs: StepInputs, chunk: int) -> tuple[int, int]:
    """Returns the tokens attended to and read in one layer with chunked windows: none before the chunk of a row's first
    token."""
    first_positions = inputs.seq_lens - np.diff(inputs.query_start)
    return _sum(inputs.positions % chunk + 1, 0), _sum(inputs.seq_lens - first_positions // chunk * chunk, 0)


def _sum(lengths: np.ndarray, window: int) -> int:
    """Sums `lengths`, each cut to `window`; 0: uncut."""
    return int(np.add.reduce(np.minimum(lengths, window) if window else lengths, dtype=np.int64))


class NoCostModel:
    """Cost model of models whose costs are not computed."""

    def cost_of(self, inputs: StepInputs) -> StepCost:
        return NO_COST


NO_COST_MODEL = NoCostModel()
