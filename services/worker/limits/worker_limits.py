"""Limits of a worker, from settings, model and device, before and after memory has been measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.services.worker.limits.kv_layout import ONE_GROUP, KVLayout
from quire.shared.errors import InvalidArgument
from quire.shared.settings import WorkerSettings
from quire.shared.worker_limits import MAX_BLOCKS


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Limits that apply where the settings say 0, by device."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


DEFAULTS = {
    "cpu": DeviceDefaults(block_size=16, max_num_seqs=128, max_num_batched_tokens=2048),
    "cuda": DeviceDefaults(block_size=64, max_num_seqs=512, max_num_batched_tokens=8192),
}


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Maximum load of a worker: slots, tokens per step and sequence, and KV blocks with their layout."""

    block_size: int  # token positions
    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # tokens in a step
    max_model_len: int  # tokens in a sequence
    num_blocks: int = 0  # including the null block; 0 before memory is measured
    layout: KVLayout = ONE_GROUP
    num_micro_batches: int = 1  # number of pipeline stages; slot s is in micro-batch s % num_micro_batches

    @property
    def num_groups(self) -> int:
        """KV groups; each has a block table of max_blocks_per_seq per slot."""
        return self.layout.num_groups

    @property
    def num_tokens(self) -> int:
        """Positions of one sequence that owns all blocks but the null block."""
        return self.layout.max_positions(self.num_blocks - 1, self.block_size)

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block table: blocks that max_model_len tokens fill in one group; 0 without KV."""
        return 0 if self.layout.has_no_kv else -(-self.max_model_len // self.block_size)

    @property
    def cross_width(self) -> int:
        """Width of the part of a block table for the output of an encoder; 0 without cross attention."""
        return self.layout.cross_blocks(self.block_size)

    @property
    def max_concurrency(self) -> float:
        """Number of sequences of max_model_len that fit at a time."""
        return (self.num_blocks - 1) / self.max_pages_per_seq

    @property
    def max_pages_per_seq(self) -> int:
        """Most pages that a sequence of max_model_len owns at any step."""
        blocks = self.max_blocks_per_seq
        in_windows = (min(blocks, -(-length // self.block_size) + 1) for _, length in self.layout.windows)
        growing = sum(in_windows) + (self.num_groups - len(self.layout.windows)) * blocks
        return growing + self.cross_width


def from_settings(settings: WorkerSettings, model_max_len: int, block_size: int = 0) -> WorkerLimits:
    """Returns the limits without num_blocks; 0 in the settings stands for the model's or device's default.
    `model_max_len`: longest sequence that the model's positions allow; `block_size`: default block size, 0: the
    device's. Raises InvalidArgument for contradictory limits."""
    defaults = DEFAULTS[settings.device]
    limits = WorkerLimits(
        block_size=settings.block_size or block_size or defaults.block_size,
        max_num_seqs=settings.max_num_seqs or defaults.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens or defaults.max_num_batched_tokens,
        max_model_len=settings.max_model_len or model_max_len,
    )
    if limits.max_model_len > model_max_len:
        raise InvalidArgument(
            f"max_model_len: {limits.max_model_len} is longer than the model's {model_max_len} positions",
            field="max_model_len",
        )
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise InvalidArgument(
            f"max_num_batched_tokens: {limits.max_num_batched_tokens} is less than max_num_seqs, "
            f"{limits.max_num_seqs}: every running sequence needs one token per step",
            field="max_num_batched_tokens",
        )
    return limits


def fit(limits: WorkerLimits, num_blocks: int, *, explicit: bool) -> WorkerLimits:
    """Returns the limits with `num_blocks`, at most MAX_BLOCKS; shortens max_model_len to what fits. Raises
    InvalidArgument if no sequence fits, or if max_model_len was set (`explicit`) and does not fit."""
    sized = replace(limits, num_blocks=min(num_blocks, MAX_BLOCKS))
    if sized.num_tokens < 1:
        raise InvalidArgument(
            f"num_blocks: {num_blocks} KV blocks hold no sequence (one is the null block): provide more memory",
            field="num_blocks",
        )
    if limits.max_model_len <= sized.num_tokens:
        return sized
    if explicit:
        raise InvalidArgument(
            f"max_model_len: {limits.max_model_len} tokens do not fit in the KV memory, which holds {sized.num_tokens} "
            f"({num_blocks} blocks of {limits.block_size}, one of them null)",
            field="max_model_len",
        )
    return replace(sized, max_model_len=sized.num_tokens)
