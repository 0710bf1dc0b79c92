"""4-bit weights with many rows by warp groups: selection, partition, and results on a Hopper."""

from __future__ import annotations

import dataclasses
import logging
import random
import sys
from unittest.mock import Mock

import pytest
import torch

from quire.kernels import reference
from quire.kernels.triton.quantization import packed_linear, warp_groups
from quire.kernels.triton.quantization.packed_weight import PackedWeight, pack
from quire.kernels.triton.quantization.warp_groups import (
    LEAST_ROUNDS,
    LEAST_ROWS,
    MOST_ROWS,
    ROWS,
    SPAN,
    WarpGroupsCut,
    best_cut,
    cuts_of,
    is_hopper,
    multiply_in_warp_groups,
    rounds_of,
    tiles_of,
    warp_groups_take,
)
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.conftest import ON_GPU
from tests.kernels.triton.quantization.weights import integers, on

QKV, GATE_AND_UP, DOWN = (4096, 6144), (4096, 28_672), (14_336, 4096)
SLACK = 2  # weights are rounded to 16 bits before the product, too


def test_few_rows_use_small_tiles() -> None:
    assert best_cut(128, *GATE_AND_UP, 132).rows == 128
    assert best_cut(512, *GATE_AND_UP, 132).rows == 256


def test_tiles_are_whole_where_the_last_wave_of_them_is_nearly_full() -> None:
    assert best_cut(1024, *DOWN, 132) == WarpGroupsCut(rows=256, programs=128, whole=128)
    assert best_cut(2048, *QKV, 132) == WarpGroupsCut(rows=256, programs=132, whole=384)


def test_programs_share_the_last_tiles_where_they_would_not_be_enough_for_all() -> None:
    assert best_cut(512, *GATE_AND_UP, 132) == WarpGroupsCut(rows=256, programs=132, whole=2 * 132)
    assert best_cut(1024, *QKV, 132) == WarpGroupsCut(rows=256, programs=132, whole=0)


def test_parts_of_tiles_are_equal_where_that_pays() -> None:
    assert best_cut(512, *DOWN, 132) == WarpGroupsCut(rows=256, programs=128, whole=0)
    assert best_cut(256, *DOWN, 132) == WarpGroupsCut(rows=256, programs=128, whole=0)


def test_every_program_has_work_and_a_multiprocessor() -> None:
    """An idle warp group would wait for codes that never arrive, and others would wait for a program that is not
    resident."""
    drawn = random.Random(0)
    for _ in range(2000):
        in_features, out_features = drawn.randrange(1, 120) * SPAN, drawn.randrange(1, 3000) * 8
        tokens, multiprocessors = drawn.randint(LEAST_ROWS, MOST_ROWS), drawn.choice((1, 78, 114, 132))
        cuts = list(cuts_of(tokens, in_features, out_features, multiprocessors))
        assert {cut.rows for cut in cuts} == {*ROWS}
        for cut in cuts:
            tiles = tiles_of(tokens, out_features, cut.rows)
            assert 0 < cut.programs <= min(multiprocessors, cut.whole or multiprocessors)
            if cut.whole < tiles:
                assert cut.whole % cut.programs == 0
                assert (tiles - cut.whole) * rounds_of(in_features) >= LEAST_ROUNDS * cut.programs


def packed(out_features: int = 64, in_features: int = 256, group: int = 128, bits: int = 4, **more) -> PackedWeight:
    return pack(integers(out_features, in_features, group, bits, **more))


def test_supported_weights() -> None:
    assert warp_groups_take(packed())
    assert warp_groups_take(packed(group=256, order=torch.randperm(256), bias=torch.randn(64)))
    assert warp_groups_take(packed(out_features=72, zeros=False))


