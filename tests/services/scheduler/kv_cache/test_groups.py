"""KV groups: what each keeps, which prefixes they can serve together, and their cost."""

from __future__ import annotations

import numpy as np
import pytest

from quire.services.scheduler.kv_cache.groups import KVGroups
from quire.services.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from quire.shared import columns
from quire.shared.errors import FailedPrecondition
from quire.shared.kv import block_hash, kv_specs, kv_wire
from quire.shared.kv.kv_specs import FULL, NOTHING, ONE_FULL, Cross, KVGroup, KVSpec, Latent, State, Window
from quire.shared.pb.worker.v1 import worker_pb2 as pb

SIZE = 4
HASHES = block_hash.chain(block_hash.root_hash(), columns.i32_bytes(range(80)), SIZE)


def manager(*specs: KVSpec, num_blocks: int = 200) -> KVCacheManager:
    return KVCacheManager(num_blocks, KVGroups(specs, SIZE, 64), num_slots=4)


def fill(kv: KVCacheManager, slot: int, num_tokens: int) -> list[int]:
    kv.admit(slot, [])
    kv.grow(slot, num_tokens)
    kv.record_hashes(slot, HASHES[: num_tokens // SIZE])
    return list(kv.table(slot))


def test_a_prefix_is_as_long_as_every_group_can_serve() -> None:
    kv = manager(FULL, Window(6))
    table = fill(kv, 0, 40)
    kv.release(0, None)
    assert kv.match(HASHES).num_null == 8
    # Of ten positions the window needs the last two: 39 and the five before it.
    assert kv.match(HASHES).blocks == [*(b for i in range(8) for b in (table[2 * i], 0)), *table[16:20]]
    forget(kv, table[2 * 8 + 1])  # the window's block of position 8
    assert len(kv.match(HASHES).blocks) == 2 * 8, "it ends before the hole"
    forget(kv, table[2 * 5])  # the full group's block of position 5
    assert len(kv.match(HASHES).blocks) == 2 * 5, "and before a hole of the other group's"


def test_restart_points_survive_a_rebase() -> None:
    """After a beam's blocks are replaced, others may start at the same positions."""

    def filled(*ends: int, rebases: bool = False) -> list[tuple[int, bytes]]:
        kv = manager(FULL, Window(6))
        kv.track_filled()
        kv.admit(0, [])
        kv.set_restart_points(0, ends)
        if rebases:
            kv.rebase(0, [])
        kv.grow(0, 40)
        kv.record_hashes(0, HASHES[:10])
        return kv.take_filled()

    assert filled(5, rebases=True) == filled(5) != filled()


def forget(kv: KVCacheManager, block: int) -> None:
    """Evicts a block, as if it had been allocated and released."""
    kv.pool._free.remove(block)
    kv.pool._free.prepend(block)
    kv.pool.release(kv.pool.allocate(1))


def test_blocks_of_different_groups_are_distinguished() -> None:
    kv = manager(FULL, Window(8))
    kv.admit(0, [])
    kv.grow(0, 16)
    kv.record_hashes(0, HASHES[:4])
    first, second = kv.table(0)[::2], kv.table(0)[1::2]
    kv.release(0, None)
    found = kv.match(HASHES).blocks
    assert found[::2] == first
    assert found[1::2] == [0, 0, *second[2:]], "the last token is computed again: it sees positions 8 to 15"


def test_blocks_outside_the_window_are_free_and_still_cached() -> None:
    kv = manager(Window(6), num_blocks=20)
    fill(kv, 0, 40)
    table = list(kv.table(0))
    live = kv.num_hashed > 0
    kv.slide(kv.num_hashed * SIZE, live)
    assert kv.table(0) == [*[0] * 8, *table[8:]], "position 40 sees 35 and up"
    assert kv.use.used == 2
    assert kv.match(HASHES[:5]).blocks == [0, 0, 0, *table[3:5]], "no sequence has allocated them"
    kv.grow(1, 60)
    assert kv.match(HASHES[:5]).blocks == [], "now another sequence has"


@pytest.mark.parametrize("computed", range(1, 60))
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 100])
def test_a_window_keeps_exactly_the_visible_blocks(length: int, computed: int) -> None:
    (kept,) = KVGroups((Window(length),), SIZE, 64).retentions
    first_seen = max(0, computed - length + 1)
    assert kept.first_kept(computed) == first_seen // SIZE


