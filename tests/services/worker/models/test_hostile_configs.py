"""A config.json with absurd sizes, or of another format, is rejected in one line before anything is allocated."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from quire.services.worker.models.registry import check_config
from quire.shared.errors import InvalidArgument
from quire.shared.models import model_identity
from quire.shared.models.model_identity import identity, read_config
from tests.services.worker.checkpoints import FAMILIES
from tests.services.worker.models.test_absent_fields import family_config

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
FAMILIES_TRIED = ("llama", "qwen2-windows", "gemma3-tied", "llama4", "gpt2", "mixtral", "deepseek-v3", "gpt-neox")


@pytest.mark.parametrize("value", [-1, 0, 10**9 + 10**10, 10**30])
@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_an_absurd_size_is_named(family: str, field: str, value: int) -> None:
    values = family_config(family)
    named = {name: name for name in values} | {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"}
    named |= {"num_attention_heads": "n_head", "max_position_embeddings": "n_positions"} if family == "gpt2" else {}
    name = named[field] if family == "gpt2" else field
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidArgument, match=rf"config\.json: {name} is .*: must be from 1 to"):
        check_config(values | {name: value})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim", "intermediate_size"])
@pytest.mark.parametrize("value", [-8, 0, 1 << 40])
def test_absurd_sizes_of_layer_parts_are_named(name: str, value: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"config\.json: {name} is {value}: must be from 1 to"):
        check_config(family_config("llama") | {name: value})


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_are_within_the_bounds(family: str) -> None:
    check_config(family_config(family))


@pytest.mark.parametrize("value", [None, -1, 0, 1 << 40, "211", 2.5, True, 10**400])
def test_invalid_vocabulary_is_named(tmp_path: Path, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": value} if value is not None else {}))
    with pytest.raises(InvalidArgument, match=r"^config\.json: vocab_size is .{1,80}: a whole number from 1 to"):
        identity(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "is nested too deeply"),
        ("[1]", "is not a JSON object"),
        ("{'a': 1}", "is not JSON"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "is not JSON"),
        (" " * ((16 << 20) + 1), "at most 16777216 are read"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidArgument, match=reason) as refused:
        read_config(tmp_path)
    assert "\n" not in refused.value.message


def test_named_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InvalidArgument, match="is not a regular file"):
        read_config(tmp_path)


def test_missing_folders_differ_from_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"nowhere' does not exist; give the path of"):
        model_identity.read_config(tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match=r"is not a Hugging Face folder: no config\.json$"):
        model_identity.read_config(tmp_path)
