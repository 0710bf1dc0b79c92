"""medusa: heads that look further ahead from the model's last feature, all at once (arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from services.worker.device.staging import upload
from services.worker.layers.placement import Alternative, Placement
from services.worker.models.config_file import ConfigFile
from services.worker.runner.output import RunnerOutput
from services.worker.spec_decode.config import SpeculativeConfig
from services.worker.spec_decode.drafter import DrafterWorker, Target
from services.worker.spec_decode.drafts import Drafts
from services.worker.spec_decode.draws import Draws
from services.worker.spec_decode.proposer import Wanted
from services.worker.step.block_copies import BlockCopies
from services.worker.step.slots import NewBlocks
from services.worker.step.step_inputs import StepInputs
from shared.errors import InvalidArgument
from shared.model_identity import read_config

MODEL_TYPE = "quire_medusa"


class MedusaHeads:
    """Head k turns the feature of position i into one that means the token of position i + 2 + k; k from 0."""

    passed_over = ()
    alternatives: ClassVar[dict[str, Alternative]] = {}

    def __init__(self, hidden_size: int, num_heads: int, place: Placement) -> None:
        self.num_heads = num_heads
        self._weights: Tensor = place.empty(num_heads, hidden_size, hidden_size)
        self._biases: Tensor = place.empty(num_heads, hidden_size)
        self._ops = place.ops
        self._packed: list[Any] = []

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        for head in range(self.num_heads):
            yield f"heads.{head}.weight", self._weights[head]
            yield f"heads.{head}.bias", self._biases[head]

    def finish(self) -> None:
        pairs = zip(self._weights, self._biases, strict=True)
        self._packed = [self._ops.prepare_linear(weight.contiguous(), bias.contiguous()) for weight, bias in pairs]

    def __call__(self, features: Tensor, head: int) -> Tensor:
        """[num_rows, hidden_size] -> the same shape"""
        return features + torch.nn.functional.silu(self._ops.linear(features, self._packed[head]))


class Medusa:
    """The weights. No KV: the last feature is all that the heads look at."""

    block_bytes = 0
    needs_features = True
    needs_prompts = False

    def __init__(self, settings: SpeculativeConfig, target: Target) -> None:
        folder = Path(settings.model).expanduser()
        config = ConfigFile(read_config(folder))
        self.model, self.place = target.model, target.place
        hidden_size = self.model.config.hidden_size
        if config.get("model_type") != MODEL_TYPE or config.integer("hidden_size") != hidden_size:
            raise InvalidArgument(
                f"speculative_config.model: {folder} holds no Medusa heads (model_type {MODEL_TYPE!r}) of size "
                f"{hidden_size}",
                field="speculative_config",
            )
        self.heads = MedusaHeads(hidden_size, config.integer("num_heads"), self.place)
        target.loader.load(self.heads, folder)

    def start(self, worker: DrafterWorker) -> MedusaProposer:
        return MedusaProposer(self, worker)


class MedusaProposer:
    """Keeps of every slot the feature that its last token came from."""

    def __init__(self, medusa: Medusa, worker: DrafterWorker) -> None:
        self._worker, self._medusa = worker, medusa
        num_slots, place = worker.limits.max_num_seqs, medusa.place
        self._length_at = np.zeros(num_slots, dtype=np.int32)  # of the sequence when the feature was new
        size = medusa.model.config.hidden_size
        self._features: Tensor = torch.zeros((num_slots, size), dtype=place.dtype, device=place.device)

    def hand_out(self, new: NewBlocks) -> None:
        """Nothing is kept by block."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Nothing is kept by block."""

    def begin(self, slot: int) -> None:
        self._length_at[slot] = 0

    def end(self, slot: int) -> None:
        """A new sequence overwrites all."""

    def forget(self) -> None:
        """Nothing outlives a sequence."""

    def observe(self, inputs: StepInputs, output: RunnerOutput) -> None:
        if output.features is None or not inputs.num_samples:
            return
        slots = inputs.sampled_slots
        last = output.token_counts - 1
        rows = inputs.sampling_tokens[last + (inputs.drafts.firsts if inputs.drafts else np.arange(len(slots)))]
        self._features[self._up(slots)] = output.features.index_select(0, self._up(rows))
        self._length_at[slots] = self._worker.history.lengths[slots]

    def propose(self, wanted: Wanted) -> Drafts | None:
        lengths = wanted.history.lengths[wanted.slots]
        can = self._length_at[wanted.slots] == lengths
        if not can.any():
            return None
        slots, lengths = wanted.slots[can], lengths[can]
        counts = np.minimum(wanted.counts[can], self._medusa.heads.num_heads)
        draws = Draws(self._worker.sampler, self._worker.config, slots, lengths, counts)
        features = self._features[self._up(slots)]
        for head in range(int(counts.max())):
            draws.draw(self._medusa.model.logits(self._medusa.heads(features, head)))
        return draws.drafts()

    def _up(self, array: object) -> Tensor:
        return upload(np.asarray(array), self._medusa.place.device)
