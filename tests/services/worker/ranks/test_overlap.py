"""Products in pieces of rows, each reduced separately, return the output of whole ones: two processes, over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.services.worker.ranks.collectives import group_collectives
from quire.services.worker.ranks.collectives.copy_engine_sums import RowPieces
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.layers.quantization import layouts
from tests.services.worker.lora import peft_folders
from tests.services.worker.models.test_logits import MAX_ERROR, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks import overlapped_build
from tests.services.worker.ranks.test_sharding import QUANTIZED_SIZES, RankedRig, mixed_steps, ranked
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
SLOTS = (0, 2, 5)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each piece of rank 0."""
    for device, opener in overlapped_build.OVERLAPPED_SUMS.items():
        monkeypatch.setitem(group_collectives.OVERLAPPED_SUMS, device, opener)
    overlapped_build.added.clear()
    return overlapped_build.added


@contextmanager
def overlapped(folder: Path, *, overlaps: bool = True, **settings: Any) -> Iterator[RankedRig]:
    with ranked(folder, build=overlapped_build.build, overlap_all_reduce=overlaps, **settings) as rig:
        yield rig


# Products with biases, norms of several kinds behind the sum, experts, latent vectors.
@pytest.mark.parametrize(
    "family",
    ["llama-biases-tied", "qwen2-moe", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma2", "deepseek-v3"))],
)
def test_pieces_match_one_rank(checkpoint: Make, family: str, added: list[int]) -> None:
    made, whole = checkpoint(family), Rig(checkpoint(family).folder)
    mixed_steps(whole)
    with overlapped(made.folder) as rig:
        mixed_steps(rig)
        assert {7, 10} <= set(added), "21 and 29 rows in three pieces"
        for slot in SLOTS:
            assert rig.tokens(slot) == whole.tokens(slot)
            assert error(rig, made, slot) < MAX_ERROR


def test_of_quantized_weights(tmp_path: Path, added: list[int]) -> None:
    layouts.make(layouts.LAYOUTS["awq"], tmp_path, "llama", **QUANTIZED_SIZES, head_dim=32)
    whole = Rig(tmp_path)
    mixed_steps(whole)
    with overlapped(tmp_path) as rig:
        mixed_steps(rig)
        assert added
        assert [rig.tokens(slot) for slot in SLOTS] == [whole.tokens(slot) for slot in SLOTS]


def test_steps_with_adapters_are_reduced_after_the_product(checkpoint: Make, tmp_path: Path, added: list[int]) -> None:
    """Adapters identify rows by their position in the step."""
    made = checkpoint("llama")
    merged = peft_folders.save(made, tmp_path / "a", seed=1)
    with overlapped(made.folder, lora={"a": str(merged.folder)}) as rig:
        rig.step([New(0, prompt(11, 1), adapter="a"), New(1, prompt(9, 2))], {0: 11, 1: 9})
        rig.step()
        assert not added
        assert error(rig, merged, 0) < MAX_ERROR
        assert error(rig, made, 1) < MAX_ERROR


def test_only_if_asked_for(checkpoint: Make, added: list[int]) -> None:
    with overlapped(checkpoint("llama").folder, overlaps=False) as rig:
        mixed_steps(rig)
    assert not added


@pytest.mark.parametrize(
    ("num_rows", "lengths"),
    [(0, []), (1, [1]), (199, [199]), (200, [100, 100]), (301, [101, 101, 99]), (1001, [334, 334, 333])],
)
def test_rows_are_cut_into_pieces_that_are_not_short(num_rows: int, lengths: list[int]) -> None:
    cuts = RowPieces(min_rows=100, max_pieces=3).split(num_rows)
    assert list(map(len, cuts)) == lengths
    assert [row for cut in cuts for row in cut] == list(range(num_rows))
