"""Invalid weight files, and indices that lead outside their folder, are rejected in one line that names them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.services.worker.models.loading import loader, weight_files
from quire.shared.errors import InvalidArgument
from tests.services.worker.checkpoints import make

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def written(header: Any, size: int | None = None, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def tensor(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BOMBS = {
    "no header": b"",
    "a header of 2**63 bytes": written({}, 2**63),
    "a header of 99 MB that is not there": written({}, 99_000_000),
    "a header that is cut off": written({"a": tensor([16], 0, 64)})[:20],
    "tensors that overlap": written({"a": tensor([16], 0, 64), "b": tensor([8], 16, 48)}),
    "a tensor beyond the end": written({"a": tensor([1 << 40], 0, 1 << 42)}),
    "a tensor before the beginning": written({"a": tensor([16], -64, 0)}),
    "an end before its begin": written({"a": tensor([16], 64, 0)}),
    "a shape that overflows": written({"a": tensor([1 << 62, 1 << 62], 0, 64)}),
    "a negative shape": written({"a": tensor([-16], 0, 64)}),
    "another number of bytes": written({"a": tensor([15], 0, 64)}),
    "a hole": written({"a": tensor([8], 0, 32), "b": tensor([4], 48, 64)}),
    "bytes after the last": written({"a": tensor([8], 0, 32)}),
    "an unknown dtype": written({"a": tensor([16], 0, 64, "F1")}),
    "a header that is nested deeply": written(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "a list": written([1]),
    "no UTF-8": written(b'{"\xff": 1}'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_inconsistent_header_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(BOMBS[name])
    with pytest.raises(InvalidArgument) as refused:
        list(loader.named_tensors(tmp_path))
    assert str(tmp_path / FILE) in refused.value.message
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 600


@pytest.mark.parametrize(
    "weights",
    [{"a": "../secret.safetensors"}, {"a": "/etc/passwd"}, {"a": "sub/x.safetensors"}, {"a": ".."}, {"a": ""}],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, weights: dict[str, Any]) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(InvalidArgument, match="only files of its own folder are read"):
        weight_files.paths(tmp_path)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"weight_map": [1]}', '{"weight_map": {"a": [1]}}', '{"weight_map": 5}', "{}", ""]
)
def test_invalid_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(InvalidArgument, match="is not an index with a weight_map") as refused:
        weight_files.paths(tmp_path)
    assert len(refused.value.message) < 600


def test_links_of_a_hubs_cache_are_followed(tmp_path: Path) -> None:
    """In the hub's cache, every file of a model is a link to a file named after its hash."""
    make("llama", tmp_path / "model")
    real = tmp_path / "blobs"
    real.mkdir()
    (tmp_path / "model" / FILE).rename(real / "b10b")
    (tmp_path / "model" / FILE).symlink_to(real / "b10b")
    assert list(loader.named_tensors(tmp_path / "model"))


@pytest.mark.parametrize("place", [os.mkfifo, os.mkdir, lambda path: Path(path).symlink_to(path)])
def test_special_files_are_named_and_not_opened(tmp_path: Path, place: Callable[[Path], None]) -> None:
    place(tmp_path / FILE)
    with pytest.raises(InvalidArgument, match=r"is not a regular file|Too many levels of symbolic links"):
        list(loader.named_tensors(tmp_path))


def test_a_file_without_permission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama", tmp_path)
    (tmp_path / FILE).chmod(0)
    if os.access(tmp_path / FILE, os.R_OK):  # root can read every file: simulate the system's error

        def refuse(path: Path, *_: Any, **__: Any) -> Any:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InvalidArgument, match=rf"cannot read .*{FILE}: Permission denied"):
        list(loader.named_tensors(tmp_path))
