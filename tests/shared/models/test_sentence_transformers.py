"""Reading of sentence-transformers folders, and refusal of unsupported ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.models.late_interaction import LateInteraction
from quire.shared.models.sentence_transformers import (
    DenseModule,
    SentenceModel,
    has_identity_score_activation,
    read_sentence_model,
)

OLD, NEW = "sentence_transformers.models", "sentence_transformers.base.modules"


def write(folder: Path, *modules: tuple[str, dict[str, Any]], package: str = OLD, **files: dict[str, Any]) -> Path:
    listed = []
    for number, (kind, config) in enumerate(modules):
        path = f"{number}_{kind}" if number else ""
        listed.append({"idx": number, "name": str(number), "path": path, "type": f"{package}.{kind}"})
        (folder / path).mkdir(exist_ok=True)
        if number:
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


TRANSFORMER = ("Transformer", {})
MEAN = ("Pooling", {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True})
NORMALIZE = ("Normalize", {})
DENSE = {"in_features": 8, "out_features": 4, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}


def test_a_folder_of_transformers_says_nothing(tmp_path: Path) -> None:
    assert read_sentence_model(tmp_path) is None


def test_modules_prompts_and_lengths(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        TRANSFORMER,
        MEAN,
        ("Dense", DENSE),
        NORMALIZE,
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "search: "}, "default_prompt_name": "query"},
    )
    dense = DenseModule("2_Dense", 8, 4, False, "none")
    assert read_sentence_model(folder) == SentenceModel(
        ("mean",), (dense,), True, 256, True, {"query": "search: "}, "query"
    )


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, ("cls", "max")),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, ("last",)),
        ({"pooling_mode_weightedmean_tokens": True}, ("weighted",)),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ("mean_sqrt",)),
        ({"pooling_mode": "lasttoken"}, ("last",)),
    ],
)
def test_ways_to_pool(tmp_path: Path, config: dict[str, Any], modes: tuple[str, ...]) -> None:
    found = read_sentence_model(write(tmp_path, TRANSFORMER, ("Pooling", config), package=NEW))
    assert found is not None
    assert (found.modes, found.normalizes) == (modes, False)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ([TRANSFORMER], "its modules are Transformer"),
        ([TRANSFORMER, ("WeightedLayerPooling", {})], "WeightedLayerPooling"),
        ([TRANSFORMER, MEAN, NORMALIZE, ("Dense", DENSE)], "after Normalize"),
        ([TRANSFORMER, MEAN, ("Dense", {**DENSE, "activation_function": "x.Softsign"})], "Softsign"),
        ([TRANSFORMER, ("Pooling", {"include_prompt": False})], "include_prompt"),
        ([TRANSFORMER, ("Pooling", {})], "no pooling_mode"),
        ([TRANSFORMER, ("Pooling", {"pooling_mode": "median"})], "median"),
    ],
)
def test_what_nobody_computes_is_refused(tmp_path: Path, modules: list[Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        read_sentence_model(write(tmp_path, *modules))


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_broken_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"modules\.json"):
        read_sentence_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "raw"),
    [
        ({}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5"}}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, True),
        ({"sentence_transformers": "x"}, False),
    ],
)
def test_what_a_cross_encoder_says_of_its_scores(config: dict[str, Any], raw: bool) -> None:
    assert has_identity_score_activation(config) is raw


def test_models_that_compare_token_by_token(tmp_path: Path) -> None:
    named = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 48, "skiplist_words": ["!"]}
    folder = write(tmp_path, TRANSFORMER, ("Dense", DENSE), config_sentence_transformers=named)
    found = read_sentence_model(folder)
    assert found is not None
    assert (found.modes, found.normalizes, found.denses[-1].out_features) == (("all",), True, 4)
    assert found.late == LateInteraction(
        "[Q] ", "[D] ", 48, 180, expands=True, attends_to_mask_tokens=False, skipped=("!",)
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dim": "8"}, "dim is '8'"),
        ({"similarity": "l2"}, "similarity is 'l2'"),
        ({"query_maxlen": 1}, "query_maxlen is 1"),
    ],
)
def test_an_artifact_that_nobody_here_reads_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 16}))
    (tmp_path / "artifact.metadata").write_text(json.dumps({"dim": 8, **changes}))
    with pytest.raises(InvalidArgument, match=re.escape(text)):
        read_sentence_model(tmp_path)
