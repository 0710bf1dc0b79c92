"""Weights are read only from folders that the operator named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.services.worker.host.weight_folders import WeightFolders
from quire.shared.errors import FailedPrecondition, InvalidArgument


def test_paths_outside_have_the_same_error_whether_they_exist(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "a", outside):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    folders = WeightFolders([str(inside)])
    assert folders.find("a") == folders.find(str(inside / "a")) == inside / "a"
    (inside / "link").symlink_to(outside)
    for path in ("../out", "../nowhere", str(outside), "link"):
        with pytest.raises(InvalidArgument, match=r"must be in one of the worker's weights_folders"):
            folders.find(path)
    (inside / "a" / "model.safetensors").symlink_to(outside / "config.json")
    with pytest.raises(InvalidArgument, match=r"has a model\.safetensors that links to a place outside"):
        folders.find("a")
    (inside / "b").mkdir()
    os.mkfifo(inside / "b" / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"model\.safetensors that is not a regular file"):
        folders.find("b")
    with pytest.raises(InvalidArgument, match="is not a folder"):
        folders.find("c")


def test_without_folders_nothing_is_read(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="weights_folders"):
        WeightFolders(()).find(str(tmp_path))
