"""Weights copied by several threads are complete after wait(), or it raises the error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.services.worker.models.loading.copies import MOST_WAITING, WeightCopier, threads_for
from quire.services.worker.models.loading.safetensors_layout import stored_tensors
from quire.shared.errors import InvalidArgument

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=[0, 1, 4])
def copies(request: pytest.FixtureRequest) -> Iterator[WeightCopier]:
    opened = WeightCopier(request.param, piece_bytes=1000)
    yield opened
    opened.close()


@pytest.mark.parametrize("device", DEVICES)
def test_all_copied_tensors_arrive(copies: WeightCopier, device: str) -> None:
    """There are more tensors than the queue holds, of several pieces, other dtypes, strided, and of one element."""
    given = [torch.randn(size % 91 + 1, 7) for size in range(3 * MOST_WAITING)]
    places = [torch.full(one.shape, torch.nan, device=device) for one in given]
    places[5] = torch.full((7, given[5].size(0)), torch.nan, device=device).t()
    places[6] = torch.full((given[6].size(0), 20), torch.nan, device=device)[:, 3:10]
    given[7], given[8] = given[7].half(), torch.tensor(3.5)
    places[8] = torch.zeros((), device=device)
    for tensor, place in zip(given, places, strict=True):
        copies.copy(tensor, place)
    copies.wait()
    for tensor, place in zip(given, places, strict=True):
        assert torch.equal(place.cpu(), tensor.float())


def test_a_file_of_half_a_million_tensors_is_refused_before_its_header_is_parsed(tmp_path: Path) -> None:
    one = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": one for number in range(500_000)}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with path.open("rb") as file, pytest.raises(ValueError, match="names 500000 tensors; at most 131072 of a file"):
        stored_tensors(path, file.fileno())


@pytest.mark.gpu
def test_tensors_in_files_are_read_from_the_file(tmp_path: Path) -> None:
    """Small tensors and those of several pieces are read in file order and in another, beside one in memory."""
    path, given = tmp_path / "model.safetensors", {f"t{i:03}": torch.randn(i % 91 + 1, 7) for i in range(500)}
    save_file(given, path)
    with path.open("rb") as file:
        stored = stored_tensors(path, file.fileno())
    places = {name: torch.full(tensor.shape, torch.nan, device="cuda") for name, tensor in given.items()}
    for names in ([*given], [*reversed(given)]):
        opened = WeightCopier(4, piece_bytes=1000)
        for name in names:
            if name == "t007":
                opened.copy(given[name], places[name])
            else:
                assert opened.can_copy(stored[name], places[name])
                opened.copy_stored(stored[name], places[name])
        opened.wait()
        opened.close()
        assert all(torch.equal(places[name].cpu(), given[name]) for name in given)
        for place in places.values():
            place.fill_(torch.nan)


@pytest.mark.gpu
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"t": torch.randn(1000)}, path)
    with path.open("rb+") as file:
        stored = stored_tensors(path, file.fileno())["t"]
        file.truncate(3000)
    opened = WeightCopier(1)
    opened.copy_stored(stored, torch.zeros(1000, device="cuda"))
    with pytest.raises(InvalidArgument, match="it ended at 3000"):
        opened.wait()
    opened.close()


def test_errors_of_copies_are_raised(copies: WeightCopier) -> None:
    def fill() -> None:
        copies.copy(torch.zeros(3), torch.zeros(4))
        copies.wait()

    with pytest.raises(RuntimeError, match="size"):
        fill()


def test_inference_tensors_are_filled() -> None:
    """Inference tensors may only be modified in inference mode, which is set per thread."""
    with torch.inference_mode():
        place, opened = torch.zeros(3), WeightCopier(2)
        opened.copy(torch.ones(3), place)
        opened.wait()
        opened.close()
    assert place.tolist() == [1.0] * 3


def test_only_gpus_are_filled_by_several_threads() -> None:
    assert threads_for(torch.device("cpu")) == 0
    assert threads_for(torch.device("cuda")) > 0
