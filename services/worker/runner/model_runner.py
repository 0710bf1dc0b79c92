"""One step on the device: inputs up, forward, sampling, tokens down. Launches; never waits for the device.

The last sampled token of every slot stays on the device, so that the next step can be launched before anybody has
looked at this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.worker.attention.port import AttentionMetadata, Tensor
from services.worker.device.device import Device
from services.worker.device.staging import Downloads, Staging, staging_for, upload
from services.worker.device.step_timer import StepTimer, Timings
from services.worker.graphs.chunk_graphs import ChunkGraphs
from services.worker.graphs.decode_graphs import DecodeGraphs
from services.worker.graphs.recorded_steps import StepGraphs
from services.worker.graphs.step_edges import SlotMemory
from services.worker.kv import kv_cache
from services.worker.kv.kv_cache import LayerCache
from services.worker.sampling.accept import Choose, accept, choose_coupled
from services.worker.sampling.component import Positions
from services.worker.sampling.prompt_logprobs import PromptRows
from services.worker.sampling.sampler import Sampled, Sampler
from services.worker.spec_decode.drafts import NO_TOKEN, REFUSED, DraftRows
from services.worker.step.beam_moves import BeamMoves
from services.worker.step.block_copies import BlockCopies
from services.worker.step.forward_batch import ForwardBatch
from services.worker.step.slots import NewBlocks, Rows
from services.worker.step.step_inputs import StepInputs
from shared.columns import I32
from shared.errors import QuireError
from shared.pb.worker.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave, on the host."""

    token_ids: I32  # those of each slot that sampled, slot after slot; -1 where nothing could be chosen
    token_counts: I32  # [num_slots]
    logprobs: pb.LogprobColumns | None
    timings: Timings
    faults: Mapping[int, QuireError] = field(default_factory=dict)  # sequences that cannot go on, by slot
    refused_tokens: Rows | None = None  # samples behind wrong drafts, as indices into all samples; None: no drafts
    features: Tensor = None  # [num_tokens, hidden_size] on the device, where somebody wants them
    prompt_logprobs: pb.PromptLogprobColumns | None = None

    @property
    def drafted(self) -> bool:
        return self.refused_tokens is not None

    @property
    def last_tokens(self) -> I32:
        """[num_slots]"""
        return self.token_ids if not self.drafted else self.token_ids[np.cumsum(self.token_counts) - 1]


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
    sampling_rows: Tensor
    sample_positions: Tensor
    block_places: Tensor  # where the new blocks go in the flat block tables
    block_ids: Tensor


class Model(Protocol):
    """Tokens to logits."""

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Hidden states [num_samples, hidden_size] of the tokens whose logits are wanted."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_samples, vocab_size]"""


class Launch:
    """A step under way: `wait()` blocks until its tokens are on the host."""

    def __init__(
        self,
        timer: StepTimer,
        marks: list[Any],
        downloads: Downloads,
        sampled: Sampled,
        *,
        drafts: DraftRows | None,
        features: Tensor,
    ) -> None:
        """`downloads`: the tensors of `sampled`; on the host once the last mark has passed."""
        self._timer, self._marks = timer, marks
        self._downloads = downloads
        self._sampled = sampled
        self._drafts, self._features = drafts, features

    def wait(self) -> Outcome:
        faults = self._sampled.faults()  # first: the device may be waiting for masks that never come
        timings = self._timer.wait(self._marks)
        token_ids, *rest = self._downloads.arrays()
        sampled = self._sampled
        outcome = Outcome(
            token_ids,
            np.ones(len(token_ids), dtype=np.int32),
            sampled.logprobs.to_proto(*rest[:3]) if sampled.logprobs else None,
            timings,
            faults=faults,
            features=self._features,
            prompt_logprobs=sampled.prompts.to_proto(*rest[-3:]) if sampled.prompts else None,
        )
        return outcome if self._drafts is None else self._verified(self._drafts, outcome)

    def _verified(self, drafts: DraftRows, outcome: Outcome) -> Outcome:
        kept = outcome.token_ids != REFUSED
        return replace(
            outcome,
            token_ids=outcome.token_ids[kept],
            token_counts=drafts.counted(outcome.token_ids),
            refused_tokens=np.flatnonzero(~kept),
        )


