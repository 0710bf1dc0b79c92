"""Prompts with media items: which cached prefixes they read, and where their chunks end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepPlan, StepResult
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.shared import columns
from quire.shared.kv import block_hash
from tests.services.scheduler.conftest import make_sequence

NewCore = Callable[..., Core]
PLACEHOLDER = 9


def name(letter: str) -> bytes:
    return letter.encode() * 32


def prompt(key: int, *parts: int | tuple[str, int], size: int = 64, **fields: object) -> Sequence:
    """A sequence whose prompt has text of so many tokens, or an item with a name and so many tokens."""
    tokens: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            tokens += [100 + len(tokens) + i for i in range(part)]
        else:
            letter, length = part
            items.append(MediaItem(name(letter), len(tokens), length, length, letter))
            tokens += [PLACEHOLDER] * length
    sequence = make_sequence(key, tokens, block_size=size, media=tuple(items), **fields)
    column = columns.i32_bytes(tokens)
    sequence.block_hashes[:] = block_hash.chain_with_media(sequence.root_hash, column, size, sequence.media)
    return sequence


def caching(core: NewCore, **fields: object) -> Core:
    values = {"encoder_capacity": 1000, "block_size": 64, "num_blocks": 50, "enable_prefix_caching": True}
    return core(**{**values, **fields})


def encode_all(core: Core) -> None:
    for order in core.encoder_outputs.take_orders():
        if order.item is not None:
            core.on_media_encoded(order.identifier)


def add(core: Core, *sequences: Sequence) -> None:
    for sequence in sequences:
        core.add(sequence)
        encode_all(core)


def step(core: Core, now: float = 0.0) -> StepPlan | None:
    """Plans and applies one step; every sampled token is 7."""
    plan = core.schedule(now)
    if plan is not None:
        keys = core.steps_in_flight[0].keys
        core.apply(StepResult(plan.step_id, np.full(len(keys), 7, dtype=np.int32)), now=now)
        encode_all(core)
    return plan


def finish(core: Core) -> None:
    while step(core) is not None:
        pass


def cached(core: Core, sequence: Sequence) -> int:
    """The number of tokens that a sequence reads from the cache."""
    before = core.counts.cached_tokens
    add(core, sequence)
    finish(core)
    return core.counts.cached_tokens - before


def test_a_part_of_a_block_is_not_read_past_another_picture(core: NewCore) -> None:
    """Placeholders are the same tokens for all pictures."""
    c = caching(core)
    assert cached(c, prompt(1, 20, ("a", 30), 5)) == 0
    assert cached(c, prompt(2, 20, ("b", 30), 5)) == 20
    assert cached(c, prompt(3, 20, ("a", 30), 5)) == 20
    assert cached(c, prompt(4, ("a", 30), 20)) == 0
    assert cached(c, prompt(5, ("b", 30), 20)) == 0
    text = prompt(6, 20, ("a", 30), 5)
    text.media = ()
    text.block_hashes[:] = block_hash.chain(text.root_hash, bytes(text.tokens), 64)
    assert cached(c, text) == 20, "the same tokens are text"


def test_whole_blocks_with_the_same_picture_are_read(core: NewCore) -> None:
    c = caching(core)
    assert cached(c, prompt(1, 20, ("a", 200), 20)) == 0
    assert cached(c, prompt(2, 20, ("a", 200), 10, ("b", 30))) == 230, "the text behind it as well"
    assert cached(c, prompt(3, 20, ("b", 200), 20)) == 20


def test_a_picture_that_began_before_is_part_of_the_hash_before(core: NewCore) -> None:
    c = caching(core)
    assert cached(c, prompt(1, 20, ("a", 80), 4)) == 0
    assert cached(c, prompt(2, 20, ("a", 80), 9)) == 104
    assert cached(c, prompt(3, 20, ("b", 80), 4)) == 20
