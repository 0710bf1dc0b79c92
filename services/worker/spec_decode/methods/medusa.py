"""medusa: drafts with heads that each predict one further token from the model's last feature (arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.embedding import OutputHead
from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.draft_models.draft_sampler import DraftSampler
from quire.services.worker.spec_decode.draft_models.medusa_layout import MedusaLayout, head_error, read_layout
from quire.services.worker.spec_decode.drafter import DrafterWorker, DraftTarget
from quire.services.worker.spec_decode.proposer import DraftRequest
from quire.services.worker.spec_decode.trees.token_tree import TokenTree
from quire.services.worker.spec_decode.trees.tree_sampler import TreeSampler
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.drafts.drafts import Drafts
from quire.services.worker.step.slots import NewBlocks, Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument
from quire.shared.models.model_identity import read_config


class MedusaHeads:
    """Weights of the heads: head k, from 0, predicts the token of position i + 2 + k from the feature of position i."""

    alternatives: ClassVar[dict[str, Alternative]] = {}

    def __init__(self, layout: MedusaLayout, target: DecoderConfig, place: LayerPlacement) -> None:
        self.num_heads, self._layout, size = layout.num_heads, layout, target.hidden_size
        self._vocab_size, place = target.vocab_size, replace(place, checkpoint=None)
        self._weights: Tensor = place.empty(layout.num_heads, len(layout.linears[0]), size, size)
        self._biases: Tensor = place.empty(*self._weights.shape[:3])
        self._outputs = [OutputHead(layout.vocab_size, size, place, name) for name in layout.outputs]
        # The model's id of each row of an output embedding.
        self._token_ids: Tensor = torch.arange(layout.vocab_size, device=place.device)
        self._ops = place.ops
        self._packed: list[list[Any]] = []

    @property
    def passed_over(self) -> tuple[str, ...]:
        return self._layout.passed_over

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for names, weights, biases in zip(self._layout.linears, self._weights, self._biases, strict=True):
            for name, weight, bias in zip(names, weights, biases, strict=True):
                yield f"{name}.weight", weight
                if self._layout.has_biases:
                    yield f"{name}.bias", bias
        for output in self._outputs:
            yield from output.destinations()
        if self._layout.token_map is not None:
            yield self._layout.token_map, self._token_ids

    def finish(self) -> None:
        """Packs the loaded weights. Raises InvalidArgument if the token map names a token that the model does not
        have."""
        self._packed = [
            [self._ops.prepare_linear(w.contiguous(), self._bias(b)) for w, b in zip(weights, biases, strict=True)]
            for weights, biases in zip(self._weights, self._biases, strict=True)
        ]
        invalid = self._token_ids[(self._token_ids < 0) | (self._token_ids >= self._vocab_size)]
        if len(invalid):
            raise head_error(
                f"{self._layout.token_map} names token {int(invalid[0])}, the model has {self._vocab_size}"
            )
        for output in self._outputs:
            output.finish()

    def _bias(self, bias: Tensor) -> Tensor | None:
        """Returns the bias as a contiguous tensor, None if the checkpoint has no biases."""
        return bias.contiguous() if self._layout.has_biases else None

    def logits(self, model: CausalLM, features: Tensor, head: int) -> Tensor:
        """Returns the logits of head number `head`, [num_rows, vocab_size], for features [num_rows, hidden_size];
        tokens that the heads do not cover are -inf. Heads without output embeddings use the model's."""
        for block in self._packed[head]:
            features = features + torch.nn.functional.silu(self._ops.linear(features, block))
        if not self._outputs:
            return model.whole_logits(features)
        output = self._outputs[min(head, len(self._outputs) - 1)]  # one may be shared by all heads
        logits = output.all_gather_vocab(output.pad_vocab(output(features)))
        if logits.size(1) == self._vocab_size:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._token_ids, logits)


