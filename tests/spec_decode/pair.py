"""A scheduler core and a worker replica in one process, connected by the wire's messages."""

from __future__ import annotations

import hashlib
import json
import queue
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire import bundled
from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.plan import LogprobColumns, Logprobs, SequenceFinished
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.repetition import RepetitionRule
from quire.services.scheduler.core.sequences.sequence import SampleGroup
from quire.services.scheduler.core.sequences.sequence import Sequence as CoreSequence
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.services.scheduler.replicas.codec import decode_result, encode_plan, encode_transfer
from quire.services.scheduler.values.payload import MediaSource, Payload
from quire.services.worker.building.build import build_replica, open_grammars
from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.ranks.placement import SINGLE_RANK, RankPlacement
from quire.services.worker.replica.replica import Replica
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.step.fetched_item import FetchedItem, Pixels
from quire.services.worker.structured.compile_pool import CompilePool, CompileResult
from quire.shared import columns, sampling_params
from quire.shared.kv import block_hash
from quire.shared.pb.common.v1 import media_pb2, pooling_pb2, sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.settings import WorkerSettings

GREEDY = {"temperature": 0.0}
EOS = (2, 0)
READ_ONE = (
    pooling_pb2.POOLER_UNSPECIFIED,
    pooling_pb2.POOLER_LAST,
)  # these poolers read one token's hidden state: a prefix may be cached
PATIENCE_S = 60.0  # timeout for work of other threads and processes


