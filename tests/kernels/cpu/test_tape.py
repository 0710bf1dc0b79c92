from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch

from quire.kernels import cpu
from quire.kernels.cpu.tape import Tape
from tests.kernels.cpu.closeness import needs_library

pytestmark = pytest.mark.skipif(**needs_library)

HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS, BLOCK = 64, 4, 2, 16, 96, 120, 3, 8
MAX_TOKENS, MAX_SEQS, MAX_BLOCKS = 70, 9, 10
EPS = 1e-6


@dataclass
class Inputs:
    """Inputs that vary between steps, all int32."""

    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    slot_mapping: torch.Tensor  # [num_tokens]
    block_tables: torch.Tensor  # [num_seqs, MAX_BLOCKS]
    query_start: torch.Tensor  # [num_seqs + 1]
    seq_lens: torch.Tensor  # [num_seqs]
    last_rows: torch.Tensor  # [num_seqs]

    def put(self, step: Inputs) -> None:
        for field in fields(self):
            values = getattr(step, field.name)
            getattr(self, field.name)[: len(values)] = values


def static_inputs() -> Inputs:
    zeros = [torch.zeros(size, dtype=torch.int32) for size in (MAX_TOKENS, MAX_SEQS)]
    tokens, seqs = zeros
    tables, start = torch.zeros(MAX_SEQS, MAX_BLOCKS).int(), torch.zeros(MAX_SEQS + 1).int()
    return Inputs(tokens, tokens.clone(), tokens.clone(), tables, start, seqs, seqs.clone())