class Medusa:
    """Weights of Medusa heads, loaded when constructed. They have no KV: they read the last feature alone. Raises
    InvalidArgument for a token tree deeper than the number of heads."""

    block_bytes = 0
    needs_features = True
    needs_prompts = False

    def __init__(self, settings: SpeculativeConfig, target: DraftTarget) -> None:
        folder = Path(settings.model).expanduser()
        self.model, self.place = target.model, target.place
        config, names = self.model.config, target.loader.names(folder)
        layout = read_layout(ConfigFile(read_config(folder)), names, config.hidden_size, config.vocab_size)
        self.heads = MedusaHeads(layout, config, self.place)
        target.loader.load(self.heads, folder)
        if settings.tree is not None and len(settings.tree.levels) > layout.num_heads:
            paths = f"speculative_token_tree: a path of {len(settings.tree.levels)} tokens"
            raise InvalidArgument(
                f"speculative_config.{paths}, and {layout.num_heads} heads guess one each", field="speculative_config"
            )

    def start(self, worker: DrafterWorker) -> MedusaProposer:
        return MedusaProposer(self, worker)


class MedusaProposer:
    """Proposer that stores by slot the feature that its last token was sampled from, and runs all heads on it."""

    def __init__(self, medusa: Medusa, worker: DrafterWorker) -> None:
        self._worker, self._medusa = worker, medusa
        num_slots, place = worker.limits.max_num_seqs, medusa.place
        self._length_at = np.zeros(num_slots, dtype=np.int32)  # sequence length at which the feature was stored
        size = medusa.model.config.hidden_size
        self._features: Tensor = torch.zeros((num_slots, size), dtype=place.dtype, device=place.device)

    def add_blocks(self, new: NewBlocks) -> None:
        """Does nothing: no state is kept by block."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Does nothing: no state is kept by block."""

    def start_sequence(self, slot: int) -> None:
        self._length_at[slot] = 0

    def end_sequence(self, slot: int) -> None:
        """Does nothing: the next sequence of the slot overwrites its state."""

    def clear_history(self) -> None:
        """Does nothing: no state outlives its sequence."""

    def record_step(self, inputs: StepInputs, output: RunnerOutput) -> None:
        """Stores the feature that each sampled slot's last token was sampled from, with the sequence's length; does
        nothing if the step kept no features or sampled nothing."""
        if output.features is None or not inputs.num_samples:
            return
        slots = inputs.sampled_slots
        last = output.token_counts - 1
        rows = inputs.sampling_tokens[last + (inputs.drafts.first_rows if inputs.drafts else np.arange(len(slots)))]
        rows = output.in_place(rows, inputs.sampling_tokens)
        self._features[self._upload(slots)] = output.features.index_select(0, self._upload(rows))
        self._length_at[slots] = self._worker.history.lengths[slots]

    def propose(self, request: DraftRequest) -> Drafts | None:
        """Drafts at most one token per head for the slots whose stored feature belongs to their last token; None if
        there is none."""
        lengths = request.history.lengths[request.slots]
        can = self._length_at[request.slots] == lengths
        if not can.any():
            return None
        slots, lengths = request.slots[can], lengths[can]
        if self._worker.config.tree is not None:
            return self._propose_trees(self._worker.config.tree, slots, lengths, request.counts[can])
        counts = np.minimum(request.counts[can], self._medusa.heads.num_heads)
        sampler = DraftSampler(self._worker.sampler, self._worker.config, slots, lengths, counts)
        features = self._features[self._upload(slots)]
        for head in range(int(counts.max())):
            sampler.draw(self._medusa.heads.logits(self._medusa.model, features, head))
        return sampler.drafts()

    def _propose_trees(self, tree: TokenTree, slots: Rows, lengths: I32, counts: I32) -> Drafts | None:
        """Drafts trees; a head's guesses are the same after all guesses of the previous head."""
        sampler = TreeSampler(self._worker.sampler, self._worker.config, tree, slots, lengths)
        features = self._features[self._upload(slots)]
        for head, level in enumerate(tree.levels):
            sampler.draw(level, self._medusa.heads.logits(self._medusa.model, features, head))
        return sampler.drafts(counts)

    def _upload(self, array: object) -> Tensor:
        return upload(np.asarray(array), self._medusa.place.device)
