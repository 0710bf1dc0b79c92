"""Streamed weights become a checkpoint once they are complete, and not before."""

from __future__ import annotations

import hashlib
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.services.worker.models.loading.weight_spool import FILE, WeightSpool
from quire.shared.errors import InvalidArgument, ResourceExhausted
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1.weights_stream_pb2 import BroadcastContent, TensorHead, TensorHeads, WeightsPiece
from quire.weights import stream as weights_stream

MIB = 1 << 20


def pieces(tensors: dict[str, torch.Tensor]) -> list[WeightsPiece]:
    found = [*weights_stream.messages(admin_pb2.UpdateWeightsRequest(), tensors.items())]
    return [message.piece for message in found[1:]]


def head(**fields: Any) -> WeightsPiece:
    values = {"name": "a", "dtype": "F32", "shape": [2]} | fields
    return WeightsPiece(heads=TensorHeads(tensors=[TensorHead(**values)]))


@pytest.fixture
def spool(tmp_path: Path) -> WeightSpool:
    return WeightSpool(8 * MIB, lambda: "", tmp_path)


def test_every_kind_of_tensor_is_received_unchanged(spool: WeightSpool) -> None:
    tensors = {
        "large": torch.randn(700, 1000),
        "turned": torch.randn(5, 7).t(),
        "half": torch.randn(9).to(torch.bfloat16),
        "codes": torch.arange(-5, 5, dtype=torch.int8),
        "eight": torch.randn(6).to(torch.float8_e4m3fn),
        "one": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
    }
    with spool.open_stream() as spooling:
        ends = [spooling.append(piece) for piece in pieces(tensors)]
        folder = spooling.keep()
    assert ends == [False] * (len(ends) - 1) + [True]
    found = load_file(folder / FILE)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        sent, came = (one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, found[name]))
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(sent, came), name


def test_unused_spools_are_removed(tmp_path: Path) -> None:
    in_use: list[str] = [""]
    spool = WeightSpool(MIB, lambda: in_use[0], tmp_path)
    kept = []
    for number in range(4):
        with spool.open_stream() as spooling:
            for piece in pieces({"a": torch.full((3,), float(number))}):
                spooling.append(piece)
            kept.append(spooling.keep())
        in_use[0] = in_use[0] or str(kept[0])
        there = [folder for folder in kept if folder.exists()]
        assert there == ([kept[0]] if number == 0 else [kept[0], kept[number]])
    with pytest.raises(InvalidArgument), spool.open_stream() as spooling:
        spooling.append(WeightsPiece())
    assert [folder for folder in kept if folder.exists()] == [kept[0], kept[3]]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([head(name="")], "tensors: '' must have 1 to 512"),
        ([head(name="x" * 513)], "must have 1 to 512"),
        ([head(), head()], "tensors: 'a' occurs twice"),
        ([head(dtype="F4")], "'F4' of 1 dimensions"),
        ([head(shape=[1] * 9)], "of 9 dimensions"),
        ([head(shape=[1 << 40, 1 << 40])], "which exceeds every checkpoint of this model"),
        ([head(shape=[3 * MIB])], "which exceeds every checkpoint of this model"),
        ([head(), WeightsPiece(content=bytes(9))], "more than the 8 bytes"),
        ([head(), WeightsPiece(content=bytes(4)), head(name="b")], "must be sent before all content"),
        ([head(), WeightsPiece(content=bytes(4)), WeightsPiece(end=b"x")], "4 bytes for tensors of 8"),
        (
            [head(), WeightsPiece(content=bytes(8)), WeightsPiece(end=hashlib.sha256().digest())],
            "differs from the sent content",
        ),
        ([WeightsPiece()], "must have heads, content, a shared location, a broadcast, or the end"),
    ],
)
def test_invalid_updates_are_rejected_without_residue(
    spool: WeightSpool, tmp_path: Path, wrong: list[WeightsPiece], text: str
) -> None:
    *before, last = wrong
    with spool.open_stream() as spooling:
        for piece in before:
            spooling.append(piece)
        with pytest.raises(InvalidArgument, match=text):
            spooling.append(last)
    assert [*tmp_path.rglob(FILE)] == []


def test_invalid_tensors_are_named() -> None:
    with pytest.raises(InvalidArgument, match="named_tensors: a must be a tensor"):
        weights_stream.messages(admin_pb2.UpdateWeightsRequest(), [("a", 3)])


def spool_all(spool: WeightSpool, tensors: dict[str, torch.Tensor]) -> None:
    with spool.open_stream() as spooling:
        for piece in pieces(tensors):
            spooling.append(piece)


def test_full_disk_is_reported_and_files_are_removed(spool: WeightSpool, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))  # limits any file
    try:
        with pytest.raises(ResourceExhausted, match=r"cannot be stored: .*; set TMPDIR"):
            spool_all(spool, {"large": torch.randn(700, 1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_deleted_folder_is_recreated(spool: WeightSpool, tmp_path: Path) -> None:
    for _ in range(2):
        with spool.open_stream() as spooling:
            for piece in pieces({"one": torch.tensor(3.5)}):
                spooling.append(piece)
            assert load_file(spooling.keep() / FILE)["one"] == 3.5
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
    tmp_path.rmdir()
    with pytest.raises(ResourceExhausted, match="No such file"), spool.open_stream():
        pass


def test_broadcast_tensors_have_only_headers(spool: WeightSpool, tmp_path: Path) -> None:
    with spool.open_stream() as spooling:
        for piece in (head(), head(name="b", dtype="BF16", shape=[])):
            assert not spooling.append(piece)
        assert spooling.expected is None
        assert not spooling.append(WeightsPiece(broadcast=BroadcastContent(timeout_ms=7)))
        for more in (WeightsPiece(content=b"x"), WeightsPiece(broadcast=BroadcastContent())):
            with pytest.raises(InvalidArgument, match="piece: all content of an update must be sent the same way"):
                spooling.append(more)
        assert spooling.append(WeightsPiece(end=b""))
        expected = spooling.expected
    assert expected is not None
    assert (expected.content.group_name, expected.content.timeout_ms) == ("weight_update_group", 7)
    assert [(one.name, one.dtype, [*one.shape]) for one in expected.tensors] == [("a", "F32", [2]), ("b", "BF16", [])]
    assert not [*tmp_path.rglob(FILE)]
    with (
        spool.open_stream() as spooling,
        pytest.raises(InvalidArgument, match="timeout_ms: must be at most 540000, got 540001"),
    ):
        spooling.append(WeightsPiece(broadcast=BroadcastContent(timeout_ms=540_001)))
