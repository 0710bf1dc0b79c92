"""Prompts with media items: which cached prefixes they read, and where their chunks end."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepPlan, StepResult
from quire.services.scheduler.core.sequences.media import MediaItem, item_around
from quire.services.scheduler.core.sequences.sequence import SampleGroup, Sequence
from quire.shared import columns
from quire.shared.kv import block_hash
from quire.shared.kv.kv_specs import FULL, ONE_FULL, Window
from tests.services.scheduler.conftest import UnlimitedForecast, make_sequence
from tests.services.scheduler.core.steps import tokens_of

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


# ---------------------------------------------------------------- items that are computed as a whole


def whole(core: NewCore, **fields: object) -> Core:
    values = {"encoder_capacity": 1000, "whole_media": True, "max_num_batched_tokens": 100, "max_model_len": 1000}
    return core(**{**values, **fields})


def chunks(core: Core, key: int = 1) -> list[int]:
    """Runs until a sequence's prompt is computed; returns the tokens of its chunks."""
    found = []
    while (plan := core.schedule(0)) is not None:
        counts = tokens_of(core, plan)
        keys = core.steps_in_flight[0].keys.tolist()
        core.apply(StepResult(plan.step_id, np.full(len(keys), 7, dtype=np.int32)), now=0)
        found.append(counts.get(key, 0))
        if key in keys:
            return found
    raise AssertionError("it was not computed")


def test_a_chunk_ends_where_a_picture_begins(core: NewCore) -> None:
    c = whole(core)
    add(c, prompt(1, 60, ("a", 80), 10))
    assert chunks(c) == [60, 90]


def test_pictures_that_fit_are_computed_with_the_text_around(core: NewCore) -> None:
    c = whole(core)
    add(c, prompt(1, 20, ("a", 30), ("b", 50), 30, ("c", 99), ("d", 1), ("a", 60)))
    assert chunks(c) == [100, 30, 100, 60]


def test_models_without_the_flag_cut_pictures_as_before(core: NewCore) -> None:
    c = whole(core, whole_media=False)
    add(c, prompt(1, 60, ("a", 80), 10))
    assert chunks(c) == [100, 50]


def test_short_limits_for_prompts_do_not_cut_a_picture(core: NewCore) -> None:
    """Both limits are for the sake of others' latency; the worker can compute more."""
    c = whole(core, long_prefill_token_threshold=16, longest_stream_gap_s=0.001)
    add(c, prompt(2, 5, max_tokens=500))
    step(c)
    add(c, prompt(1, 20, ("a", 80), 20))
    assert chunks(c) == [16, 4, 80, 16, 4]


def test_a_picture_waits_for_a_step_with_room_for_it(core: NewCore) -> None:
    c = whole(core)
    add(c, prompt(2, 30), prompt(1, ("a", 80), 5))
    assert chunks(c) == [0, 85]


def test_streams_leave_room_for_the_largest_picture(core: NewCore) -> None:
    c = whole(core, max_num_batched_tokens=92, max_num_seqs=12)
    add(c, *(prompt(key, 2, max_tokens=500) for key in range(10, 21)))
    step(c)
    add(c, prompt(1, 30, ("a", 80), 5))
    assert chunks(c) == [30, 81, 4]


def test_pictures_that_no_step_holds_are_refused(core: NewCore) -> None:
    c = whole(core)
    add(c, prompt(1, 3, ("a", 101)))
    (event,) = c.state.events.finished
    assert event.failure is not None
    assert "an item has 101 tokens, which the model computes in one step, and a step has 100" in event.failure.message
    few = whole(core, num_blocks=31, max_num_batched_tokens=50, kv_specs=(Window(16), FULL))
    add(few, prompt(1, 260, ("a", 40), size=16))
    (event,) = few.state.events.finished
    assert event.failure is not None
    assert "needs 38 KV blocks, and the worker has 30" in event.failure.message