@pytest.mark.parametrize(
    "weight",
    [
        packed(group=64),
        packed(in_features=192, group=192),
        packed(bits=8),
        packed(zeros=False, table=torch.randn(16)),
        packed(out_features=68),
    ],
    ids=["short groups", "short spans", "8 bits", "table", "rows that begin between 16 bytes"],
)
def test_unsupported_weights(weight: PackedWeight) -> None:
    assert not warp_groups_take(weight)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Mock of the kernel, as if on a Hopper."""
    kernel = Mock(return_value=torch.ones(1))
    monkeypatch.setattr(warp_groups, "is_hopper", lambda device: True)
    monkeypatch.setattr(warp_groups, "kernel_of_warp_groups", lambda: kernel)
    monkeypatch.setattr(warp_groups, "_failed", set())
    return kernel


def test_many_rows_on_hopper_use_warp_groups(kernel: Mock) -> None:
    weight, x = packed(), torch.zeros(LEAST_ROWS, 256)
    assert packed_linear.packed_linear(x, weight) is kernel.return_value
    assert kernel.mock_calls[0].args[1] is weight


@pytest.mark.parametrize("tokens", [LEAST_ROWS - 1, MOST_ROWS + 1])
def test_other_row_counts_do_not_use_warp_groups(kernel: Mock, tokens: int) -> None:
    assert multiply_in_warp_groups(torch.zeros(tokens, 256), packed()) is None
    assert not kernel.called


def test_failed_compilation_is_logged_once_and_not_retried(kernel: Mock, caplog) -> None:
    kernel.side_effect = RuntimeError("PassManager::run failed")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert multiply_in_warp_groups(torch.zeros(LEAST_ROWS, 256), packed()) is None
    assert kernel.call_count == 1
    assert len(caplog.records) == 1
    assert "PassManager::run failed" in caplog.text


def test_too_little_memory_is_no_reason_for_another_kernel(kernel: Mock) -> None:
    kernel.side_effect = torch.OutOfMemoryError("none is left")
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            multiply_in_warp_groups(torch.zeros(LEAST_ROWS, 256), packed())


def test_incompatible_gluon_is_logged(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "quire.kernels.triton.quantization.packed_warp_groups", None)
    with caplog.at_level(logging.WARNING):
        assert warp_groups.kernel_of_warp_groups.__wrapped__() is None
    assert "packed_many_rows" in caplog.text


def test_a_cpu_is_no_hopper() -> None:
    assert not is_hopper(torch.device("cpu"))


needs_hopper = pytest.mark.skipif(not (ON_GPU and warp_groups.HAS_KERNEL.here), reason="no Hopper is here")


def multiply(x: torch.Tensor, weight: PackedWeight, cut: WarpGroupsCut | None = None) -> torch.Tensor:
    from quire.kernels.triton.quantization.packed_warp_groups import packed_warp_groups

    return packed_warp_groups(x, weight, cut)


def all_cuts(x: torch.Tensor, weight: PackedWeight) -> list[WarpGroupsCut]:
    return list(cuts_of(*x.shape, weight.codes.size(0), warp_groups.multiprocessors_of(x.device)))


def fill_memory_with_garbage(cut: WarpGroupsCut, device: torch.device) -> None:
    """Fills memory that may be reused for parts of tiles."""
    torch.full((cut.programs, 2, 64 * cut.rows), 1e6, device=device)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features", "group", "more"),
    [
        (65, 896, 136, 128, {}),
        (128, 1280, 4096, 1280, {"zeros": False, "biased": True}),
        (129, 1152, 8, 128, {"biased": True}),
        (300, 768, 264, 256, {"ordered": True}),
        (513, 4096, 6144, 128, {"zeros": False}),
        (2100, 1280, 1032, 128, {"biased": True, "ordered": True}),
    ],
    ids=["zeros", "one group, bias", "few columns", "ordered", "alike", "everything"],
)
def test_products(device, tokens, in_features, out_features, group, more, dtype) -> None:
    options = {"bias": torch.randn(out_features).to(dtype)} if more.get("biased") else {}
    if more.get("ordered"):
        options["order"] = torch.randperm(in_features)
    weight = on(device, integers(out_features, in_features, group, 4, zeros=more.get("zeros", True), **options))
    if weight.zeros is None:
        weight = dataclasses.replace(weight, zeros=torch.full_like(weight.scales, 8.0))
    x = torch.randn(tokens, in_features).to(device, dtype)
    made, want = pack(weight), reference.quantized_linear(x.float(), weight)
    assert warp_groups_take(made)
    for cut in all_cuts(x, made):
        fill_memory_with_garbage(cut, device)
        assert_close(multiply(x, made, cut), want, SLACK)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7])
def test_sums_of_few_steps(device, steps: int) -> None:
    weight = on(device, integers(200, steps * SPAN, SPAN, 4))
    x = torch.randn(200, steps * SPAN).to(device, torch.bfloat16)
    want = reference.quantized_linear(x.float(), weight)
    for rows in ROWS:
        most = tiles_of(200, 200, rows) * rounds_of(steps * SPAN)
        for programs in range(1, most + 1):
            assert_close(multiply(x, pack(weight), WarpGroupsCut(rows, programs, whole=0)), want, SLACK)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tokens", [100, 300, 700])
@pytest.mark.parametrize("sizes", [QKV, DOWN], ids=["many tiles", "long sums"])
def test_sums_are_the_same_every_time(device, tokens: int, sizes: tuple[int, int]) -> None:
    weight = on(device, integers(*reversed(sizes), 128, 4))
    made, x = pack(weight), torch.randn(tokens, sizes[0], device=device, dtype=torch.bfloat16)
    want = reference.quantized_linear(x.float(), weight)
    for cut in all_cuts(x, made):
        first = multiply(x, made, cut)
        assert_close(first, want, SLACK)
        for _ in range(100):
            fill_memory_with_garbage(cut, device)
            assert torch.equal(multiply(x, made, cut), first), cut


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tokens", [256, 1024])
def test_graph_replays_read_current_inputs(device, tokens: int) -> None:
    made = pack(on(device, integers(4096, 4096, 128, 4)))
    first, second = (torch.randn(tokens, 4096, device=device, dtype=torch.bfloat16) for _ in range(2))
    x, wanted = first.clone(), [packed_linear.packed_linear(rows, made) for rows in (first, second)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed_linear.packed_linear(x, made)
    for rows, want in zip((first, second), wanted, strict=True):
        x.copy_(rows)
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.gpu
@needs_hopper
def test_two_streams_do_not_disturb_each_other(device) -> None:
    made = pack(on(device, integers(4096, 4096, 128, 4)))
    inputs = [torch.randn(256, 4096, device=device, dtype=torch.bfloat16) for _ in range(2)]
    wanted = [multiply(x, made) for x in inputs]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize(device)
    for _ in range(50):
        got = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(multiply(x, made))
        torch.cuda.synchronize(device)
        assert all(torch.equal(one, want) for one, want in zip(got, wanted, strict=True))


@pytest.mark.gpu
@needs_hopper
def test_packed_linear_uses_warp_groups(device, monkeypatch) -> None:
    kernel = Mock(side_effect=multiply)
    monkeypatch.setattr(warp_groups, "kernel_of_warp_groups", lambda: kernel)
    weight = on(device, integers(512, 512, 128, 4))
    x = torch.randn(300, 512).to(device, torch.bfloat16)
    got = packed_linear.packed_linear(x, pack(weight))
    assert kernel.call_count == 1
    assert_close(got, reference.quantized_linear(x.float(), weight), SLACK)
