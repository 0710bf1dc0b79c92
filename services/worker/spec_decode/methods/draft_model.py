"""draft_model: drafts with a smaller model of the same vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from quire.services.worker.attention.backends import choose_attention
from quire.services.worker.kv import kv_cache
from quire.services.worker.kv.kv_memory import block_shape
from quire.services.worker.models import taped
from quire.services.worker.models.attention_spec import attention_spec
from quire.services.worker.models.loading.output_heads import resolve_output_head
from quire.services.worker.models.registry import find_model, read_model_config
from quire.services.worker.models.taped import TapedModel
from quire.services.worker.runner.model_runner import Model
from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.draft_models.draft_passes import DraftPasses, FilledBlocks, spread
from quire.services.worker.spec_decode.draft_models.draft_sampler import DraftSampler
from quire.services.worker.spec_decode.draft_models.tokenizer_check import check_same_tokens
from quire.services.worker.spec_decode.drafter import DrafterWorker, DraftTarget
from quire.services.worker.spec_decode.proposer import DraftRequest
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.drafts.drafts import Drafts
from quire.services.worker.step.slots import NewBlocks, Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument
from quire.shared.models.model_identity import read_config


class DraftModel:
    """Weights and KV shape of the draft model, loaded when constructed. Raises InvalidArgument if its vocabulary or
    tokenizer is not the model's."""

    needs_features = False
    needs_prompts = False

    def __init__(self, settings: SpeculativeConfig, target: DraftTarget) -> None:
        folder = Path(settings.model).expanduser()
        values = read_config(folder)
        family = find_model(values)
        config = read_model_config(values)
        if target.loader.reads_files:
            config = resolve_output_head(config, folder)
        if config.vocab_size != target.model.config.vocab_size:
            raise InvalidArgument(
                f"speculative_config.model: {folder} has a vocabulary of {config.vocab_size} tokens, the model one of "
                f"{target.model.config.vocab_size}",
                field="speculative_config",
            )
        check_same_tokens(folder, target.folder)
        limits, self.place = target.limits, replace(target.place, checkpoint=config.quantization)
        spec = attention_spec(config, limits.block_size, self.place)
        self.backend = choose_attention(target.attention_backend, spec)
        self.num_positions = min(config.max_positions, limits.max_model_len)
        self.model = family(config, self.backend, self.place, self.num_positions)
        target.loader.load(self.model, folder)
        self.shape = block_shape(spec, config.num_layers, self.place.dtype)
        self.block_bytes = self.shape.num_bytes

    def start(self, worker: DrafterWorker) -> DraftModelProposer:
        return DraftModelProposer(self, worker)


class DraftModelProposer:
    """Computes the draft model's KV lazily: before drafting it processes all unseen tokens of a sequence, from its last
    token to a whole prompt."""

    def __init__(self, draft: DraftModel, worker: DrafterWorker) -> None:
        self._worker = worker
        self._draft = draft
        limits, place = worker.limits, draft.place
        self._caches = kv_cache.allocate(draft.shape, limits.num_blocks, place.device)
        recorded = taped.reject_reason(draft.model, draft.backend, place) is None
        self._model: Model = TapedModel(draft.model, self._caches, limits) if recorded else draft.model
        self._logits = draft.model.whole_logits
        self._passes = DraftPasses(worker.table, place.device)
        self._blocks = FilledBlocks(worker.table, limits.num_blocks)
        self._num_seen = np.zeros(limits.max_num_seqs, dtype=np.int32)  # positions with KV, by slot

    def add_blocks(self, new: NewBlocks) -> None:
        self._blocks.add_blocks(new)

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies the draft model's KV of copied blocks, and how far these are filled."""
        kv_cache.copy_blocks(self._caches, copies)
        self._blocks.copy(copies)

    def start_sequence(self, slot: int) -> None:
        self._num_seen[slot] = self._blocks.start_sequence(slot)

    def end_sequence(self, slot: int) -> None:
        """Does nothing: the next sequence of the slot overwrites its state."""

    def clear_history(self) -> None:
        """Does nothing: no state outlives its sequence."""

    def record_step(self, inputs: StepInputs, output: RunnerOutput) -> None:
        """Does nothing: tokens are read from the history."""

    def propose(self, request: DraftRequest) -> Drafts | None:
        """Computes the KV of unseen tokens, as far as the step's budget covers them, and drafts for the slots that are
        then complete; the others continue in later steps. None if no slot is."""
        lengths = request.history.lengths[request.slots]
        fits = lengths + request.counts <= self._draft.num_positions
        slots, lengths, counts = request.slots[fits], lengths[fits], request.counts[fits]
        starts = np.minimum(self._num_seen[slots], lengths - 1)  # recompute positions of refused drafts
        counts_seen = self._affordable(lengths - starts)
        self._num_seen[slots] = starts + counts_seen
        done = counts_seen == lengths - starts
        if not done.all():
            unfinished = np.flatnonzero(~done & (counts_seen > 0))
            if len(unfinished):
                self._process_known(slots[unfinished], starts[unfinished], counts_seen[unfinished])
            slots, starts, lengths, counts = slots[done], starts[done], lengths[done], counts[done]
        return self._propose(slots, starts, lengths, counts) if len(slots) else None

    def _affordable(self, gaps: I32) -> I32:
        """Limits the unseen tokens of the sequences to what a step may compute in all, the first sequences first."""
        budget = self._worker.limits.max_num_batched_tokens
        before = np.cumsum(gaps) - gaps
        affordable: I32 = np.clip(budget - before, 0, gaps).astype(np.int32)
        return affordable

    def _propose(self, slots: Rows, starts: I32, lengths: I32, counts: I32) -> Drafts:
        """Samples `counts` drafts of each slot with one forward pass per draft, and marks the KV of the known tokens as
        filled."""
        sampler = DraftSampler(self._worker.sampler, self._worker.config, slots, lengths, counts)
        token_ids = sampler.draw(self._logits(self._process_known(slots, starts, lengths - starts)))
        for batch in self._passes.drafts(slots, lengths, counts - 1):
            hidden = self._model.forward(replace(batch, token_ids=token_ids), self._caches)
            token_ids = sampler.draw(self._logits(hidden))
        self._num_seen[slots] = lengths + counts - 1
        self._blocks.mark(slots, lengths)
        return sampler.drafts()

    def _process_known(self, slots: Rows, starts: I32, counts: I32) -> Tensor:
        """Runs the draft model on known tokens; returns the hidden state of each slot's last one."""
        rows, positions = spread(starts, counts)
        batch = self._passes.known(slots, starts, counts, self._worker.history.tokens[slots[rows], positions])
        return self._model.forward(batch, self._caches)