def cut(core: NewCore, **fields: object) -> Core:
    return whole(core, enable_prefix_caching=True, max_num_batched_tokens=500, **fields)


def test_a_cached_prefix_ends_before_the_picture_that_it_would_cut(core: NewCore) -> None:
    c = cut(core)
    assert cached(c, prompt(1, 40, ("a", 40), size=16)) == 0  # all 5 blocks
    assert cached(c, prompt(2, 40, ("a", 70), size=16)) == 32, "blocks are cached up to 80, which is inside of it"
    assert cached(c, prompt(3, 40, ("a", 40), 9, size=16)) == 80
    assert cached(c, prompt(4, 40, ("a", 40), size=16)) == 79, "the last token alone sees what it saw"


def test_a_cut_may_reach_the_picture_before(core: NewCore) -> None:
    c = cut(core)
    assert cached(c, prompt(1, 20, ("a", 20), ("b", 40), size=16)) == 0
    assert cached(c, prompt(2, 20, ("a", 20), ("b", 60), size=16)) == 16, "32 is inside of a, 80 inside of b"


def test_a_part_of_a_block_reaches_up_to_the_picture(core: NewCore) -> None:
    c = cut(core, block_size=64, num_blocks=50)
    assert cached(c, prompt(1, 40, ("a", 100))) == 0
    assert cached(c, prompt(2, 40, ("a", 120))) == 40


def test_windows_and_samples_of_one_prompt(core: NewCore) -> None:
    c = cut(core, kv_specs=(Window(16), FULL), num_blocks=200)
    assert cached(c, prompt(1, 40, ("a", 40), 10, size=16)) == 0
    assert cached(c, prompt(2, 40, ("a", 70), 10, size=16)) <= 32
    group = SampleGroup()
    samples = [prompt(key, 40, ("b", 90), 10, size=16, sample_group=group) for key in (3, 4, 5)]
    add(c, *samples)
    finish(c)
    assert all(sequence.num_tokens == 140 + 16 for sequence in samples)


@pytest.mark.parametrize("seed", range(6))
def test_no_step_ends_inside_of_a_picture(core: NewCore, seed: int) -> None:
    """Random prompts with few blocks, so that sequences are preempted, in steps of which several are in flight."""
    rng = random.Random(seed)
    specs = rng.choice([ONE_FULL, (Window(32), FULL)])
    c = cut(core, num_blocks=36 * len(specs), max_steps_in_flight=2, max_num_seqs=6, kv_specs=specs)
    c.state.forecast = UnlimitedForecast()
    waiting = [prompt(key, *_parts(rng), size=16, max_tokens=rng.randrange(1, 90)) for key in range(1, 60)]
    ends: dict[int, int] = {}
    while waiting or c.state.sequences:
        if waiting and rng.random() < 0.5:
            add(c, waiting.pop())
        plan = c.schedule(0)
        if plan is not None:
            for slot in np.flatnonzero(c.running.live).tolist():
                sequence, end = c.running.sequence(slot), int(c.running.num_computed[slot])
                assert item_around(sequence.media, end) is None or end >= sequence.num_prompt_tokens - 1
                ends[sequence.key] = max(end, ends.get(sequence.key, 0))
        if c.steps_in_flight and (plan is None or rng.random() < 0.7):
            flight = c.steps_in_flight[0]
            c.apply(StepResult(flight.step_id, np.full(len(flight.keys), 7, dtype=np.int32)), now=0)
        encode_all(c)
    assert len(ends) == 59
    assert c.counts.preemptions > 0


def _parts(rng: random.Random) -> list[int | tuple[str, int]]:
    parts: list[int | tuple[str, int]] = []
    for _ in range(rng.randrange(1, 4)):
        parts += [rng.randrange(1, 50), (rng.choice("abc"), rng.choice([5, 40, 90]))]
    return [*parts, rng.randrange(1, 9)]
