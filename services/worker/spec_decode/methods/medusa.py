"""medusa: heads that look further ahead from the model's last feature, all at once (arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from services.worker.device.staging import upload
from services.worker.layers.embedding import OutputHead
from services.worker.layers.placement import Alternative, Destination, Placement
from services.worker.models.causal_lm import CausalLM
from services.worker.models.config_file import ConfigFile
from services.worker.models.decoder_config import DecoderConfig
from services.worker.runner.output import RunnerOutput
from services.worker.spec_decode.config import MOST_TOKENS, SpeculativeConfig
from services.worker.spec_decode.draft_models.draws import Draws
from services.worker.spec_decode.drafter import DrafterWorker, Target
from services.worker.spec_decode.drafts import Drafts
from services.worker.spec_decode.proposer import Wanted
from services.worker.step.block_copies import BlockCopies
from services.worker.step.slots import NewBlocks
from services.worker.step.step_inputs import StepInputs
from shared.errors import InvalidArgument
from shared.model_identity import read_config


class MedusaHeads:
    """Head k turns the feature of position i into one that means the token of position i + 2 + k; k from 0.

    Tensors are named as the authors publish them: of head N, N.0.linear, N.1.linear, ... are residual blocks, and the
    last number is its output embedding. Heads that have none share the model's.
    """

    passed_over = ()
    alternatives: ClassVar[dict[str, Alternative]] = {}

    def __init__(self, num_heads: int, num_blocks: int, target: DecoderConfig, place: Placement, *, own: bool) -> None:
        """`own`: each head has an output embedding of its own."""
        self.num_heads, self._num_blocks, size = num_heads, num_blocks, target.hidden_size
        place = replace(place, checkpoint=None)
        self._weights: Tensor = place.empty(num_heads, num_blocks, size, size)
        self._biases: Tensor = place.empty(num_heads, num_blocks, size)
        self._outputs = [
            OutputHead(target.vocab_size, size, place, f"{head}.{num_blocks}")
            for head in range(num_heads if own else 0)
        ]
        self._ops = place.ops
        self._packed: list[list[Any]] = []

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for head in range(self.num_heads):
            for block in range(self._num_blocks):
                yield f"{head}.{block}.linear.weight", self._weights[head, block]
                yield f"{head}.{block}.linear.bias", self._biases[head, block]
        for output in self._outputs:
            yield from output.destinations()

    def finish(self) -> None:
        self._packed = [
            [self._ops.prepare_linear(w.contiguous(), b.contiguous()) for w, b in zip(weights, biases, strict=True)]
            for weights, biases in zip(self._weights, self._biases, strict=True)
        ]
        for output in self._outputs:
            output.finish()

    def logits(self, model: CausalLM, features: Tensor, head: int) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]"""
        for block in self._packed[head]:
            features = features + torch.nn.functional.silu(self._ops.linear(features, block))
        return self._outputs[head](features) if self._outputs else model.logits(features)


class Medusa:
    """The weights. No KV: the last feature is all that the heads look at."""

    block_bytes = 0
    needs_features = True
    needs_prompts = False

    def __init__(self, settings: SpeculativeConfig, target: Target) -> None:
        folder = Path(settings.model).expanduser()
        config = ConfigFile(read_config(folder))
        self.model, self.place = target.model, target.place
        size, blocks = self.model.config.hidden_size, config.integer("medusa_num_layers", 1)
        for name, value in (("medusa_num_layers", blocks), ("medusa_num_heads", config.integer("medusa_num_heads"))):
            if not 1 <= value <= MOST_TOKENS:
                raise _refused(f"{name} is {value}; there are 1 to {MOST_TOKENS}")
        if config.integer("hidden_size", size) != size:
            raise _refused(f"the heads' hidden_size is {config.integer('hidden_size')}, the model's {size}")
        names = target.loader.names(folder)
        found = {int(name.split(".")[0]) for name in names if name.split(".")[0].isdecimal()}
        if max(found, default=0) >= MOST_TOKENS:
            raise _refused(f"a tensor of head {max(found)}; there are at most {MOST_TOKENS} heads")
        num_heads = max(config.integer("medusa_num_heads"), 1 + max(found, default=0))  # published ones say too few
        own = any(f"{head}.{blocks}.weight" in names for head in range(num_heads))
        self.heads = MedusaHeads(num_heads, blocks, self.model.config, self.place, own=own)
        target.loader.load(self.heads, folder)

    def start(self, worker: DrafterWorker) -> MedusaProposer:
        return MedusaProposer(self, worker)


def _refused(reason: str) -> InvalidArgument:
    return InvalidArgument(f"speculative_config.model: {reason}", field="speculative_config")


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
            draws.draw(self._medusa.heads.logits(self._medusa.model, features, head))
        return draws.drafts()

    def _up(self, array: object) -> Tensor:
        return upload(np.asarray(array), self._medusa.place.device)
