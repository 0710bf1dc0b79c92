"""Weights in shared memory of this host are read unchanged, and only those a trainer may share."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file

from quire.services.worker.models.loading import shared_content
from quire.services.worker.models.loading.weight_spool import FILE, SpooledStream, WeightSpool
from quire.shared import weights_memory
from quire.shared.errors import FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1.weights_stream_pb2 import SharedContent, SharedRun, TensorHead, TensorHeads, WeightsPiece
from quire.weights import memory as showing

BEGIN = admin_pb2.UpdateWeightsRequest()
NAME = weights_memory.PREFIX + "0" * 32
TENSORS = {
    "large": torch.arange(9_000_001, dtype=torch.int32),
    "turned": torch.randn(5, 7).t(),
    "half": torch.randn(9).to(torch.bfloat16),
    "none": torch.zeros(0, 4),
    "one": torch.tensor(3.5),
}

TRAINER = """
import pathlib, sys, torch
import quire.shared.weights_memory
from quire.weights import memory as weights_memory
quire.shared.weights_memory.SEGMENTS = pathlib.Path(sys.argv[1])
from quire.shared.pb.admin.v1 import admin_pb2
with weights_memory.messages(admin_pb2.UpdateWeightsRequest(), [("a", torch.arange(6.0))]) as messages:
    for message in messages:
        print(message.piece.SerializeToString().hex(), flush=True)
    input()