def test_only_windows_have_bounded_cost() -> None:
    groups = KVGroups((FULL, Window(16), Window(16)), SIZE, 8)
    assert groups.cost(5) == 15
    bound = 4 + 3 + 2  # the window, a chunk that begins and ends within blocks, and what the window lies across
    assert groups.cost(1000) == 1000 + 2 * bound
    assert KVGroups(ONE_FULL, SIZE, 8).cost(1000) == 1000
    assert KVGroups((Window(16),), SIZE, 8).max_sequence_tokens(7, 10**6) == 10**6, "as long as you like"
    assert KVGroups((Window(16),), SIZE, 8).max_sequence_tokens(3, 10**6) == 12
    assert groups.max_sequence_tokens(100, 10**6) == (100 - 2 * 7) * SIZE


def test_layers_form_groups_by_spec_full_attention_first() -> None:
    gemma2 = kv_specs.form_groups([Window(8), FULL] * 3)
    assert [(g.spec, g.layers) for g in gemma2] == [(FULL, (1, 3, 5)), (Window(8), (0, 2, 4))]
    gemma3 = kv_specs.form_groups([FULL if i % 6 == 5 else Window(512) for i in range(26)])
    assert [(g.spec, len(g.layers)) for g in gemma3] == [(FULL, 4), *[(Window(512), 4)] * 5, (Window(512), 2)]
    assert [g.layers for g in kv_specs.form_groups([FULL] * 3)] == [(0, 1, 2)]
    assert len(kv_specs.form_groups([FULL] * 27 + [Window(4)])) == 10


def test_a_layer_with_two_specs_is_in_two_groups() -> None:
    both = kv_specs.form_groups([(FULL, State(8))] * 3)
    assert [(g.spec, g.layers) for g in both] == [(FULL, (0, 1, 2)), (State(8), (0, 1, 2))]
    some = kv_specs.form_groups([State(8), (FULL, State(8)), (FULL, State(8)), FULL])
    assert [(g.spec, g.layers) for g in some] == [(FULL, (1, 2, 3)), (State(8), (0, 1, 2))]
    fewer = kv_specs.form_groups([(State(8), FULL), FULL] * 2)
    assert [(g.spec, g.layers) for g in fewer] == [(FULL, (0, 1)), (FULL, (2, 3)), (State(8), (0, 2))]


def test_groups_survive_the_wire_and_a_full_group_takes_no_bytes() -> None:
    specs: list[KVSpec] = [FULL, Window(7), Latent(512, 64)]
    wire = kv_wire.to_proto(kv_specs.form_groups(specs))
    assert set(kv_wire.from_proto(wire, "w")) == set(specs)
    assert kv_wire.to_proto(kv_specs.form_groups([FULL] * 4)) == []
    assert kv_wire.from_proto([], "w") == ONE_FULL


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (pb.KVGroup(window=pb.KVWindow(length=0)), r"kv_groups\[0\].window.length: w has 0"),
        (pb.KVGroup(latent=pb.KVLatent(rank=8)), r"kv_groups\[0\].latent.rope: w has 0, it must be 1 to 65536"),
        (pb.KVGroup(state=pb.KVState()), r"kv_groups\[0\].state.num_bytes: w has 0"),
        (pb.KVGroup(), r"kv_groups\[0\]: w has no spec that this scheduler knows"),
    ],
)
def test_invalid_groups_are_refused_by_name(group: pb.KVGroup, said: str) -> None:
    with pytest.raises(FailedPrecondition, match=said):
        kv_wire.from_proto([group], "w")


def test_a_state_group_survives_the_wire() -> None:
    wire = kv_wire.to_proto(kv_specs.form_groups([State(1024), FULL]))
    assert kv_wire.from_proto(wire, "w") == (FULL, State(1024))


def test_a_prefix_with_states_ends_where_one_was_saved() -> None:
    kv = manager(FULL, State(8))
    table = fill(kv, 0, 40)
    kv.release(0, None)
    assert kv.match(HASHES).blocks == [*(b for i in range(9) for b in (table[2 * i], 0)), *table[18:20]]
    forget(kv, table[2 * 9 + 1])
    forget(kv, table[2 * 8 + 1])
    assert len(kv.match(HASHES).blocks) == 2 * 8, "the state after the eighth block is the last one"
    forget(kv, table[2 * 3 + 1])
    assert len(kv.match(HASHES).blocks) == 2 * 8, "of states no other is needed"


