"""Limits of a core: the worker's sizes and the operator's settings, fixed when the worker attaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.services.scheduler.core.policies import DEFAULTS, PolicyMaker, PolicyOptions
from quire.services.scheduler.core.policies.fcfs import Fcfs
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.kv_cache.groups import KVGroups
from quire.shared.kv.kv_specs import NOTHING, ONE_FULL, KVSpec, cross_length, without_cross


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Sizes and policies of the KV tiers below a worker's device."""

    num_host_blocks: int = 0
    num_disk_blocks: int = 0  # requires host blocks
    policy: str = "lru"  # a key of eviction.POLICIES
    store_threshold: int = 0  # number of prompts that must contain a block before it is stored


NO_TIERS = TierLimits()


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Sizes in tokens, blocks and sequences, as the names say."""

    num_blocks: int  # null block included
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0  # maximum tokens of one prompt in a step while others run; 0: no limit
    longest_stream_gap_s: float = 0.0  # maximum duration of steps with prompts while others stream; 0: no limit
    watermark_blocks: int = 0  # blocks left free at admission while others run
    max_steps_in_flight: int = 2  # 0: adapted to the step time
    num_micro_batches: int = 1  # pipeline stages of the worker; slot s belongs to micro-batch s % num_micro_batches
    drafts_constrained_only: bool = False  # the worker drafts only for sequences under a grammar
    num_speculative_tokens: int = 0  # maximum drafts of the worker per sequence and step; 0: it does not draft
    fixed_draft_length: bool = False  # always draft as much as the budget allows
    enable_prefix_caching: bool = True
    prefix_grain: int = (
        16  # minimum cached tokens of a partial block that are worth a copy; 0: only whole blocks are reused
    )
    policy: PolicyMaker = Fcfs
    policy_options: PolicyOptions = DEFAULTS
    kv_specs: tuple[KVSpec, ...] = ONE_FULL  # of the KV groups
    tiers: TierLimits = NO_TIERS  # tiers below the worker's device
    num_query_vectors: int = 0  # query vectors that the worker caches for documents; 0: no late interaction
    encoder_capacity: int = 0  # embeddings of media items that the worker keeps; 0: it takes no media
    whole_media: bool = False  # no step and no cached prefix ends inside of a media item
    # Derived once: every filled block and every admission reads them, and specs compare field by field.
    whole_prompts: bool = field(init=False)  # no KV is kept: a prompt is computed in one step and not extended
    caches_prefixes: bool = field(init=False)
    cross_length: int = field(init=False)  # most rows of an encoder's output that a sequence attends to; 0: none
    num_growing_groups: int = field(init=False)  # KV groups whose blocks grow with the sequence

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole_prompts", self.kv_specs == (NOTHING,))
        object.__setattr__(self, "caches_prefixes", self.enable_prefix_caching and not self.whole_prompts)
        object.__setattr__(self, "cross_length", cross_length(self.kv_specs))
        object.__setattr__(self, "num_growing_groups", len(without_cross(self.kv_specs)))

    @property
    def groups(self) -> KVGroups:
        """A new KVGroups object; callers keep it."""
        return KVGroups(self.kv_specs, self.block_size, self.max_num_batched_tokens)

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - 1

    def refusal(self, num_tokens: int, width: int = 1, *, samples: bool = True) -> str | None:
        """Returns why a sequence of `num_tokens`, or a search with `width` beams, can never run here; None if it can.
        `samples`: it needs room for at least one more token."""
        if width > self.max_num_seqs:
            return f"beam_search.width: {width} beams are more than the {self.max_num_seqs} slots of the worker"
        if num_tokens > self.max_model_len and not samples:
            return f"The prompt (length {num_tokens}) is longer than the maximum model length of {self.max_model_len}."
        if num_tokens >= self.max_model_len and samples:
            return (
                f"The decoder prompt (length {num_tokens}) plus the number of requested output tokens (at least 1) is "
                f"longer than the maximum model length of {self.max_model_len}."
            )
        if self.whole_prompts:
            return self._refusal_of_whole(num_tokens, samples=samples)
        num_blocks = -(-num_tokens // self.block_size)
        usable = self.usable_blocks - -(-self.cross_length // self.block_size)
        most = num_blocks * self.num_growing_groups
        if most > usable and self.groups.least_cost(num_blocks) > usable:
            return f"A prompt of {num_tokens} tokens does not fit in the worker's {usable} KV blocks."
        return None

    def refusal_of_media(self, items: Sequence[MediaItem], num_tokens: int) -> str | None:
        """Returns why the media items of a prompt of `num_tokens` can never be encoded or computed here together; None
        if they can."""
        if not self.encoder_capacity:
            return (
                "media: the worker takes no pictures: its model has no encoder, or its options (language_model_only, "
                "pipeline_parallel_size, context_parallel_size) leave the encoder out. Send text alone."
            )
        if self.cross_length:
            return self._refusal_of_attended(items)
        total = sum({item.identifier: item.num_embeddings for item in items}.values())
        if total > self.encoder_capacity:
            return (
                f"media: the items of the prompt have {total} embeddings together; the worker keeps "
                f"{self.encoder_capacity} at a time. Send fewer or smaller ones."
            )
        return self._refusal_of_whole_media(items, num_tokens) if self.whole_media else None

    def _refusal_of_attended(self, items: Sequence[MediaItem]) -> str | None:
        """Returns why the decoder of an encoder-decoder model cannot attend to these items; None if it can."""
        if len(items) != 1:
            return (
                f"media: the prompt has {len(items)} items, and this model's decoder attends to exactly one. Send one "
                "sound with each prompt."
            )
        rows = items[0].num_embeddings
        if (items[0].offset, items[0].length) != (0, 1) or not 1 <= rows <= min(
            self.cross_length, self.encoder_capacity
        ):
            return (
                f"media: the item has {rows} embeddings at {items[0].offset}, length {items[0].length}; this model's "
                f"decoder attends to at most {min(self.cross_length, self.encoder_capacity)}, at 0, length 1."
            )
        return None

    def _refusal_of_whole_media(self, items: Sequence[MediaItem], num_tokens: int) -> str | None:
        """Returns why items that are computed within one step each can never be; None if they can."""
        longest = max(item.length for item in items)
        if longest > self.max_num_batched_tokens:
            return (
                f"media: an item has {longest} tokens, which the model computes in one step, and a step has "
                f"{self.max_num_batched_tokens}. Raise max_num_batched_tokens, or send a smaller one."
            )
        num_blocks = -(-num_tokens // self.block_size) * len(self.kv_specs)
        if num_blocks > self.usable_blocks:
            return (
                f"media: a prompt of {num_tokens} tokens with items that are computed in one step needs {num_blocks} "
                f"KV blocks, and the worker has {self.usable_blocks}."
            )
        return None

    def refusal_of_query(self, num_tokens: int) -> str | None:
        """Returns why a late-interaction query of `num_tokens` can never be computed here; None if it can."""
        if not self.num_query_vectors:
            return "late_query: the worker's model does not support late interaction"
        if num_tokens > self.num_query_vectors:
            return (
                f"late_query: the query (length {num_tokens}) exceeds the worker's query cache of "
                f"{self.num_query_vectors} vectors; send a shorter query, or raise the worker's query_cache_mb"
            )
        return self.refusal(num_tokens, samples=False)

    def _refusal_of_whole(self, num_tokens: int, *, samples: bool) -> str | None:
        """Returns why an encoder, which computes each prompt within one step, can never compute this sequence; None
        if it can. `samples`: it would generate tokens."""
        if samples:
            return "The model is an encoder and generates no text."
        if num_tokens > self.max_num_batched_tokens:
            most = self.max_num_batched_tokens
            return (
                f"The prompt (length {num_tokens}) exceeds the token budget of a step, {most}, in which an "
                "encoder computes a whole prompt."
            )
        return None