class ModelRunner:
    """Owns the model, its KV memory and everything by slot that lives on the device."""

    def __init__(self, model: Model, sampler: Sampler, device: Device) -> None:
        self.sampler = sampler
        self._whole_model = model  # what steps go through that nothing recorded takes
        self._model = model
        self._device = device
        self._staging: Staging = staging_for(device)
        self._timer = StepTimer(device)
        self.caches: list[LayerCache] = []
        self.slot_memory = SlotMemory(None, None)
        self._graphs: DecodeGraphs | None = None
        self._chunk_graphs: ChunkGraphs | None = None
        # Whether somebody wants, of this step, what goes into the output head, of every token.
        self.wants_features: Callable[[StepInputs], bool] = lambda inputs: False
        self.choose_draft: Choose = choose_coupled

    def prepare(self, caches: list[LayerCache], block_table: npt.NDArray[np.int32]) -> None:
        """Takes the KV memory, and the host's block table, of which the CPU needs no copy."""
        self.caches = caches
        self._graphs, self._chunk_graphs, self._model = None, None, self._whole_model
        num_slots, width = block_table.shape
        device = self._device.torch_device
        tables = torch.from_numpy(block_table)
        if not self._device.is_synchronous:
            tables = torch.zeros((num_slots + 1, width), dtype=torch.int32, device=device)
        last_tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.slot_memory = SlotMemory(tables, last_tokens)

    def use_graphs(self, graphs: DecodeGraphs) -> None:
        """Decode steps go through `graphs`, recorded over `caches` and `slot_memory`, until the next prepare()."""
        self._graphs = graphs

    def use_chunk_graphs(self, graphs: ChunkGraphs) -> None:
        """The same for small steps of other kinds."""
        self._chunk_graphs = graphs

    def use_model(self, model: Model) -> None:
        """Other steps go through `model`, recorded over `caches`, until the next prepare()."""
        self._model = model

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Before the next launch, and behind all earlier ones."""
        kv_cache.copy_blocks(self.caches, copies)

    def move_beams(self, moves: BeamMoves) -> None:
        """Before the next launch, which brings the blocks that are new."""
        memory, device = self.slot_memory, self._device.torch_device
        slots, parents, tokens = (upload(part, device) for part in (moves.slots, moves.parents, moves.token_ids))
        memory.last_tokens.index_copy_(0, slots, tokens)
        if not self._device.is_synchronous:  # else the host's tables are those that are read
            memory.block_tables.index_copy_(0, slots, memory.block_tables.index_select(0, parents))
        if self._graphs is not None:
            self._graphs.forget_rows()

    def launch(self, inputs: StepInputs, new_blocks: NewBlocks) -> Launch:
        self.sampler.begin()
        asked = self.sampler.prompts.rows(inputs)
        keeps_features = self.wants_features(inputs)
        if self._graphs is not None:
            if inputs.rows_changed:
                self._graphs.forget_rows()
            if asked is None and not keeps_features and self._graphs.takes(inputs, new_blocks):
                return self._launch_graph(self._graphs, inputs, new_blocks, keeps_features=False)
        chunks = self._chunk_graphs if asked is None else None
        if chunks is not None and chunks.takes(inputs, new_blocks):
            return self._launch_graph(chunks, inputs, new_blocks, keeps_features=keeps_features)
        marks = self._timer.begin(short=False)
        up = self._upload(inputs, new_blocks)
        wanted = self._wanted(inputs, up, asked)
        batch = self._batch(inputs, up, wanted, keeps_features=keeps_features)
        self._timer.mark(marks)
        hidden: Tensor = self._model.forward(batch, self.caches) if inputs.num_tokens else None
        self._timer.mark(marks)
        sampled = Sampled(self.slot_memory.last_tokens[:0], None)
        features: Tensor = hidden if keeps_features else None
        if features is not None and wanted is not None:
            hidden = features.index_select(0, wanted)
        if inputs.num_samples:
            logits = self._model.logits(hidden if asked is None else hidden[: inputs.num_samples])
            sampled = self._sample(logits, inputs, up.sampling_slots, up.sample_positions)
        if asked is not None:
            told = self.sampler.prompts.collect(hidden[inputs.num_samples :], asked, self._model.logits)
            sampled = replace(sampled, prompts=told)
        return self._land(marks, sampled, inputs.drafts, features)

    def _launch_graph(
        self, graphs: StepGraphs, inputs: StepInputs, new_blocks: NewBlocks, *, keeps_features: bool
    ) -> Launch:
        marks = self._timer.begin(short=True)
        step = graphs.prepare(inputs, new_blocks)
        self._timer.mark(marks)
        logits = step.forward()
        self._timer.mark(marks)
        one_each = inputs.num_samples == inputs.num_rows if step.of_rows else inputs.drafts is None
        plain = self.sampler.plain(inputs.sampling_slots) if one_each and inputs.num_samples else None
        if plain is not None:
            plain.mask(logits)
            sampled = plain.settle(step.choose(plain.core))
        elif inputs.num_samples:
            slots, positions, rows = self._staging.upload(
                [inputs.sampling_slots, inputs.sample_positions, inputs.sampling_tokens]
            )
            wanted = logits.index_select(0, rows) if step.of_rows else logits
            sampled = self._sample(wanted, inputs, slots, positions)
        else:
            sampled = Sampled(self.slot_memory.last_tokens[:0], None)
        features: Tensor = step.features.clone() if keeps_features else None  # the next step leaves its own there
        return self._land(marks, sampled, inputs.drafts, features)

    def _land(
        self, marks: list[Any] | None, sampled: Sampled, drafts: DraftRows | None = None, features: Tensor = None
    ) -> Launch:
        downloads = self._staging.download(_tensors(sampled))
        return Launch(self._timer, self._timer.end(marks), downloads, sampled, drafts=drafts, features=features)

    def _upload(self, inputs: StepInputs, new_blocks: NewBlocks) -> Uploaded:
        places = new_blocks.slots * self.slot_memory.table_width + new_blocks.columns
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
                    np.searchsorted(inputs.slots, inputs.sampling_slots),
                    inputs.sample_positions,
                    places,
                    new_blocks.ids,
                ]
            )
        )

    def _wanted(self, inputs: StepInputs, up: Uploaded, asked: PromptRows | None) -> Tensor:
        """Tokens whose hidden states are wanted: the sampling ones, then those that lead to the prompts' own; None for
        all of them in their order."""
        if asked is None:
            return None if inputs.num_samples == inputs.num_tokens else up.sampling_tokens
        (tokens,) = self._staging.upload([np.concatenate((inputs.sampling_tokens, asked.tokens))])
        return tokens

    def _batch(self, inputs: StepInputs, up: Uploaded, wanted: Tensor, *, keeps_features: bool) -> ForwardBatch:
        tables = self._tables_of(inputs, up)
        return ForwardBatch(
            token_ids=self._feed(inputs, up),
            positions=up.positions,
            slot_mapping=up.slot_mapping,
            attention=AttentionMetadata(
                tables,
                up.query_start,
                up.seq_lens,
                longest_query=inputs.longest_query,
                longest_seq=int(inputs.seq_lens.max(initial=0)),
            ),
            logit_tokens=None if keeps_features else wanted,
            last=self._last(inputs, up, tables) if wanted is up.sampling_tokens and not keeps_features else None,
        )

    def _last(self, inputs: StepInputs, up: Uploaded, tables: Tensor) -> AttentionMetadata | None:
        """Of the rows that sample, as if they had one token each; None where more is wanted, or nothing saved."""
        if inputs.drafts is not None or self._device.is_synchronous or inputs.num_tokens == inputs.num_rows:
            return None
        return AttentionMetadata(
            tables.index_select(0, up.sampling_rows),
            torch.arange(inputs.num_samples + 1, dtype=torch.int32, device=tables.device),
            up.seq_lens.index_select(0, up.sampling_rows),
            longest_query=1,
            longest_seq=int(inputs.seq_lens.max(initial=0)),
        )

    def _feed(self, inputs: StepInputs, up: Uploaded) -> Tensor:
        """The step's token ids, sampled ones put in place."""
        if not len(inputs.fed_tokens):
            return up.token_ids
        fed = self.slot_memory.last_tokens.index_select(0, up.fed_slots).clamp_(min=0)
        if len(inputs.fed_tokens) == inputs.num_tokens:
            return fed
        up.token_ids.index_copy_(0, up.fed_tokens.long(), fed)
        return up.token_ids

    def _tables_of(self, inputs: StepInputs, up: Uploaded) -> Tensor:
        """int32 [num_rows, width] of the step's slots, no wider than its longest sequence needs."""
        if not self._device.is_synchronous and len(up.block_ids):
            self.slot_memory.block_tables.view(-1).index_copy_(0, up.block_places.long(), up.block_ids)
        return self.slot_memory.block_tables[:, : inputs.num_blocks].index_select(0, up.slots)

    def _sample(self, logits: Tensor, inputs: StepInputs, slots: Tensor, positions: Tensor) -> Sampled:
        """-1, where nothing could be chosen, is kept as a last token: whoever feeds it makes it 0."""
        if inputs.drafts is not None:
            return self._verify(logits, inputs, inputs.drafts, positions)
        sampled = self.sampler.sample(logits, inputs.sampling_slots, Positions(inputs.sample_positions, positions))
        self.slot_memory.last_tokens.index_copy_(0, slots.long(), sampled.token_ids)
        return sampled

    def _verify(self, logits: Tensor, inputs: StepInputs, drafts: DraftRows, positions: Tensor) -> Sampled:
        """As many tokens of each slot as its drafts are right, and one more; REFUSED behind them."""
        ahead = upload(drafts.ahead, logits.device)
        ready = self.sampler.process(
            logits, inputs.sampling_slots, Positions(inputs.sample_positions, positions, ahead)
        )
        memory = self.slot_memory
        token_ids = accept(self.choose_draft(ready, drafts), drafts, memory.last_tokens, memory.scratch_slot)
        settled = ready.settle(token_ids.clamp(min=NO_TOKEN))
        return replace(settled, token_ids=token_ids)


def _tensors(sampled: Sampled) -> list[Tensor]:
    tensors = [sampled.token_ids]
    for found in (sampled.logprobs, sampled.prompts and sampled.prompts.entries):
        tensors += [found.token_ids, found.logprobs, found.ranks] if found else []
    return tensors