"""


@pytest.fixture
def spooling(tmp_path: Path) -> Iterator[SpooledStream]:
    with WeightSpool(1 << 26, lambda: "", tmp_path).open_stream() as found:
        yield found


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in place of the system's shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(weights_memory, "SEGMENTS", folder)
    return folder


def all_taken(spooling: SpooledStream, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with showing.messages(BEGIN, tensors.items()) as messages:
        ends = [spooling.append(message.piece) for message in messages if not message.HasField("begin")]
    assert ends == [False] * (len(ends) - 1) + [True]
    return load_file(spooling.keep() / FILE)


def test_every_kind_of_tensor_is_read_and_memory_is_released(spooling: SpooledStream, segments: Path) -> None:
    found = all_taken(spooling, TENSORS)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor), name
    assert [*segments.iterdir()] == []


def test_exit_of_the_sharing_process(spooling: SpooledStream, segments: Path) -> None:
    """A read in progress completes; the next trainer removes the memory that is left behind."""
    command = [sys.executable, "-c", TRAINER, str(segments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        lines = [trainer.stdout.readline() for _ in range(4)]
        _, heads, content, end = (WeightsPiece.FromString(bytes.fromhex(line.decode())) for line in lines)
        spooling.append(heads)
        left = segments / content.shared.runs[0].segment
        assert left.stat().st_mode & 0o777 == 0o600
        with showing.messages(BEGIN, []):
            assert left.exists(), "its trainer lives"
        spooling.append(content)
        trainer.send_signal(signal.SIGKILL)
    assert spooling.append(end)
    assert torch.equal(load_file(spooling.keep() / FILE)["a"], torch.arange(6.0))
    assert left.exists()
    with showing.messages(BEGIN, []):
        assert not left.exists()


def heads(num_bytes: int) -> WeightsPiece:
    return WeightsPiece(heads=TensorHeads(tensors=[TensorHead(name="a", dtype="U8", shape=[num_bytes])]))


def shared(*runs: SharedRun, host: bytes | None = None) -> WeightsPiece:
    return WeightsPiece(shared=SharedContent(host=weights_memory.host_id() if host is None else host, runs=runs))


def run(**fields: Any) -> SharedRun:
    return SharedRun(**{"segment": NAME, "bytes": 8} | fields)


CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.mark.parametrize(
    ("piece", "error", "said"),
    [
        (shared(run(), host=b"another"), FailedPrecondition, "this worker and the trainer are on different hosts"),
        (shared(run(), host=b""), FailedPrecondition, "this worker and the trainer are on different hosts"),
        (shared(run(bytes=9)), InvalidArgument, "content: more than the 8 bytes of all tensors"),
        (shared(run(), run(bytes=1)), InvalidArgument, "content: more than the 8 bytes of all tensors"),
        (shared(run(bytes=0)), InvalidArgument, "a run must have at least one byte"),
        (shared(run(offset=1)), InvalidArgument, "8 bytes from 1 on, of memory that has 8"),
        (shared(run(offset=2**63)), InvalidArgument, "of memory that has 8"),
        (shared(run(segment="../passwd")), InvalidArgument, "'../passwd' is not quire-weights- and 32"),
        (shared(run(segment=NAME[:-1])), InvalidArgument, "is not quire-weights- and 32"),
        (shared(run(segment=NAME[:-1] + "1")), FailedPrecondition, "No such file"),
        (shared(run(segment=NAME[:-1] + "2")), FailedPrecondition, "symbolic links"),
        (shared(run(segment=NAME[:-1] + "3")), InvalidArgument, "must belong to the user of this worker"),
        (shared(SharedRun(bytes=8)), InvalidArgument, "either a segment or a CUDA handle"),
        pytest.param(
            shared(SharedRun(cuda_handle=bytes(64), bytes=8)),
            FailedPrecondition,
            "requires a worker on a GPU",
            marks=CPU_ONLY,
        ),
    ],
)
def test_inconsistent_descriptions_of_memory_are_rejected(
    spooling: SpooledStream, segments: Path, piece: WeightsPiece, error: type[QuireError], said: str
) -> None:
    (segments / NAME).write_bytes(bytes(8))
    (segments / (NAME[:-1] + "2")).symlink_to(segments / NAME)
    os.mkfifo(segments / (NAME[:-1] + "3"))
    spooling.append(heads(8))
    with pytest.raises(error, match=said):
        spooling.append(piece)


def test_another_users_memory_is_refused(
    spooling: SpooledStream, segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (segments / NAME).write_bytes(bytes(8))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    spooling.append(heads(8))
    with pytest.raises(InvalidArgument, match="must belong to the user of this worker"):
        spooling.append(shared(run()))


def test_truncated_shared_memory_is_an_error(segments: Path) -> None:
    """A process that had mapped the file would be killed by SIGBUS."""
    (segments / NAME).write_bytes(bytes(8))
    chunks = shared_content.chunks(weights_memory.host_id(), run(), max_bytes=4)
    assert len(next(chunks)) == 4
    os.truncate(segments / NAME, 4)
    with pytest.raises(FailedPrecondition, match="ends at 4: it was truncated"):
        next(chunks)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([shared(run(bytes=4)), WeightsPiece(content=bytes(4))], "must be sent the same way"),
        ([WeightsPiece(content=bytes(4)), shared(run(bytes=4))], "must be sent the same way"),
        ([WeightsPiece(content=bytes(8)), WeightsPiece(end=b"")], "differs from the sent content"),
        ([shared(run(bytes=4)), WeightsPiece(end=b"")], "4 bytes for tensors of 8"),
        ([shared(run()), WeightsPiece(end=b"x")], "differs from the sent content"),
    ],
)
def test_content_is_shared_or_sent_completely(
    spooling: SpooledStream, segments: Path, pieces: list[WeightsPiece], said: str
) -> None:
    (segments / NAME).write_bytes(bytes(8))
    *before, last = [heads(8), *pieces]
    for piece in before:
        spooling.append(piece)
    with pytest.raises(InvalidArgument, match=said):
        spooling.append(last)


def share_requests(tensors: dict[str, torch.Tensor]) -> list[admin_pb2.StreamWeightsRequest]:
    with showing.messages(BEGIN, tensors.items()) as messages:
        return [*messages]


def test_full_host_memory_and_used_names_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextmanager
    def full() -> Iterator[tuple[str, BinaryIO]]:
        with io.BufferedWriter(io.FileIO("/dev/full", "w")) as segment:
            yield NAME, segment

    monkeypatch.setattr(showing, "_segment", full)
    with pytest.raises(ResourceExhausted, match="does not have enough space for them: No space left"):
        share_requests({"a": torch.zeros(1 << 20)})
    monkeypatch.setattr(weights_memory, "_BOOT", tmp_path / "none")
    with pytest.raises(FailedPrecondition, match="update_weights_from_tensor"):
        share_requests({})


@pytest.mark.gpu
def test_gpu_memory_is_read_in_place(spooling: SpooledStream) -> None:
    """Another process than the owner reads it, since a process cannot open its own handle."""
    code = TRAINER.replace("torch.arange(6.0)", "torch.arange(6000000.0, device='cuda')[5:]")
    command = [sys.executable, "-c", code, str(weights_memory.SEGMENTS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        lines = [trainer.stdout.readline() for _ in range(4)]
        _, heads, content, end = (WeightsPiece.FromString(bytes.fromhex(line.decode())) for line in lines)
        assert content.shared.runs[0].cuda_handle
        for piece in (heads, content):
            spooling.append(piece)
        assert spooling.append(end)
        content.shared.runs[0].offset = 1 << 40
        with pytest.raises(InvalidArgument, match="of memory that has"):
            [*shared_content.chunks(content.shared.host, content.shared.runs[0])]
        trainer.kill()
    assert torch.equal(load_file(spooling.keep() / FILE)["a"], torch.arange(6_000_000.0)[5:])
    broken = SharedRun(cuda_handle=bytes(64), bytes=8)
    with pytest.raises(FailedPrecondition, match="cannot be read: cuIpcOpenMemHandle"):
        [*shared_content.chunks(weights_memory.host_id(), broken)]