class Decoder:
    """Small Llama-like decoder with per-head norms and some biases."""

    def __init__(self, dtype: torch.dtype) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)

        def linear(out_features: int, in_features: int, bias: bool = False):
            return cpu.prepare_linear(weight(out_features, in_features), weight(out_features) if bias else None)

        qkv = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.table = weight(VOCAB, HIDDEN)
        self.layers = [
            {
                "qkv": linear(qkv, HIDDEN, bias=True),
                "out": linear(HIDDEN, Q_HEADS * HEAD_DIM),
                "up": linear(2 * FFN, HIDDEN),
                "down": linear(HIDDEN, FFN),
                "norms": [1 + weight(HIDDEN), 1 + weight(HIDDEN), 1 + weight(HEAD_DIM), 1 + weight(HEAD_DIM)],
                "cache": torch.zeros(2, 40, BLOCK, KV_HEADS, HEAD_DIM, dtype=dtype),
            }
            for _ in range(LAYERS)
        ]
        self.norm, self.head = 1 + weight(HIDDEN), linear(VOCAB, HIDDEN)
        angles = torch.arange(MAX_BLOCKS * BLOCK).unsqueeze(1) * 100 ** (-torch.arange(HEAD_DIM // 2) / 8)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)

    def __call__(self, step: Inputs) -> torch.Tensor:
        """Returns logits [num_seqs, VOCAB] of each sequence's last row."""
        residual, x = cpu.embed(step.token_ids, self.table), None
        for layer in self.layers:
            (before, middle, q_norm, k_norm), (k, v) = layer["norms"], layer["cache"]
            x = cpu.rms_norm(residual, before, EPS) if x is None else cpu.add_rms_norm(x, residual, before, EPS)
            qkv = cpu.linear(x, layer["qkv"])
            places = step.positions, step.slot_mapping
            q = cpu.qk_norm_rope_store(qkv, q_norm, k_norm, EPS, self.cos_sin, *places, k, v, Q_HEADS, KV_HEADS)
            tables = step.block_tables, step.query_start, step.seq_lens
            x = cpu.linear(cpu.paged_attention(q, k, v, *tables, HEAD_DIM**-0.5, 0).flatten(1), layer["out"])
            x = cpu.add_rms_norm(x, residual, middle, EPS)
            x = cpu.linear(cpu.silu_mul(cpu.linear(x, layer["up"])), layer["down"])
        x, residual = cpu.embed(step.last_rows, x), cpu.embed(step.last_rows, residual)
        return cpu.linear(cpu.add_rms_norm(x, residual, self.norm, EPS), self.head)


def step_of(rows: list[tuple[int, int, int]]) -> Inputs:
    """Builds inputs for rows [begin, end) of each (sequence, begin, end); sequence i has blocks from 4 * i + 1."""
    counts = torch.tensor([end - begin for _, begin, end in rows])
    positions = torch.cat([torch.arange(begin, end) for _, begin, end in rows])
    first_blocks = torch.tensor([4 * seq + 1 for seq, _, _ in rows])
    tables = first_blocks.unsqueeze(1) + torch.arange(MAX_BLOCKS)
    slots = first_blocks.repeat_interleave(counts) * BLOCK + positions
    token_ids = (positions * 7 + slots) % VOCAB
    start = torch.cat((torch.zeros(1), counts.cumsum(0)))
    lens = torch.tensor([end for _, _, end in rows])
    return Inputs(*(t.int() for t in (token_ids, positions, slots, tables, start, lens, start[1:] - 1)))


STEPS = [
    [(0, 0, 20)],
    [(0, 20, 21)],
    [(1, 0, 30), (2, 0, 5), (0, 21, 22)],
    [(i, 22 if i == 0 else 0, 23 if i == 0 else 1) for i in (0, 3, 4, 5, 6, 7)],
    [(0, 23, 24), (1, 30, 31), (2, 5, 6)],
    [(3, 1, 32), (4, 1, 30)],
]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_tape_computes_what_the_model_computes(dtype, threads):
    cpu.set_num_threads(threads)
    torch.manual_seed(0)
    eager = Decoder(dtype)
    torch.manual_seed(0)
    taped = Decoder(dtype)
    inputs, tape = static_inputs(), Tape(num_tokens=MAX_TOKENS, num_seqs=MAX_SEQS)
    with tape.recording():
        logits = taped(inputs)
    for rows in STEPS:
        step = step_of(rows)
        inputs.put(step)
        tape.replay(num_tokens=len(step.token_ids), num_seqs=len(rows))
        assert torch.equal(logits[: len(rows)], eager(step)), rows
    for mine, theirs in zip(taped.layers, eager.layers, strict=True):
        assert torch.equal(mine["cache"], theirs["cache"])


def test_rows_beyond_the_replayed_sizes_stay_as_they_were():
    weight, x = cpu.prepare_linear(torch.randn(8, 8), None), torch.randn(10, 8)
    tape = Tape(num_tokens=10)
    with tape.recording():
        y = cpu.linear(x, weight)
    y.fill_(7)
    tape.replay(num_tokens=4)
    assert torch.equal(y[:4], cpu.linear(x[:4], weight))
    assert (y[4:] == 7).all()


def test_memory_is_used_again():
    weight, x = cpu.prepare_linear(torch.randn(8, 8), None), torch.randn(1000, 8)

    def deep(layers: int) -> Tape:
        tape, y = Tape(num_tokens=1000), x
        with tape.recording():
            for _ in range(layers):
                y = cpu.linear(y, weight)
        return tape

    assert deep(3).num_bytes == deep(50).num_bytes < 3 * 1000 * 8 * 4


def test_a_view_keeps_its_memory():
    weight, x = cpu.prepare_linear(torch.randn(8, 8), None), torch.randn(10, 8)
    tape = Tape(num_tokens=10)
    with tape.recording():
        first = cpu.linear(x, weight).view(5, 16)[1:]
        second = cpu.linear(x, weight)
    first.zero_()
    second.zero_()
    tape.replay(num_tokens=10)
    assert torch.equal(first.flatten(), cpu.linear(x, weight).flatten()[16:])
    assert torch.equal(second, cpu.linear(x, weight))


@pytest.mark.parametrize("inference", [False, True])
def test_unrecordable_operations_are_rejected(inference):
    with torch.inference_mode(inference):
        refuse_all()


def refuse_all() -> None:
    x, weight = torch.randn(10, 8), torch.ones(8)
    for compute in (
        lambda y: y.float() + 1,
        lambda y: y.index_select(0, torch.tensor([1])),
        lambda y: y.t().flatten(),
        lambda y: cpu.rms_norm(y.half(), weight.half(), EPS),
    ):
        tape = Tape(num_tokens=10)
        with pytest.raises(RuntimeError, match="cannot be recorded"), tape.recording():
            compute(cpu.rms_norm(x, weight, EPS))
    assert torch.equal(
        cpu.rms_norm(x, weight, EPS)[:1], cpu.rms_norm(x[:1], weight, EPS)
    )  # recording has ended cleanly


def test_rows_must_be_one_of_the_sizes():
    x, weight, tape = torch.randn(4, 8), torch.ones(8), Tape(num_tokens=10, num_seqs=3)
    with pytest.raises(AssertionError, match="rms_norm has 4 rows"), tape.recording():
        cpu.rms_norm(x, weight, EPS)


def test_sizes_must_differ_and_fit():
    with pytest.raises(AssertionError, match="must differ"):
        Tape(num_tokens=8, num_seqs=8)
    x, weight, tape = torch.randn(8, 8), torch.ones(8), Tape(num_tokens=8)
    with tape.recording():
        cpu.rms_norm(x, weight, EPS)
    with pytest.raises(AssertionError, match="recorded for 8"):
        tape.replay(num_tokens=9)


def test_sampling_can_be_on_a_tape():
    logits, seeds = torch.randn(6, 50), torch.arange(6)
    positions, temperature = torch.arange(6).int(), torch.ones(6)
    tape = Tape(num_seqs=6)
    with tape.recording():
        tokens = cpu.sample(logits, temperature, None, None, None, seeds, positions)
    tape.replay(num_seqs=5)
    assert torch.equal(tokens[:5], cpu.sample(logits, temperature, None, None, None, seeds, positions)[:5])
