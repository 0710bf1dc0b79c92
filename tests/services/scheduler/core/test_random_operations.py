"""Thousands of random operations on a core with a reference worker: nothing leaks, nothing is shared wrongly, and every
sequence has the text of an oracle without blocks."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from quire.services.scheduler.core.beam.beams import TOO_FEW_BLOCKS
from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.limits import NO_TIERS, CoreLimits, TierLimits
from quire.services.scheduler.core.plan import Events, SequenceFinished, StepResult
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import SampleGroup, Sequence
from quire.services.scheduler.core.transfers.orders import DiskOrder, TransferOrder
from quire.services.scheduler.sessions.scheduling_policies import find_policy
from quire.shared.kv import block_hash
from quire.shared.kv.kv_specs import FULL, ONE_FULL, Cross, KVSpec, Latent, State, Window
from tests.services.scheduler.conftest import UnlimitedForecast, make_limits, make_sequence
from tests.services.scheduler.core.beam.test_beams import exhaustive, search
from tests.services.scheduler.reference_worker import EOS, ReferenceWorker, digest, oracle


@dataclass
class Client:
    """Expectations of the owner of one sequence."""

    prompt: list[int]
    limit: int
    eos: bool
    asks_from: int = 0  # log-probabilities of the prompt
    tokens: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)  # positions
    end: SequenceFinished | None = None
    found: list[int] | None = None  # by a beam search
    root: Sequence | None = None
    pools: bool = False  # wants a vector and no tokens
    vector: bytes = b""


class Cluster:
    """A core and a worker, with results that stay in flight for as long as the test likes."""

    def __init__(self, limits: CoreLimits, seed: int) -> None:
        self.random = random.Random(seed)
        self.limits = limits
        self.core = Core(limits)
        if seed % 2:
            self.core.state.forecast = UnlimitedForecast()  # blocks run out all the time
        self.worker = ReferenceWorker(limits, seed)
        self.clients: dict[int, Client] = {}
        self.results: deque[StepResult] = deque()
        self.transfers: deque[TransferOrder] = deque()
        self.on_disk: list[DiskOrder] = []
        self.to_encode: deque[bytes] = deque()
        self._sound_of_group: dict[SampleGroup, int] = {}
        self.now = 0.0
        self.num_copies = 0
        self._conversations = limits.tiers.num_host_blocks > 0 and not limits.groups.plain
        self._shared = [[self.random.randrange(40) for _ in range(60)] for _ in range(3)]

    def _with_sound(self, sequence: Sequence) -> Sequence:
        """Returns the sequence with the item that its decoder attends to, if the model is an encoder-decoder."""
        if self.limits.cross_length:
            number = self.random.randrange(4)
            if sequence.sample_group is not None:
                number = self._sound_of_group.setdefault(sequence.sample_group, number)
            item = MediaItem(bytes([number]) * 32, 0, 1, min(3 + 4 * number, self.limits.cross_length), number)
            sequence.media = (item,)
            hashes = block_hash.chain_with_media(
                sequence.root_hash, bytes(sequence.tokens), self.limits.block_size, sequence.media
            )
            sequence.block_hashes[:] = hashes
        return sequence

    def encode(self) -> bool:
        """Executes the orders to release rows; ends the oldest order to encode an item at any time."""
        for order in self.core.encoder_outputs.take_orders():
            if order.item is None:
                self.worker.rows.discard(order.identifier)
            else:
                self.to_encode.append(order.identifier)
        if not self.to_encode:
            return False
        identifier = self.to_encode.popleft()
        self.worker.rows.add(identifier)
        self.core.on_media_encoded(identifier)
        return True

    def add(self) -> None:
        head = self.random.choice(self._shared)[: self.random.randrange(60)]
        prompt = head + [self.random.randrange(40) for _ in range(self.random.randrange(1, 30))]
        if self._conversations and self.clients and self.random.random() < 0.5:
            prompt = self._continue() or prompt
        if self.random.random() < 0.08:
            self._add_search(prompt)
            return
        if self.random.random() < 0.1:
            self._add_pooled(prompt)
            return
        size = self.random.choice([1, 1, 1, 2, 5])
        sample_group = SampleGroup() if size > 1 else None
        for _ in range(size):
            self._add(prompt, sample_group)

    def _continue(self) -> list[int]:
        """Returns a prompt that continues a finished sequence or another prompt; none if that is too long."""
        client = self.clients[self.random.randrange(len(self.clients))]
        said = client.tokens if self.random.random() < 0.5 else []
        prompt = [*client.prompt, *said, *(self.random.randrange(40) for _ in range(self.random.randrange(9)))]
        return prompt if len(prompt) < 90 else []

    def _add_search(self, prompt: list[int]) -> None:
        key, width = len(self.clients), self.random.randrange(1, min(5, self.limits.max_num_seqs))
        room = self.limits.max_model_len - len(prompt)
        root = search(key, prompt, width, max_tokens=min(room, self.random.randrange(1, 20)), arrival=self.now)
        assert root.search is not None
        found = exhaustive(prompt, root.search.rules)
        for output, (said, _, _) in zip(root.outputs, found, strict=True):
            self.clients[output.sequence_id] = Client(prompt, 0, True, found=said, root=root)
        self.core.add(self._with_sound(root))

    def _add_pooled(self, prompt: list[int]) -> None:
        key = len(self.clients)
        self.clients[key] = Client(prompt, len(prompt), False, pools=True)
        alone = self.random.random() < 0.5  # as those that read every token
        fields = {"samples_nothing": True, "skip_reading_prefix_cache": alone, "arrival": self.now}
        self.core.add(self._with_sound(make_sequence(key, prompt, 0, self.limits.block_size, **fields)))

    def _add(self, prompt: list[int], sample_group: SampleGroup | None) -> None:
        key = len(self.clients)
        eos, max_tokens = self.random.random() < 0.5, self.random.randrange(1, 40)
        sequence = make_sequence(
            key,
            prompt,
            max_tokens,
            self.limits.block_size,
            eos_token_ids=(EOS,) if eos else (),
            tenant=self.random.choice("abc"),
            priority=self.random.randrange(3),
            arrival=self.now,
            sample_group=sample_group,
            prompt_logprobs_from=self.random.randrange(1, 40) if self.random.random() < 0.3 else 0,
        )
        limit = min(len(prompt) + max_tokens, self.limits.max_model_len)
        self.clients[key] = Client(prompt, limit, eos, sequence.prompt_logprobs_from)
        self.core.add(self._with_sound(sequence))

    def cancel(self) -> None:
        alive = [key for key, client in self.clients.items() if client.end is None]
        if alive:
            key = self.random.choice(alive)
            root = self.clients[key].root
            self.core.cancel(key if root is None else root.key)

    def preempt(self) -> None:
        slots = np.flatnonzero(self.core.running.live).tolist()
        if slots:
            self.core.preempt(self.random.choice(slots))

    def plan(self) -> bool:
        self.now += 1
        plan = self.core.schedule(self.now)
        if plan is not None:
            self.num_copies += len(plan.copies)
            self.results.append(self.worker.execute(plan))
        return plan is not None

    def result(self) -> bool:
        if not self.results:
            return False
        self.core.apply(self.results.popleft(), self.now)
        return True

    def transfer(self) -> bool:
        """Ends the oldest transfer, perhaps with a failure: at any time after it was ordered, but in order."""
        for order in self.core.host_blocks.take_orders() if self.core.host_blocks is not None else ():
            if isinstance(order, DiskOrder):
                self.on_disk.append(order)
            else:
                self.transfers.append(order)
        if self.on_disk and (not self.transfers or self.random.random() < 0.5):
            self._disk_transfer(self.on_disk.pop(self.random.randrange(len(self.on_disk))))
            return True
        if not self.transfers:
            return False
        order = self.transfers.popleft()
        failed = self.random.random() < 0.1
        if not failed:
            self.worker.transfer(order)
        self.core.on_transfer_done(order.transfer_id, failed=failed)
        return True

    def _disk_transfer(self, order: DiskOrder) -> None:
        """Ends disk transfers in any order; now and then a block is torn, or the whole transfer fails."""
        if self.random.random() < 0.05:
            self.core.on_transfer_done(order.transfer_id, failed=True)
            return
        failing = {number for number in range(len(order.hashes)) if self.random.random() < 0.05}
        lost = self.worker.disk_transfer(order, failing)
        assert lost == failing, "what is on record as on disk is there"
        self.core.on_transfer_done(order.transfer_id, lost=lost)

    def collect(self) -> None:
        events: Events = self.core.take_events()
        for part in events.prompts:
            client = self.clients[part.sequence.sequence_id]
            assert client.end is None
            client.told += part.entries.ranks.tolist()
            assert [client.prompt[i] for i in part.entries.ranks] == part.entries.token_ids.tolist()
        for pooled in events.pooled:
            client = self.clients[pooled.sequence.sequence_id]
            assert client.pools
            assert not client.vector, "one vector"
            assert client.end is None
            client.vector = pooled.values
        for columns in events.tokens:
            assert len(set(columns.sequence_ids.tolist())) == len(columns.sequence_ids), "one row a sequence"
            counts = columns.token_counts
            streams = columns.sequence_ids if counts is None else np.repeat(columns.sequence_ids, counts)
            for stream, token in zip(streams.tolist(), columns.token_ids.tolist(), strict=True):
                assert self.clients[stream].end is None
                self.clients[stream].tokens.append(token)
        for finished in events.finished:
            client = self.clients[finished.sequence.sequence_id]
            assert client.end is None, "one terminal event"
            client.end = finished

    def check(self) -> None:
        core, use = self.core, self.core.use
        assert use.free + use.cached + use.used == use.total == self.limits.num_blocks - 1
        tables = [core.kv.table(slot) for slot in range(self.limits.max_num_seqs)]
        owners = Counter(block for table in tables for block in table)
        self._check_windows(tables)
        assert (0 not in owners) or core.kv.groups.has_windows, "the null block has no owner"
        del owners[0]
        assert all(core.kv.pool.references(block) >= count for block, count in owners.items())
        assert not set(core.kv.pool.free_order) & set(owners), "free and owned are disjoint"
        for block, count in owners.items():
            if count > 1 and not core.kv.pool.hash_of(block):
                owning = [s for s in core.running.sequences if s is not None and block in core.kv.table(s.slot)]
                kin = {core.state.searches.root_of(s.key) or s.sample_group for s in owning}
                assert len(kin) == 1, "only named blocks are shared, or among siblings and beams"
        assert core.kv.num_unowned() == 0
        parked = core.siblings.blocked()
        assert len(parked) == core.siblings.num_blocked
        parked += core.encoder_outputs.blocked()
        core.encoder_outputs.check_invariant()
        if core.host_blocks is not None:
            tier = core.host_blocks.tier
            tiers = [tier] if core.host_blocks.disk is None else [tier, core.host_blocks.disk.tier]
            for tier in tiers:
                assert tier.num_free + tier.num_storing + tier.num_held == tier.num_places
            parked += core.host_blocks.blocked()
        assert core.num_waiting == len(core.waiting) + len(parked)
        waiting = {sequence.key for sequence in [*core.waiting, *parked]}
        tokens_waiting = sum(sequence.num_queued_tokens for sequence in [*core.waiting, *parked])
        assert core.num_waiting_tokens == tokens_waiting
        slots = [s for s in core.running.sequences if s is not None]
        running = {(core.state.searches.root_of(s.key) or s).key for s in slots}
        assert not waiting & running
        alive = {key: client for key, client in self.clients.items() if client.end is None}
        assert waiting | running == {key if c.root is None else c.root.key for key, c in alive.items()}

    def _check_windows(self, tables: list[list[int]]) -> None:
        """Checks that blocks are missing only at the beginning of a table, and only those that no later step reads."""
        running, size = self.core.running, self.limits.block_size
        for window, groups in self.core.kv.groups.windows.items():
            for slot, group in itertools.product(np.flatnonzero(running.live).tolist(), groups):
                table = tables[slot][group :: self.core.kv.num_groups]
                held = len(table) - table.count(0)
                assert 0 not in table[table.count(0) :]
                ahead = self.limits.max_steps_in_flight * (1 + self.limits.num_speculative_tokens)
                most = -(-(window.length + self.limits.max_num_batched_tokens + ahead) // size) + 2
                assert held <= most, "as many as the window and the steps in flight need"

    def drain(self) -> None:
        for _ in range(100_000):
            if not self.core.has_work and not self.results and not self.transfer():
                return
            progressed = self.plan()
            progressed |= self.transfer()
            progressed |= self.encode()
            assert self.result() or progressed or not self.core.has_work, "stuck"
            self.collect()
        raise AssertionError("does not end")

    def _verify_search(self, client: Client, end: SequenceFinished) -> None:
        if end.reason is Reason.CANCELLED or end.failure is TOO_FEW_BLOCKS:
            assert client.tokens == []
        else:
            assert client.tokens == client.found

    def _verify_pooled(self, client: Client, end: SequenceFinished) -> None:
        assert client.tokens == []
        if end.reason is not Reason.CANCELLED:
            assert end.reason is Reason.STOP
            assert client.vector == digest(client.prompt)

    def verify(self) -> None:
        for client in self.clients.values():
            assert client.end is not None
            if client.root is not None:
                self._verify_search(client, client.end)
                continue
            if client.pools:
                self._verify_pooled(client, client.end)
                continue
            expected = oracle(client.prompt, client.limit, client.eos)
            wanted = list(range(client.asks_from, len(client.prompt))) if client.asks_from else []
            if client.end.reason is Reason.CANCELLED:
                assert client.told == wanted[: len(client.told)]
                assert client.tokens == expected[: len(client.tokens)]
            else:
                assert client.tokens == expected
                assert client.told == wanted, "every position of the prompt once, in order"
                stopped = client.eos and expected[-1] == EOS
                assert client.end.reason is (Reason.STOP if stopped else Reason.LENGTH)


CASES = [
    {"num_blocks": 200, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 64},
    {"num_blocks": 40, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16},  # preempts all the time
    {"num_blocks": 34, "block_size": 4, "max_num_seqs": 12, "max_num_batched_tokens": 512, "watermark_blocks": 3},
    {"num_blocks": 150, "block_size": 1, "max_num_seqs": 4, "max_num_batched_tokens": 7},
    {
        "num_blocks": 60,
        "block_size": 8,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 48,
        "long_prefill_token_threshold": 9,
        "longest_stream_gap_s": 1e-4,
    },
    {"num_blocks": 30, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 40, "prefix_grain": 2},
    {"num_blocks": 12, "block_size": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "watermark_blocks": 1},
]


GROUPS: list[tuple[KVSpec, ...]] = [
    (Window(9),),
    (Window(1),),
    (FULL, Window(12)),
    (Window(40), Window(3)),
    (FULL, Latent(8, 4), Window(20), Window(20)),
]


STATES: list[tuple[KVSpec, ...]] = [
    (State(100),),
    (FULL, State(100), State(100)),
    (Window(9), State(100)),
]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_random_operations_match_the_oracle(case: int, in_flight: int, caching: bool, policy: str) -> None:
    cluster = operate_at_random(case, in_flight, caching, policy, drafts=0)
    assert all(client.end is not None for client in cluster.clients.values())


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("drafts", [1, 3, 20])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_random_operations_with_drafts_match_the_oracle(case: int, in_flight: int, drafts: int, policy: str) -> None:
    cluster = operate_at_random(case, in_flight, True, policy, drafts)
    assert cluster.worker.num_accepted > 100
    counts = cluster.core.speculation.counts
    assert counts.accepted_tokens == cluster.worker.num_accepted == counts.accepted_by_position.sum()
    assert cluster.core.running.num_drafts_in_flight.sum() == 0 or not cluster.core.running.live.any()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("specs", range(len(GROUPS)))
@pytest.mark.parametrize("case", [0, 1, 3, 4])
def test_random_operations_over_several_groups_match_the_oracle(
    case: int, specs: int, in_flight: int, caching: bool
) -> None:
    operate_at_random(case, in_flight, caching, "fcfs", drafts=0, specs=GROUPS[specs])


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("specs", range(len(STATES)))
@pytest.mark.parametrize("case", [0, 1, 3, 4])
def test_random_operations_with_states_match_the_oracle(case: int, specs: int, in_flight: int, caching: bool) -> None:
    cluster = operate_at_random(case, in_flight, caching, "fcfs", drafts=0, specs=STATES[specs])
    if caching:
        assert cluster.core.counts.cached_tokens > 0


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("specs", range(len(STATES)))
@pytest.mark.parametrize("case", [1, 4])
def test_random_operations_with_drafts_and_states_match_the_oracle(case: int, specs: int, in_flight: int) -> None:
    cluster = operate_at_random(case, in_flight, True, "fair", drafts=5, specs=STATES[specs])
    assert cluster.worker.num_accepted > 20
    assert cluster.core.counts.cached_tokens > 0


@pytest.mark.parametrize("drafts", [1, 5])
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("specs", range(len(GROUPS)))
@pytest.mark.parametrize("case", [1, 3])
def test_random_operations_with_drafts_over_several_groups_match_the_oracle(
    case: int, specs: int, in_flight: int, drafts: int
) -> None:
    operate_at_random(case, in_flight, True, "fair", drafts, specs=GROUPS[specs])


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("num_host_blocks", [7, 1000])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_random_operations_with_host_memory_match_the_oracle(
    case: int, num_host_blocks: int, in_flight: int, drafts: int
) -> None:
    cluster = operate_at_random(case, in_flight, True, "priority", drafts, tiers=TierLimits(num_host_blocks))
    counts = cluster.core.counts
    assert counts.stored_blocks > 0
    assert counts.failed_transfers > 0
    assert cluster.core.host_blocks is not None
    assert cluster.core.host_blocks.num_in_flight == 0
    if num_host_blocks == 1000 and CASES[case]["block_size"] == 4:
        assert counts.fetched_blocks > 20, "more than the device holds"


@pytest.mark.parametrize(("policy", "threshold"), [("lru", 0), ("arc", 0), ("arc", 2)])
@pytest.mark.parametrize("num_host_blocks", [12, 30])
@pytest.mark.parametrize("case", [0, 1, 4])
def test_random_operations_with_a_disk_match_the_oracle(
    case: int, num_host_blocks: int, policy: str, threshold: int
) -> None:
    tiers = TierLimits(num_host_blocks, 400, policy, threshold)
    cluster = operate_at_random(case, 2, True, "fcfs", drafts=0, tiers=tiers)
    counts = cluster.core.counts
    assert counts.disk_stored_blocks > 10
    if CASES[case]["block_size"] == 4 and threshold == 0:
        assert counts.disk_fetched_blocks > 5, "more than host memory holds"
        assert counts.disk_lost_blocks > 0
    assert cluster.core.host_blocks is not None
    assert cluster.core.host_blocks.num_in_flight == 0


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("num_host_blocks", "num_disk_blocks"), [(12, 0), (1000, 0), (30, 1000)])
@pytest.mark.parametrize("specs", range(len(GROUPS) + len(STATES)))
@pytest.mark.parametrize("case", [1, 3, 4])
def test_random_operations_with_offloaded_groups_match_the_oracle(
    case: int, specs: int, num_host_blocks: int, num_disk_blocks: int, drafts: int
) -> None:
    tiers = TierLimits(num_host_blocks, num_disk_blocks)
    cluster = operate_at_random(case, 2, True, "fair", drafts, specs=[*GROUPS, *STATES][specs], tiers=tiers)
    counts = cluster.core.counts
    assert counts.stored_blocks > 0
    assert cluster.core.host_blocks is not None
    assert cluster.core.host_blocks.num_in_flight == 0
    if num_host_blocks == 1000 and CASES[case]["block_size"] == 4:
        assert counts.fetched_blocks > 5, "more than the device holds"
    if num_disk_blocks and CASES[case]["block_size"] == 4:
        assert counts.disk_fetched_blocks > 0, "more than host memory holds"


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_random_operations_of_encoder_decoders_match_the_oracle(
    case: int, policy: str, in_flight: int, caching: bool
) -> None:
    cluster = operate_at_random(case, in_flight, caching, policy, drafts=0, specs=(FULL, Cross(15)))
    assert cluster.worker.num_cross_writes >= 4
    assert cluster.core.kv.cross is not None
    assert cluster.core.kv.cross.num_references == 0
    if caching and CASES[case]["block_size"] == 4:
        assert cluster.core.counts.cached_tokens > 0


@pytest.mark.parametrize("num_micro_batches", [2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_random_operations_by_micro_batches_match_the_oracle(case: int, policy: str, num_micro_batches: int) -> None:
    tiers = TierLimits(50)
    operate_at_random(
        case, num_micro_batches + 1, True, policy, drafts=0, tiers=tiers, num_micro_batches=num_micro_batches
    )


def operate_at_random(
    case: int,
    in_flight: int,
    caching: bool,
    policy: str,
    drafts: int,
    specs: tuple[KVSpec, ...] = ONE_FULL,
    *,
    tiers: TierLimits = NO_TIERS,
    num_micro_batches: int = 1,
) -> Cluster:
    sizes = CASES[case] | {"num_blocks": CASES[case]["num_blocks"] * len(specs)}
    limits = make_limits(
        **sizes,
        kv_specs=specs,
        max_model_len=120,
        max_steps_in_flight=in_flight,
        enable_prefix_caching=caching,
        policy=find_policy(policy),
        num_speculative_tokens=drafts,
        fixed_draft_length=in_flight > 1,
        tiers=tiers,
        num_micro_batches=num_micro_batches,
        encoder_capacity=25,
    )
    cluster = Cluster(limits, seed=case * 10 + in_flight)
    operations = [cluster.add, cluster.cancel, cluster.preempt, cluster.plan, cluster.result]
    weights = [3, 1, 1, 12, 12]
    if tiers.num_host_blocks:
        operations.append(cluster.transfer)
        weights.append(8)
    if limits.cross_length:
        operations.append(cluster.encode)
        weights.append(6)
    for _ in range(600):
        cluster.random.choices(operations, weights=weights)[0]()
        cluster.collect()
        cluster.check()
    cluster.drain()
    cluster.check()
    cluster.verify()
    if CASES[case]["block_size"] == 64 and caching and not limits.cross_length:
        assert cluster.num_copies > 10, "parts of blocks were found"
    assert cluster.core.use.used == 0, "blocks that no live sequence owns"
    assert cluster.core.running.num_free_slots == limits.max_num_seqs
    return cluster


def test_evacuated_sequences_continue_with_the_same_text() -> None:
    first = Cluster(make_limits(num_blocks=60, block_size=4, max_num_seqs=6, enable_prefix_caching=True), seed=5)
    for _ in range(10):
        first.add()
    for _ in range(12):
        first.plan()
        first.result()
        first.collect()
    moved: list[Sequence] = first.core.evacuate()
    assert [s.key for s in moved] == sorted(k for k, c in first.clients.items() if c.end is None)
    second = Cluster(first.limits, seed=6)
    second.clients = first.clients
    for sequence in moved:
        second.core.add(sequence)
    second.drain()
    second.verify()
