"""Runs a model from a tape: like a CUDA graph, but for steps of any size (docs/design/cpu-kernels.md, "Tape").

Inputs are in the same memory at every step. The overhead is one call and the copies into that memory, instead of a
Python call for every kernel of every layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.reference.low_rank import AdaptedRows
from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.layer_stack import joined

PACKAGE = "quire.kernels.cpu"
SEES_ALL = -1  # tree mask of a token that sees everything


def reject_reason(model: CausalLM, backend: AttentionBackend, place: LayerPlacement) -> str | None:
    """Returns why the model's steps cannot be recorded on a tape (device, ranks, family, kernels, dtype), or None."""
    if place.device.type != "cpu":
        return f"runs on the CPU, not on {place.device.type}"
    if not (place.shard.is_whole and place.stage.is_whole):
        return (
            "a tape cannot contain collectives" if place.stage.is_whole else "a tape requires all layers in one process"
        )
    if not model.taped_functions or type(model).forward is not CausalLM.forward:  # the tape records run()
        return "this family's forward pass cannot be recorded"
    adapting = ("add_low_rank", "embed_low_rank") if place.adapters else ()
    functions = (*model.taped_functions, *adapting)
    elsewhere = [name for name in functions if place.ops.sources[name] != PACKAGE]
    if elsewhere:
        return f"{elsewhere[0]} is not that of {PACKAGE}"
    if place.dtype not in (torch.float32, torch.bfloat16):
        return f"{PACKAGE} does not compute in {place.dtype}"
    return None if backend.records_decodes else "the attention backend cannot be recorded"


class TapedModel:
    """Replaces `model` in the runner by its recorded tape, for the KV caches that the tape was recorded with."""

    def __init__(self, model: CausalLM, caches: list[LayerCache], limits: WorkerLimits, *, trees: bool = False) -> None:
        """Allocates inputs of the largest step within `limits` and records the forward pass over them and `caches`.

        `trees`: drafts may be trees, so inputs include tree masks.
        """
        from quire.kernels.cpu.tape import Tape

        self._model, self._caches = model, caches
        num_seqs = limits.max_num_seqs
        num_tokens = max(limits.max_num_batched_tokens, num_seqs + 1)
        num_samples = num_tokens + 1  # sizes have to differ; hidden states of all tokens may be wanted
        self._width = limits.max_blocks_per_seq
        self._inputs = _inputs(num_tokens, num_seqs, num_samples, self._width, limits.num_groups)
        if trees:
            mask = torch.full((num_tokens,), SEES_ALL, dtype=torch.int64)
            self._inputs = replace(self._inputs, attention=replace(self._inputs.attention, tree_mask=mask))
        attention, wanted = self._inputs.attention, self._inputs.logit_tokens
        assert attention.query_start is not None
        assert wanted is not None
        # Inputs common to all KV groups, in the order of _put().
        tokens = self._inputs.token_ids, self._inputs.positions
        self._columns = (*tokens, attention.query_start, attention.seq_lens, wanted)
        self._num_masked = 0  # tokens whose mask was set in the last step
        self._every = torch.arange(num_samples, dtype=torch.int32)
        self._tape = Tape(num_tokens=num_tokens, num_seqs=num_seqs, num_samples=num_samples)
        with self._tape.recording():
            self._hidden, self._kept = model.run(self._inputs, caches)

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Copies the batch into the tape's inputs and replays it; returns hidden states [num_samples, hidden_width].

        Valid until the next step. `caches` must be those of the recording.
        """
        assert caches is self._caches
        num_tokens, num_seqs = batch.token_ids.size(0), batch.attention.seq_lens.size(0)  # len() takes 1 us each
        wanted = self._every[:num_tokens] if batch.logit_tokens is None else batch.logit_tokens
        num_samples = wanted.size(0)
        self._put(batch, wanted)
        self._tape.replay(num_tokens=num_tokens, num_seqs=num_seqs, num_samples=num_samples)
        hidden = self._hidden[:num_samples]
        if not self._kept:
            return hidden
        return joined(hidden, [tuple(part[:num_samples] for part in state) for state in self._kept])

    def logits(self, hidden: Tensor, *adapted: AdaptedRows) -> Tensor:
        """Returns logits [num_samples, vocab_size] in the model's dtype; `adapted`: rows with adapters, if any."""
        return self._model.logits(hidden, *adapted)

    def _put(self, batch: ForwardBatch, wanted: Tensor) -> None:
        """Copies the batch, and the tokens `wanted`, into the tape's inputs."""
        inputs, given = self._inputs, batch.attention
        _put_group(inputs, batch)
        for of_group, given_to_it in zip(inputs.other_groups, batch.other_groups, strict=True):
            _put_group(of_group, given_to_it)
        assert given.query_start is not None
        columns = (batch.token_ids, batch.positions, given.query_start, given.seq_lens, wanted)
        for place, values in zip(self._columns, columns, strict=True):
            place[: values.size(0)] = values
        mask = inputs.attention.tree_mask
        if mask is not None:
            self._put_mask(mask, given.tree_mask)

    def _put_mask(self, place: Tensor, mask: Tensor | None) -> None:
        """Copies the step's tree mask and resets that of the previous step's other tokens to "sees everything"."""
        if self._num_masked:
            place[: self._num_masked] = SEES_ALL
        self._num_masked = 0 if mask is None else len(mask)
        if mask is not None:
            place[: len(mask)] = mask


def _put_group(place: ForwardBatch, batch: ForwardBatch) -> None:
    """Copies the inputs that differ between KV groups: block tables and slot mapping."""
    tables = batch.attention.block_tables
    place.attention.block_tables[: tables.size(0), : tables.size(1)] = tables
    place.slot_mapping[: batch.slot_mapping.size(0)] = batch.slot_mapping


def _inputs(num_tokens: int, num_seqs: int, num_samples: int, width: int, num_groups: int) -> ForwardBatch:
    """Allocates zeroed inputs of the largest step, for all KV groups; zeros refer to the null block."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    attention = AttentionMetadata(
        zeros(num_seqs, width), zeros(num_seqs + 1), zeros(num_seqs), max_query_len=num_tokens, max_seq_len=num_tokens
    )
    first = ForwardBatch(zeros(num_tokens), zeros(num_tokens), zeros(num_tokens), attention, zeros(num_samples))
    others = [
        replace(
            first, slot_mapping=zeros(num_tokens), attention=replace(attention, block_tables=zeros(num_seqs, width))
        )
        for _ in range(1, num_groups)
    ]
    return replace(first, other_groups=tuple(others))
