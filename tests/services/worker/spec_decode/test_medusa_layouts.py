"""Medusa heads in vLLM's format compute the same as in the authors' format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from quire.services.worker.spec_decode.config import SpeculativeConfig, parse
from quire.services.worker.spec_decode.methods.medusa import Medusa
from quire.shared.errors import InvalidArgument
from tests.services.worker.spec_decode.test_published_heads import SIZE, VOCAB, Tensors, drawn, folder_of, target

CONFIG: dict[str, Any] = {"model_type": "medusa", "hidden_size": SIZE, "vocab_size": VOCAB, "num_heads": 3}
KNOWN = torch.tensor([5, 0, 17, 63, 2])  # token ids of heads with a reduced vocabulary


def linears(num_blocks: int, *, biased: bool = False) -> Tensors:
    tensors = {}
    for head in range(3):
        for block in range(num_blocks):
            name = f"blocks.{head}.layers.{block}"
            tensors[f"{name}.weight"] = drawn(SIZE, SIZE, seed=10 * head + block)
            if biased:
                tensors[f"{name}.bias"] = drawn(SIZE, seed=100 + 10 * head + block)
    return tensors


def outputs(rows: int = VOCAB) -> Tensors:
    return {f"lm_heads.{head}.weight": drawn(rows, SIZE, seed=200 + head) for head in range(3)}


def loaded(path: Path, config: dict[str, Any], tensors: Tensors, load_format: str = "auto") -> tuple[Medusa, Any]:
    folder, given = folder_of(path, CONFIG | config, tensors), target(load_format)
    return Medusa(SpeculativeConfig(method="medusa", num_speculative_tokens=2, model=str(folder)), given), given.model


def states(tensors: Tensors, head: int, num_blocks: int, features: torch.Tensor) -> torch.Tensor:
    for block in range(num_blocks):
        name = f"blocks.{head}.layers.{block}"
        features = features + F.silu(F.linear(features, tensors[f"{name}.weight"], tensors.get(f"{name}.bias")))
    return features


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize(
    ("num_blocks", "config", "more"),
    [
        (1, {}, outputs()),
        (2, {"num_hidden_layers": 2, "medusa_fc_bias": True}, outputs()),
        (1, {"original_lm_head": True}, {"lm_head.weight": drawn(VOCAB, SIZE, seed=300)}),
        (1, {"original_lm_head": True}, outputs()),  # the first one is used
        (1, {"truncated_vocab_size": 5}, {**outputs(5), "token_map": KNOWN}),
        (1, {"truncated_vocab_size": VOCAB}, {**outputs(), "token_map": torch.arange(VOCAB)}),
    ],
    ids=["plain", "two-blocks-biased", "one-output", "first-output", "some-tokens", "all-tokens"],
)
def test_heads_compute_the_same_as_in_vllm(
    num_blocks: int, config: dict[str, Any], more: Tensors, prefix: str, tmp_path: Path
) -> None:
    tensors = linears(num_blocks, biased=bool(config.get("medusa_fc_bias"))) | more
    medusa, model = loaded(tmp_path, config, {prefix + name: tensor for name, tensor in tensors.items()})
    assert medusa.heads.num_heads == 3
    features = drawn(7, SIZE, seed=3)
    for head in range(3):
        of_all = "lm_head.weight" if "lm_head.weight" in more else "lm_heads.0.weight"
        output = more[of_all if config.get("original_lm_head") else f"lm_heads.{head}.weight"]
        wanted = states(tensors, head, num_blocks, features) @ output.T
        if len(output) < VOCAB:
            wanted = torch.full((7, VOCAB), float("-inf")).index_copy(1, KNOWN, wanted)
        torch.testing.assert_close(medusa.heads.logits(model, features, head), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "changes", "text"),
    [
        ({"num_heads": 0}, {}, "num_heads is 0; there are 1 to 128"),
        ({"num_heads": None}, {}, "num_heads is None: a whole number is needed"),
        ({"num_hidden_layers": 129}, {}, "num_hidden_layers is 129; there are 1 to 128"),
        ({"hidden_size": 32}, {}, "the heads' hidden_size is 32, the model's 64"),
        ({"vocab_size": 60}, {}, "the heads' vocab_size is 60, the model's 64"),
        ({"truncated_vocab_size": 65}, {}, "truncated_vocab_size is 65, the model has 64 tokens"),
        ({"truncated_vocab_size": 5}, outputs(5), "lacks tensors that the model needs: token_map"),
        (
            {"truncated_vocab_size": 5},
            {**outputs(5), "token_map": KNOWN + 1},
            "token_map names token 64, the model has",
        ),
        ({"medusa_fc_bias": True}, {}, r"lacks tensors that the model needs: blocks\.0\.layers\.0\.bias"),
        ({"num_heads": 4}, {}, r"lacks tensors that the model needs: blocks\.3\.layers\.0\.weight"),
        ({"num_heads": 2}, {}, r"holds tensors that the model does not have: blocks\.2\.layers\.0\.weight"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(
    config: dict[str, Any], changes: Tensors, text: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        loaded(tmp_path, config, linears(1) | outputs() | changes)


@torch.inference_mode()
def test_random_weights_need_no_tensor_names(tmp_path: Path) -> None:
    medusa, model = loaded(tmp_path, {"truncated_vocab_size": 5}, {"nothing": torch.ones(1)}, "dummy")
    logits = medusa.heads.logits(model, drawn(7, SIZE, seed=3), 2)
    assert logits[:, :5].isfinite().all()
    assert (logits[:, 5:] == float("-inf")).all()


def test_a_medusa_checkpoint_is_detected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = parse(json.dumps({"num_speculative_tokens": 2, "model": str(tmp_path)}))
    assert found is not None
    assert found.method == "medusa"