@dataclass
class Answer:
    """Everything that a client would receive."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)  # entries and rank, by token
    prompt_logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)  # the same, by position
    vector: list[float] = field(default_factory=list)  # of a pooled sequence
    end: SequenceFinished | None = None


def settings_of(
    speculation: Mapping[str, Any] | None = None, model: Path = bundled.FOLDER, **settings: Any
) -> WorkerSettings:
    config = json.dumps(speculation) if speculation else ""
    values: dict[str, Any] = {"dtype": "float32", "num_blocks": 2000, "threads": 1, "max_num_seqs": 16}
    values |= {"model": str(model), "speculative_config": config, **settings}
    return WorkerSettings(**values)


def build(
    speculation: Mapping[str, Any] | None = None,
    model: Path = bundled.FOLDER,
    placement: RankPlacement = SINGLE_RANK,
    **settings: Any,
) -> Replica:
    settings_ = settings_of(speculation, model, **settings)
    grammars = CompilePool(lambda: open_grammars(settings_))
    with torch.inference_mode():
        replica = build_replica(settings_, grammars, placement=placement)
    GRAMMARS[id(replica)] = grammars
    return replica


GRAMMARS: dict[int, CompilePool] = {}  # by replica


class Pair:
    """Runs steps and applies their results as late as the steps in flight allow."""

    def __init__(self, replica: Replica, **limits: Any) -> None:
        self.replica = replica
        self._grammars = GRAMMARS[id(replica)]
        self.replica.end_epoch()
        sizes = replica.limits
        values: dict[str, Any] = {
            "num_blocks": sizes.num_blocks,
            "block_size": sizes.block_size,
            "max_num_seqs": sizes.max_num_seqs,
            "max_num_batched_tokens": sizes.max_num_batched_tokens,
            "max_model_len": sizes.max_model_len,
            "max_steps_in_flight": 2,
            "kv_specs": tuple(group.spec for group in sizes.layout.groups),
            "num_speculative_tokens": replica.speculation.num_speculative_tokens,
            "fixed_draft_length": replica.speculation.fixed_draft_length,
            "drafts_constrained_only": replica.speculation.constrained_only,
            "encoder_capacity": replica.media.capacity,
            "whole_media": replica.media.whole_items,
        }
        self.core = Core(CoreLimits(**(values | limits)))
        self.answers: list[Answer] = []
        self.num_steps = 0
        self.plan_bytes: list[int] = []
        self.results: deque[pb.StepResult] = deque()
        self.pixels: dict[bytes, Pixels] = {}  # of media items, by identifier
        self._moves: deque[tuple[int, list[int]]] = deque()  # finished transfers to report: ids and lost blocks

    def ask(self, prompt: Sequence[int], max_tokens: int = 64, eos: tuple[int, ...] = EOS, **sampling: Any) -> Answer:
        repetition: RepetitionRule | None = sampling.pop("repetition", None)
        bad_words = tuple(columns.i32_bytes(word) for word in sampling.pop("bad_words", ()))
        constraint = sampling.pop("structured_output", None)
        family: SampleGroup | None = sampling.pop("family", None)
        adapter: str = sampling.pop("adapter", "")
        pooling: pooling_pb2.PoolingParams | None = sampling.pop("pooling", None)
        media = [_core_item(item) for item in sampling.pop("media", ())]
        params = sampling_pb2.SamplingParams(max_tokens=max_tokens, **(GREEDY | sampling))
        tokens, root = columns.i32_bytes(list(prompt)), block_hash.root_hash()
        sequence = CoreSequence(
            key=len(self.answers),
            owner=0,
            sequence_id=len(self.answers),
            tokens=SequenceTokens(tokens),
            num_prompt_tokens=len(prompt),
            max_total_tokens=len(prompt) + max_tokens,
            eos_token_ids=eos,
            stop_token_ids=tuple(params.stop_token_ids),
            root_hash=root,
            block_hashes=block_hash.chain_with_media(root, tokens, self.core.limits.block_size, media),
            media=tuple(media),
            repetition=repetition,
            sample_group=family,
            grammar_id=self._prepare(constraint),
            asks_logprobs=params.HasField("logprobs") or bool(params.logprob_token_ids),
            prompt_logprobs_from=sampling_params.first_prompt_logprob(params),
            samples_nothing=pooling is not None,
            skip_reading_prefix_cache=pooling is not None and pooling.pooler not in READ_ONE,
            payload=Payload(
                pb.SequenceParams(
                    sampling=params,
                    eos_token_ids=columns.u32_bytes(list(eos)),
                    bad_word_token_ids=bad_words,
                    adapter=adapter,
                    pooling=pooling,
                ).SerializeToString()
            ),
        )
        self.answers.append(Answer(list(prompt)))
        self.core.add(sequence)
        if sequence.grammar_id:
            self.core.on_grammar_prepared(sequence.grammar_id)
        return self.answers[-1]

    def _prepare(self, constraint: dict[str, Any] | None) -> bytes:
        if constraint is None:
            return b""
        message = sampling_pb2.StructuredOutput(**constraint)
        name = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
        there: queue.Queue[CompileResult] = queue.Queue()
        self._grammars.prepare(name, message, there.put)
        assert there.get(timeout=PATIENCE_S).error is None
        return name

    def adopt(self, held: RetainedState) -> None:
        """Registers the blocks that a worker reports when it attaches, as a scheduler does."""
        hashes = block_hash.split(held.hashes)
        for block, digest, group in zip(held.block_ids, hashes, held.groups, strict=True):
            self.core.kv.pool.adopt(block, block_hash.page_name(digest, group))

    def with_answers(self, answers: list[Answer], moved: list[CoreSequence]) -> Pair:
        """Takes over the sequences of another pair."""
        self.answers = answers
        for sequence in moved:
            self.core.add(sequence)
        return self

    def plan(self) -> bool:
        plan = self.core.schedule(float(self.num_steps))
        if plan is None:
            return False
        self.num_steps += 1
        wire = encode_plan(plan, epoch=1).plan
        self.plan_bytes.append(wire.ByteSize())
        with torch.inference_mode():
            self.results.append(self.execute(wire))
        self._begin_moves()
        return True

    def encode(self) -> None:
        """Executes the core's orders to encode media and to release their rows, in order."""
        for order in self.core.encoder_outputs.take_orders():
            if order.item is None:
                self.release_item(order.identifier)
                continue
            item, pixels = order.item, self.pixels[order.identifier]
            with torch.inference_mode():
                self.encode_item(FetchedItem(order.identifier, item.num_embeddings, (), pixels))
            self.core.on_media_encoded(order.identifier)

    def encode_item(self, item: FetchedItem) -> None:
        batch = self.replica.media.encode([item])
        batch.wait()
        assert batch.errors == (None,), batch.errors

    def release_item(self, identifier: bytes) -> None:
        self.replica.media.release(identifier)

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        flight = self.replica.launch(decode_plan(plan))
        outcome = flight.launch.wait()
        self.replica.record(flight, outcome)
        return encode_result(flight.result(outcome, wait_us=0))

    def move(self, order: pb.Transfer) -> None:
        self.replica.transfers.move(order).wait()

    def result(self) -> None:
        self.core.apply(decode_result(self.results.popleft()), float(self.num_steps))
        self._end_moves()
        self._collect()

    def _begin_moves(self) -> None:
        """Runs transfers after the plans sent before them; their results are reported with a later step."""
        transfers = self.core.host_blocks
        for order in () if transfers is None else transfers.take_orders():
            wire = encode_transfer(order)
            if wire.HasField("disk_transfer"):
                lost: queue.Queue[list[int]] = queue.Queue()
                self.replica.transfers.move_on_disk(wire.disk_transfer, lambda some, _us, lost=lost: lost.put(some))
                self._moves.append((order.transfer_id, lost.get(timeout=PATIENCE_S)))
            else:
                with torch.inference_mode():
                    self.move(wire.transfer)
                self._moves.append((order.transfer_id, []))

    def _end_moves(self) -> None:
        while self._moves:
            transfer_id, lost = self._moves.popleft()
            self.core.on_transfer_done(transfer_id, lost=lost)
            self._begin_moves()

    def run(self) -> None:
        """Runs until all sequences have ended."""
        while self.core.has_work or self.results:
            self.turn()
        self._begin_moves()
        self._end_moves()

    def turn(self) -> None:
        """Launches as many steps as possible and applies the oldest result, or reports transfers that sequences wait
        for."""
        self.encode()
        while self.plan():
            self.encode()
        if self.results:
            self.result()
            return
        self._begin_moves()
        assert self._moves, "stuck"
        self._end_moves()

    def preempt_often(self, num_turns: int) -> None:
        """Runs `num_turns` turns and preempts a sequence at every fifth one."""
        for turn in range(num_turns):
            live = np.flatnonzero(self.core.running.live)
            if turn % 5 == 2 and len(live):
                self.core.preempt(int(live[turn % len(live)]))
            if self.core.has_work or self.results:
                self.turn()

    def _collect(self) -> None:
        events = self.core.take_events()
        for part in events.tokens:
            tokens = iter(part.token_ids.tolist())
            counts = [1] * len(part.sequence_ids) if part.token_counts is None else part.token_counts.tolist()
            for stream, count in zip(part.sequence_ids.tolist(), counts, strict=True):
                assert self.answers[stream].end is None
                self.answers[stream].tokens += [next(tokens) for _ in range(count)]
            if part.logprobs is not None:
                self._collect_logprobs(part.logprobs)
        for part in events.prompts:
            self.answers[part.sequence.sequence_id].prompt_logprobs += _rows(part.entries)
        for pooled in events.pooled:
            assert not self.answers[pooled.sequence.sequence_id].vector
            self.answers[pooled.sequence.sequence_id].vector = columns.f32(pooled.values).tolist()
        for finished in events.finished:
            assert self.answers[finished.sequence.sequence_id].end is None
            self.answers[finished.sequence.sequence_id].end = finished

    def _collect_logprobs(self, found: LogprobColumns) -> None:
        for stream, row in zip(found.sequence_ids.tolist(), _rows(found.entries), strict=True):
            self.answers[stream].logprobs.append(row)


def _core_item(item: media_pb2.MediaItem) -> MediaItem:
    source = MediaSource("in this process", item)
    return MediaItem(item.identifier, item.offset, item.length, item.num_embeddings, source)


def _rows(entries: Logprobs) -> list[tuple[list[int], list[float], int]]:
    """Returns entries and rank of each token."""
    stops = np.cumsum(entries.entry_counts)
    starts = stops - entries.entry_counts
    return [
        (entries.token_ids[start:stop].tolist(), entries.logprobs[start:stop].tolist(), int(rank))
        for start, stop, rank in zip(starts.tolist(), stops.tolist(), entries.ranks, strict=True)
    ]
