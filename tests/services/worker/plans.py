"""A reference scheduler in plain Python: keeps the slot table as worker.proto specifies and writes plans."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.shared import columns
from quire.shared.kv.block_hash import root_hash
from quire.shared.pb.common.v1 import media_pb2, pooling_pb2, sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.sampling_params import first_prompt_logprob

GREEDY = sampling_pb2.SamplingParams(temperature=0.0)


Block = int | tuple[int, ...]  # where there are several KV groups, one for each of them


@dataclass
class Row:
    """A live slot."""

    tokens: list[int]
    num_prompt: int
    num_computed: int
    num_tokens: int  # sampled tokens count before they have arrived
    blocks: list[Block] = field(default_factory=list)
    shared: list[Block] = field(default_factory=list)  # blocks with cached content, still to be named
    copied: Block = 0  # block whose content the one behind those takes over
    samples: bool = True  # else it ends when its tokens are computed


@dataclass(frozen=True)
class New:
    """A sequence to admit."""

    slot: int
    tokens: list[int]
    num_prompt: int = 0  # 0: all of them
    cached_blocks: tuple[Block, ...] = ()  # full blocks of another sequence that hold its prefix
    copied_block: Block = 0  # that holds the rest of it, and is to be copied
    num_cached: int = 0  # 0: all that these blocks can hold
    sampling: sampling_pb2.SamplingParams = field(default_factory=lambda: GREEDY)
    eos: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar_id: bytes = b""
    thinking_marks: tuple[int, int] | None = None  # tokens that begin and end reasoning
    pooling: pooling_pb2.PoolingParams | None = None  # it samples nothing
    adapter: str = ""
    adapter_digest: bytes = b""
    second_text_from: int = 0
    num_seen_tokens: int = 0
    pooled_tokens: tuple[int, ...] = ()
    query_id: bytes = b""
    is_query: bool = False
    media: tuple[media_pb2.MediaItem, ...] = ()


class PaperScheduler:
    """Reference scheduler; allocates each block id once unless it is released."""

    def __init__(
        self, block_size: int, num_blocks: int, epoch: int = 1, *, num_groups: int = 1, num_stages: int = 1
    ) -> None:
        self.num_stages = num_stages
        self.block_size = block_size
        self.num_groups = num_groups
        self.epoch = epoch
        self.step_id = 0
        self.rows: dict[int, Row] = {}
        self.free = list(range(num_blocks - 1, 0, -1))
        self.sampling: list[list[int]] = []  # sampling slots of each step without a result

    def plan(
        self,
        new: list[New] | None = None,
        counts: dict[int, int] | None = None,
        released: list[int] | None = None,
        micro_batch: int = 0,
    ) -> pb.StepPlan:
        """Writes the next plan. `counts`: token counts of slots that deviate from the implied ones."""
        self._micro_batch = micro_batch
        new, counts, released = new or [], counts or {}, sorted(released or [])
        for slot in released:
            del self.rows[slot]
        for sequence in new:
            self._admit(sequence)
        self.step_id += 1
        self._copies: list[tuple[int, int]] = []
        block_ids = self._advance({slot: counts.get(slot, self._implied(slot)) for slot in sorted(self.rows)})
        copies = None
        if self._copies:
            sources, targets = zip(*self._copies, strict=True)
            copies = pb.BlockCopies(from_block_ids=columns.u32_bytes(sources), to_block_ids=columns.u32_bytes(targets))
        return pb.StepPlan(
            copies=copies,
            epoch=self.epoch,
            step_id=self.step_id,
            released_slots=columns.u32_bytes(released),
            admitted=[admission(sequence, self.block_size) for sequence in new],
            counted_slots=columns.u32_bytes(sorted(counts)),
            token_counts=columns.u32_bytes([counts[slot] for slot in sorted(counts)]),
            new_block_ids=columns.u32_bytes(block_ids),
            micro_batch=micro_batch,
        )

    def take(self, result: pb.StepResult) -> dict[int, int]:
        """Applies a result; returns the tokens of the oldest unanswered step by slot."""
        slots = self.sampling.pop(0)
        tokens = columns.i32(result.token_ids).tolist()
        assert len(tokens) == len(slots)
        for slot, token in zip(slots, tokens, strict=True):
            if slot in self.rows:
                self.rows[slot].tokens.append(token)
        return dict(zip(slots, tokens, strict=True))

    def _admit(self, sequence: New) -> None:
        count = len(sequence.tokens)
        cached = _num_cached(sequence, self.block_size)
        row = Row(list(sequence.tokens), sequence.num_prompt or count, min(cached, count - 1), count)
        row.shared = list(sequence.cached_blocks)
        row.copied = sequence.copied_block
        row.samples = sequence.pooling is None
        self.rows[sequence.slot] = row

    def give_back(self, slot: int) -> None:
        """Releases a slot; its blocks are reallocated last."""
        self.free[:0] = [block for position in self.rows[slot].blocks[::-1] for block in ids_of(position)]

    def take_block(self) -> Block:
        if self.num_groups == 1:
            return self.free.pop()
        return tuple(self.free.pop() for _ in range(self.num_groups))

    def _implied(self, slot: int) -> int:
        row = self.rows[slot]
        if slot % self.num_stages != self._micro_batch:
            return 0
        return 1 if row.samples and row.num_computed == row.num_tokens - 1 else 0

    def _advance(self, counts: dict[int, int]) -> list[int]:
        block_ids, sampling = [], []
        for slot, count in counts.items():
            row = self.rows[slot]
            while len(row.blocks) * self.block_size < row.num_computed + count:
                was_shared = bool(row.shared)
                row.blocks.append(row.shared.pop(0) if was_shared else self.take_block())
                if row.copied and not was_shared:
                    self._copies += zip(ids_of(row.copied), ids_of(row.blocks[-1]), strict=True)
                    row.copied = 0
                block_ids += ids_of(row.blocks[-1])
            row.num_computed += count
            if count and row.num_computed == row.num_tokens and row.samples:
                sampling.append(slot)
                row.num_tokens += 1
        self.sampling.append(sampling)
        return block_ids


def ids_of(block: Block) -> tuple[int, ...]:
    return (block,) if isinstance(block, int) else block


def _num_cached(new: New, block_size: int) -> int:
    if new.num_cached:
        return new.num_cached
    if new.copied_block:
        return new.num_prompt or len(new.tokens)
    return min(len(new.cached_blocks) * block_size, len(new.tokens))


def admission(new: New, block_size: int) -> pb.Admission:
    marks = new.thinking_marks or ()
    params = pb.SequenceParams(
        adapter=new.adapter,
        adapter_digest=new.adapter_digest,
        second_text_from=new.second_text_from,
        num_seen_tokens=new.num_seen_tokens,
        pooled_tokens=columns.u32_bytes(new.pooled_tokens),
        sampling=new.sampling,
        eos_token_ids=columns.u32_bytes(list(new.eos)),
        bad_word_token_ids=[columns.i32_bytes(list(word)) for word in new.bad_words],
        think_start_token_ids=columns.i32_bytes(list(marks[:1])),
        think_end_token_ids=columns.i32_bytes(list(marks[1:])),
        pooling=new.pooling,
    )
    return pb.Admission(
        slot=new.slot,
        sequence_key=1000 + new.slot,
        token_ids=columns.i32_bytes(new.tokens),
        num_prompt_tokens=new.num_prompt or len(new.tokens),
        num_cached_tokens=_num_cached(new, block_size),
        params=params.SerializeToString(),
        prompt_logprobs_from=first_prompt_logprob(new.sampling),
        root_hash=root_hash(),
        grammar_id=new.grammar_id,
        samples_nothing=new.pooling is not None,
        query_id=new.query_id,
        is_query=new.is_query,
        media=new.media,
    )
