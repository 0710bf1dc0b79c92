"""One step on the device: inputs up, forward, sampling, tokens down. Launches; never waits for the device.

The last sampled token of every slot stays on the device, so that the next step can be launched before anybody has
looked at this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.worker.attention.port import AttentionMetadata, Tensor
from services.worker.device import Clock, Device, clock_of
from services.worker.forward_batch import ForwardBatch
from services.worker.kv_cache import LayerCache
from services.worker.models.decoder import Decoder
from services.worker.sampling.component import Positions
from services.worker.sampling.logprobs import RowLogprobs
from services.worker.sampling.sampler import Sampled, Sampler
from services.worker.slots import NewBlocks
from services.worker.staging import Staging, staging_for
from services.worker.step_inputs import StepInputs
from shared.columns import I32
from shared.pb.worker.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Timings:
    """Microseconds on the device's clock."""

    prepare_us: int
    forward_us: int
    sample_us: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave, on the host."""

    token_ids: I32  # [num_samples], -1 where nothing could be chosen
    logprobs: pb.LogprobColumns | None
    timings: Timings


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A step's inputs on the device, all int32."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    seq_lens: Tensor
    slots: Tensor
    fed_tokens: Tensor
    fed_slots: Tensor
    sampling_slots: Tensor
    sampling_tokens: Tensor
    sample_positions: Tensor
    block_places: Tensor  # where the new blocks go in the flat block tables
    block_ids: Tensor


class Launch:
    """A step under way: `wait()` blocks until its tokens are on the host."""

    def __init__(self, clock: Clock, marks: list[Any], downloads: list[Tensor], logprobs: RowLogprobs | None) -> None:
        """`downloads`: token ids, then the tensors of `logprobs`; on the host once the last mark has passed."""
        self._clock, self._marks = clock, marks
        self._downloads = downloads
        self._logprobs = logprobs

    def wait(self) -> Outcome:
        self._clock.wait(self._marks[-1])
        token_ids, *rest = (tensor.numpy() for tensor in self._downloads)
        logprobs = self._logprobs.to_proto(*rest) if self._logprobs else None
        return Outcome(token_ids, logprobs, self._timings())

    def _timings(self) -> Timings:
        spans = zip(self._marks, self._marks[1:], strict=False)
        return Timings(*(self._clock.elapsed_us(start, end) for start, end in spans))


class ModelRunner:
    """Owns the model, its KV memory and everything by slot that lives on the device."""

    def __init__(self, model: Decoder, sampler: Sampler, device: Device) -> None:
        self.sampler = sampler
        self._model = model
        self._device = device
        self._staging: Staging = staging_for(device)
        self._clock = clock_of(device)
        self._caches: list[LayerCache] = []
        self._block_tables: Tensor = None  # int32 [max_num_seqs, max_blocks_per_seq]
        self._last_tokens: Tensor = None  # int32 [max_num_seqs]

    def prepare(self, caches: list[LayerCache], block_table: npt.NDArray[np.int32]) -> None:
        """Takes the KV memory, and the host's block table, of which the CPU needs no copy."""
        self._caches = caches
        host = torch.from_numpy(block_table)
        self._block_tables = host if self._device.is_synchronous else host.to(self._device.torch_device)
        self._last_tokens = torch.zeros(len(block_table), dtype=torch.int32, device=self._device.torch_device)

    def launch(self, inputs: StepInputs, new_blocks: NewBlocks) -> Launch:
        marks = [self._clock.mark()]
        up = self._upload(inputs, new_blocks)
        batch = self._batch(inputs, up)
        marks.append(self._clock.mark())
        hidden = self._model.forward(batch, self._caches) if inputs.num_tokens else None
        marks.append(self._clock.mark())
        sampled = self._sample(hidden, inputs, up)
        downloads = self._download(sampled)
        marks.append(self._clock.mark())
        return Launch(self._clock, marks, downloads, sampled.logprobs)

    def _upload(self, inputs: StepInputs, new_blocks: NewBlocks) -> Uploaded:
        places = new_blocks.slots * self._block_tables.size(1) + new_blocks.columns
        return Uploaded(
            *self._staging.upload(
                [
                    inputs.token_ids,
                    inputs.positions,
                    inputs.slot_mapping,
                    inputs.query_start,
                    inputs.seq_lens,
                    inputs.slots,
                    inputs.fed_tokens,
                    inputs.fed_slots,
                    inputs.sampling_slots,
                    inputs.sampling_tokens,
                    inputs.sample_positions,
                    places,
                    new_blocks.ids,
                ]
            )
        )

    def _batch(self, inputs: StepInputs, up: Uploaded) -> ForwardBatch:
        tables = self._tables_of(inputs, up)
        return ForwardBatch(
            token_ids=self._feed(inputs, up),
            positions=up.positions,
            slot_mapping=up.slot_mapping,
            attention=AttentionMetadata(tables, up.query_start, up.seq_lens),
            logit_tokens=None if inputs.num_samples == inputs.num_tokens else up.sampling_tokens,
        )

    def _feed(self, inputs: StepInputs, up: Uploaded) -> Tensor:
        """The step's token ids, sampled ones put in place."""
        if len(inputs.fed_tokens) == inputs.num_tokens:
            return self._last_tokens.index_select(0, up.fed_slots)
        if len(inputs.fed_tokens):
            up.token_ids.index_copy_(0, up.fed_tokens.long(), self._last_tokens.index_select(0, up.fed_slots))
        return up.token_ids

    def _tables_of(self, inputs: StepInputs, up: Uploaded) -> Tensor:
        """int32 [num_rows, width] of the step's slots, no wider than its longest sequence needs."""
        if not self._device.is_synchronous and len(up.block_ids):
            self._block_tables.view(-1).index_copy_(0, up.block_places.long(), up.block_ids)
        return self._block_tables[:, : inputs.num_blocks].index_select(0, up.slots)

    def _sample(self, hidden: Tensor, inputs: StepInputs, up: Uploaded) -> Sampled:
        if not inputs.num_samples:
            return Sampled(self._last_tokens[:0], None)
        logits = self._model.logits(hidden)
        positions = Positions(inputs.sample_positions, up.sample_positions)
        sampled = self.sampler.sample(logits, inputs.sampling_slots, positions)
        self._last_tokens.index_copy_(0, up.sampling_slots.long(), sampled.token_ids.clamp(min=0))
        return sampled

    def _download(self, sampled: Sampled) -> list[Tensor]:
        found = sampled.logprobs
        tensors = [sampled.token_ids] + ([found.token_ids, found.logprobs, found.ranks] if found else [])
        if self._device.is_synchronous:
            return tensors
        return [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
