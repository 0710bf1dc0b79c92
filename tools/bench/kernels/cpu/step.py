"""A complete decode step of the tiny shape (Qwen3, hidden 256, 8 layers): call by call, and from a tape."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from quire.kernels import cpu, reference
from quire.kernels.cpu.tape import Tape
from tools.bench.kernels.timing import BenchRow, medians

HIDDEN, FFN, Q_HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 256, 768, 8, 4, 32, 4096, 8
BLOCK, LENGTH, MOST = 16, 128, 64
BATCHES = (1, 8, 32)


def bench() -> Iterator[BenchRow]:
    """Yields a row per dtype and batch size; one tape for the largest batch serves all sizes."""
    for dtype in (torch.bfloat16, torch.float32):
        ours, theirs = Decoder(cpu, dtype), Decoder(reference, dtype)
        tape = Tape(num_tokens=MOST + 1, num_seqs=MOST)
        inputs = Inputs(MOST + 1, MOST)
        with tape.recording():
            ours(inputs)
        for batch in BATCHES:
            yield one(dtype, batch, ours, theirs, tape)


def one(dtype: torch.dtype, batch: int, ours: Decoder, theirs: Decoder, tape: Tape) -> BenchRow:
    """Measures a step of `batch` sequences from the tape, call by call, and with the reference."""
    step = Inputs(batch, batch)
    times = medians(
        {
            "tape": lambda: tape.replay(num_tokens=batch, num_seqs=batch),
            "calls": lambda: ours(step),
            "reference": lambda: theirs(step),
        }
    )
    case = f"tiny {str(dtype)[6:]} decode {batch} x {LENGTH}"
    return BenchRow("step", case, times, batch / times["tape"] * 1e6, "tok/s")


class Inputs:
    """Inputs of a decode step: one row per sequence, all of one length."""

    def __init__(self, num_tokens: int, num_seqs: int) -> None:
        width = LENGTH // BLOCK
        tokens, seqs = torch.arange(num_tokens).int(), torch.arange(num_seqs).int()
        self.token_ids, self.positions = tokens % VOCAB, tokens * 0 + LENGTH - 1
        self.block_tables = 1 + torch.arange(num_seqs * width).int().view(num_seqs, width)
        self.slot_mapping = (tokens % num_seqs + 1) * width * BLOCK + BLOCK - 1
        self.query_start, self.seq_lens = torch.arange(num_seqs + 1).int(), seqs * 0 + LENGTH
        self.last_rows = seqs


class Decoder:
    """Model with random weights, computed by `package`."""

    def __init__(self, package: ModuleType, dtype: torch.dtype) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)

        shapes = ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)
        self.package, self.table = package, weight(VOCAB, HIDDEN)
        self.layers = [[package.prepare_linear(weight(*shape), None) for shape in shapes] for _ in range(LAYERS)]
        self.norm, self.head_norm = 1 + weight(HIDDEN), 1 + weight(HEAD_DIM)
        self.head = package.prepare_linear(self.table, None)
        self.caches = torch.zeros(LAYERS, 2, (MOST + 2) * LENGTH // BLOCK, BLOCK, KV_HEADS, HEAD_DIM, dtype=dtype)
        self.cos_sin = torch.randn(LENGTH, HEAD_DIM)

    def __call__(self, step: Inputs) -> torch.Tensor:
        """Computes the logits of the last rows; KV of the step's tokens is written to the caches."""
        p, norm, eps = self.package, self.norm, 1e-6
        residual, x = p.embed(step.token_ids, self.table), None
        for (qkv, out, up, down), (k, v) in zip(self.layers, self.caches, strict=True):
            x = p.rms_norm(residual, norm, eps) if x is None else p.add_rms_norm(x, residual, norm, eps)
            places = self.cos_sin, step.positions, step.slot_mapping, k, v
            q = p.qk_norm_rope_store(p.linear(x, qkv), self.head_norm, self.head_norm, eps, *places, Q_HEADS, KV_HEADS)
            attended = p.paged_attention(q, k, v, step.block_tables, step.query_start, step.seq_lens, HEAD_DIM**-0.5, 0)
            x = p.add_rms_norm(p.linear(attended.flatten(1), out), residual, norm, eps)
            x = p.linear(p.silu_mul(p.linear(x, up)), down)
        x, residual = p.embed(step.last_rows, x), p.embed(step.last_rows, residual)
        return p.linear(p.add_rms_norm(x, residual, norm, eps), self.head)
