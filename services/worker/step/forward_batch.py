"""What a forward pass reads, on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from services.worker.attention.port import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of a step, one sequence after the other. Everything int32."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens] where keys and values go: block * block_size + offset
    attention: AttentionMetadata
    logit_tokens: Tensor | None  # [num_samples] tokens whose logits are wanted; None: all of them
    last: AttentionMetadata | None = None  # of just these, a row each: more the last layer need not compute
