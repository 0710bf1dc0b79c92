"""Dense layers in subfolders: loaded weights do not depend on the files that they were read from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.services.worker.heads.sentence_head import Dense
from quire.shared.errors import InvalidArgument
from quire.shared.models.sentence_transformers import DenseModule

IN, OUT = 64, 32
CPU = torch.device("cpu")


@pytest.fixture
def module(tmp_path: Path) -> DenseModule:
    (tmp_path / "2_Dense").mkdir()
    tensors = {"linear.weight": torch.randn(OUT, IN), "linear.bias": torch.randn(OUT)}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    return DenseModule(folder="2_Dense", in_features=IN, out_features=OUT, bias=True, activation="tanh")


def test_overwriting_a_served_file_changes_nothing(tmp_path: Path, module: DenseModule) -> None:
    dense, x = Dense(tmp_path, module, CPU, load=True), torch.randn(3, IN)
    before = dense(x)
    with (tmp_path / "2_Dense" / "model.safetensors").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        file.write(b"\0" * size)
    assert torch.equal(dense(x), before), "truncating the file does not end the process either"


def test_the_error_names_a_truncated_file(tmp_path: Path, module: DenseModule) -> None:
    os.truncate(tmp_path / "2_Dense" / "model.safetensors", 200)
    with pytest.raises(InvalidArgument, match=r"cannot read .*2_Dense"):
        Dense(tmp_path, module, CPU, load=True)