def test_a_state_is_kept_until_its_hash_is_known() -> None:
    kv = manager(State(8))
    kv.admit(0, [])
    kv.grow(0, 12)
    table, computed = list(kv.table(0)), np.array([9, 0, 0, 0])
    kv.slide(computed, computed > 0)
    assert kv.table(0) == table, "steps in flight have computed more tokens than are known"
    kv.record_hashes(0, HASHES[:2])
    kv.slide(computed, computed > 0)
    assert kv.table(0) == [0, 0, table[2]]
    assert kv.match(HASHES[:2]).blocks == [0, table[1]], "no sequence has allocated it"


def test_layers_without_kv_cost_nothing() -> None:
    wire = kv_wire.to_proto(kv_specs.form_groups([NOTHING] * 3))
    assert kv_wire.from_proto(wire, "w") == (NOTHING,)
    groups = KVGroups((NOTHING,), 16, 100)
    assert (groups.keep_nothing, groups.plain, groups.cost(7), groups.max_sequence_tokens(1, 512)) == (
        True,
        False,
        0,
        512,
    )
    with pytest.raises(FailedPrecondition, match="layers without KV in addition to others"):
        kv_wire.from_proto([*wire, pb.KVGroup(full=pb.KVFull(), num_layers=1)], "w")


def test_the_output_of_an_encoder_is_a_group_of_its_own() -> None:
    groups = kv_specs.form_groups([(Cross(1500), FULL)] * 4)
    assert [(group.spec, group.layers) for group in groups] == [(FULL, (0, 1, 2, 3)), (Cross(1500), (0, 1, 2, 3))]
    assert kv_wire.from_proto(kv_wire.to_proto(groups), "w") == (FULL, Cross(1500))
    planned = KVGroups((FULL, Cross(10)), SIZE, 8)
    assert (planned.num, planned.plain, planned.cost(7), planned.cross_cost(9)) == (1, True, 7, -(-9 // SIZE))
    pages = 20 + planned.cross_cost(10)
    assert planned.max_sequence_tokens(pages, 10**6) == 20 * SIZE, "the longest output has its pages"


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ((Cross(5),), "cross group that is not the last"),
        ((Cross(5), FULL), "cross group that is not the last"),
        ((FULL, Cross(5), Cross(5)), "cross group that is not the last"),
        ((FULL, Cross(0)), r"kv_groups\[1\].cross.length: w has 0, it must be 1 to"),
        ((FULL, Cross(2**30)), r"kv_groups\[1\].cross.length: w has 1073741824, it must be 1 to"),
    ],
)
def test_groups_of_encoder_outputs_are_checked(specs: tuple[KVSpec, ...], text: str) -> None:
    wire = kv_wire.to_proto([KVGroup(spec, (0,)) for spec in specs])
    with pytest.raises(FailedPrecondition, match=text):
        kv_wire.from_proto(wire, "w")


def test_blocks_of_an_item_are_shared_and_stay_cached() -> None:
    kv = manager(FULL, Cross(12), num_blocks=12)
    cross, (one, two) = kv.cross, (b"1" * 32, b"2" * 32)
    assert cross is not None
    assert cross.admit(0, one, 9)
    assert not cross.admit(1, one, 9), "they are written already"
    assert cross.table(0) == cross.table(1)
    assert (cross.num_missing(one, 9), cross.num_missing(two, 9)) == (0, 3)
    kv.release(0, None)
    assert kv.use.used == 3
    kv.release(1, 5)
    assert kv.use.used == 3, "a step in flight still reads them"
    kv.pass_fence(5)
    assert (kv.use.used, kv.use.cached, cross.num_missing(one, 9)) == (0, 3, 3)
    assert cross.is_cached(one, 9)
    kv.admit(0, [])
    kv.grow(0, 9 * SIZE)  # takes one of the cached blocks
    assert not cross.is_cached(one, 9)
    assert cross.num_missing(one, 9) == 3
    kv.release(0, None)
    assert cross.admit(2, one, 9), "a part of an output is worth nothing"
    assert cross.num_references == 3


def test_a_beam_that_moves_keeps_the_output_of_its_encoder() -> None:
    kv = manager(FULL, Cross(12), num_blocks=30)
    assert kv.cross is not None
    for slot in (0, 1):
        kv.cross.admit(slot, b"1" * 32, 5)
        kv.admit(slot, [])
        kv.grow(slot, 2 * SIZE)
    kv.rebase(1, list(kv.table(0))[:1])
    assert kv.cross.table(0) == kv.cross.table(1)
    assert kv.num_unowned() == 0
    for slot in (0, 1):
        kv.release(slot, None)
    assert kv.idle
