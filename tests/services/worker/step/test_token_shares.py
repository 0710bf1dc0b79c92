"""Partition of a step's tokens among ranks: every token has one owner, and ranks have equal work."""

from __future__ import annotations

import numpy as np
import pytest

from quire.services.worker.graphs.recordings import NoGraphs, Recordings
from quire.services.worker.layers.context import Context
from quire.services.worker.lora.no_adapters import NO_ADAPTERS
from quire.services.worker.runner.context_parallel import ContextParallel
from quire.services.worker.step.step_inputs import StepInputs
from quire.services.worker.step.token_shares import FEW, least_tokens, share_out

BLOCK = 4
WIDTH = 400  # blocks of a row


def step(starts: list[int], counts: list[int], num_groups: int = 1) -> StepInputs:
    """Builds rows with `starts` computed positions that compute `counts` more.

    The last token of each is sampled; rows of one token are fed with their last sampled one.
    """
    slots = np.arange(len(counts)) * 2
    query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]).astype(np.int32)
    places = np.repeat(slots, counts) * WIDTH * BLOCK + positions
    seq_lens = np.add(starts, counts).astype(np.int32)
    fed = np.flatnonzero(np.equal(counts, 1))
    return StepInputs(
        slots=slots,
        token_ids=np.arange(len(positions), dtype=np.int32),
        positions=positions,
        slot_mapping=np.concatenate([places + BLOCK * group for group in range(num_groups)]).astype(np.int32),
        query_start=query_start,
        seq_lens=seq_lens,
        num_blocks=WIDTH,
        prev_sampled_tokens=query_start[fed],
        prev_sampled_slots=slots[fed],
        sampling_slots=slots,
        sampling_tokens=query_start[1:] - 1,
        sample_positions=seq_lens,
        rows_changed=False,
    )


def random_step(draw: np.random.Generator, size: int) -> StepInputs:
    counts = draw.choice([1, 1, 3, 17, 90, 400], draw.integers(1, 40)).tolist()
    counts.append(max(least_tokens(size) - sum(counts), 2))
    return step(draw.integers(0, 500, len(counts)).tolist(), counts)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_token_has_one_owner_and_each_rank_has_about_as_many(size: int) -> None:
    draw = np.random.default_rng(size)
    for _ in range(40):
        inputs = random_step(draw, size)
        shares = share_out(inputs, size)
        assert shares is not None
        own = [shares.tokens(rank) for rank in range(size)]
        assert sorted(np.concatenate(own).tolist()) == list(range(inputs.num_tokens))
        counts = [len(tokens) for tokens in own]
        num_cut = sum(np.diff(inputs.query_start) > inputs.num_tokens // (FEW * size))
        assert min(counts) > 0
        # Each cut leaves two pieces that may be one token longer; uncut rows are small.
        assert max(counts) - min(counts) <= 2 * num_cut + inputs.num_tokens // (FEW * size)


@pytest.mark.parametrize("start", [0, 5000])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_long_row_costs_each_rank_as_much_attention(size: int, start: int) -> None:
    shares = share_out(step([start], [8192]), size)
    assert shares is not None
    seen = [int((shares.inputs.positions[shares.tokens(rank)] + 1).sum()) for rank in range(size)]
    assert max(seen) < 1.01 * min(seen)
    assert max(len(rows) for rows, _, _ in shares.pieces) == 2
    assert min(len(rows) for rows, _, _ in shares.pieces) == 1, "the pieces in the middle are one"


@pytest.mark.parametrize("size", [2, 3])
def test_shares_are_steps_and_outputs_keep_their_order(size: int) -> None:
    draw = np.random.default_rng(9)
    for _ in range(30):
        inputs = random_step(draw, size)
        shares = share_out(inputs, size)
        assert shares is not None
        tokens = draw.permutation(inputs.num_tokens)[: draw.integers(0, 30)].astype(np.int32)
        wanted = shares.wanted(tokens)
        made = np.full((size, wanted.own.shape[1]), -1)
        slot_of = np.repeat(inputs.slots, np.diff(inputs.query_start))
        for rank in range(size):
            own, mine = shares.share_of(rank, wanted), shares.tokens(rank)
            made[rank] = own.token_ids[own.sampling_tokens]  # token ids are indices in the step
            rows = np.repeat(np.arange(own.num_rows), np.diff(own.query_start))
            assert own.slots[rows].tolist() == slot_of[mine].tolist()
            for row in range(own.num_rows):
                first, end = own.query_start[row : row + 2]
                assert own.positions[first:end].tolist() == list(
                    range(own.seq_lens[row] - (end - first), own.seq_lens[row])
                )
            assert own.sampling_slots.tolist() == slot_of[made[rank]].tolist()
            assert own.sample_positions.tolist() == (inputs.positions[made[rank]] + 1).tolist()
            fed = np.isin(mine, inputs.prev_sampled_tokens)
            assert own.prev_sampled_tokens.tolist() == np.flatnonzero(fed).tolist()
            assert own.prev_sampled_slots.tolist() == slot_of[mine[fed]].tolist()
        assert made.ravel()[wanted.order].tolist() == tokens.tolist()


def test_ranks_know_the_slots_of_all_keys() -> None:
    inputs = step([8, 3, 0], [70, 1, 40], num_groups=2)
    shares = share_out(inputs, 2)
    assert shares is not None
    mappings = shares.slot_mappings(2)
    for group, mapping in enumerate(mappings):
        of_group = inputs.slot_mapping.reshape(2, -1)[group]
        for rank in range(2):
            own = shares.tokens(rank)
            assert mapping[rank, : len(own)].tolist() == of_group[own].tolist()
            assert not mapping[rank, len(own) :].any(), "what is behind them goes to the null block"


class Recorded(NoGraphs):
    """Graphs of steps with up to `most_tokens` tokens."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens


def recordings(most_tokens: int) -> Recordings:
    found = Recordings()
    found.use_chunks(Recorded(most_tokens))
    return found


def test_launch_bound_steps_are_not_divided() -> None:
    context = ContextParallel(Context(1, 2), NO_ADAPTERS)
    assert context.shares(step([0], [800]), recordings(400)) is None
    shares = context.shares(step([0], [801]), recordings(400))
    assert shares is not None
    assert shares.size == 2


def test_short_steps_and_decodes_are_not_divided() -> None:
    assert share_out(step([0], [least_tokens(2) - 1]), 2) is None
    assert share_out(step([9] * 100, [1] * 100), 2) is None
    assert share_out(step([0], [least_tokens(2)]), 2) is not None
