"""A cluster for a GGUF file: every service gets the converted folder, and the model the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cluster.options import ClusterOptions
from quire.shared.models.model_identity import read_config
from tests import gguf_files


def test_a_file_is_a_model_of_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = gguf_files.small(tmp_path / "my-model.Q8_0.gguf", "qwen3")
    located = ClusterOptions(model=str(file)).located()
    assert located.model_name == "my-model.Q8_0"
    assert read_config(located.model_folder)["model_type"] == "qwen3"
    assert ClusterOptions(model=str(file), served_model_name="mine").located().model_name == "mine"
