"""EAGLE-3 heads in the authors' format, compared with their definition in plain torch, and drafting with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.spec_decode.config import SpeculativeConfig, parse
from quire.services.worker.spec_decode.draft_models.eagle3_head import read_eagle3
from quire.services.worker.spec_decode.methods.eagle3 import Eagle3
from quire.shared.errors import InvalidArgument
from tests.services.worker.replica_internals import runner_of, whole_model_of
from tests.services.worker.rig import Rig
from tests.services.worker.spec_decode.test_published_heads import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYER,
    MODEL,
    SIZE,
    VOCAB,
    Tensors,
    batch,
    drawn,
    folder_of,
    ring_model,
    ring_of_tokens,
    rms,
    rotated,
    successor,
    target,
)
from tests.spec_decode.pair import Pair, build

DRAFT_VOCAB = 40
HEAD: dict[str, Any] = MODEL | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": DRAFT_VOCAB,
}
TOKENS = torch.arange(DRAFT_VOCAB) * 3 % VOCAB  # the model's ids of the head's tokens
MAPS = {"d2t": TOKENS - torch.arange(DRAFT_VOCAB), "t2d": torch.isin(torch.arange(VOCAB), TOKENS)}


def head_tensors(scale: float = 1.0, layer: str = "midlayer", size: int = SIZE) -> Tensors:
    """Returns random weights. `scale`: of the layer's contribution."""
    tensors = {}
    for i, (name, (rows, columns)) in enumerate(LAYER.items()):
        wide = 2 * columns if name.endswith(("q_proj", "k_proj", "v_proj")) else columns
        adds = name.endswith(("o_proj", "down_proj"))
        tensors[f"{layer}.{name}.weight"] = drawn(rows, wide, seed=i) * (scale if adds else 1)
    for i, name in enumerate(("hidden_norm", "input_layernorm", "post_attention_layernorm")):
        tensors[f"{layer}.{name}.weight"] = drawn(size, seed=20 + i)
    ends = {"norm.weight": drawn(size, seed=30), "fc.weight": drawn(size, 3 * SIZE, seed=31)}
    return tensors | ends | MAPS | {"lm_head.weight": drawn(DRAFT_VOCAB, size, seed=32)}


def reference(tensors: Tensors, embedded: Tensor, features: Tensor, *, normed_residual: bool) -> Tensor:
    """Computes a whole sequence without a KV cache."""
    of = {name.partition(".")[2] if name.startswith("midlayer") else name: t for name, t in tensors.items()}
    normed = rms(features, of["hidden_norm.weight"])
    both = torch.cat((rms(embedded, of["input_layernorm.weight"]), normed), dim=-1)
    q, k, v = (F.linear(both, of[f"self_attn.{n}_proj.weight"]).unflatten(1, (-1, HEAD_DIM)) for n in "qkv")
    positions = torch.arange(len(both))
    q, k = rotated(q, positions), rotated(k, positions)
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
    attended = F.scaled_dot_product_attention(*(p.transpose(0, 1) for p in (q, k, v)), is_causal=True)
    x = normed if normed_residual else features
    x = x + F.linear(attended.transpose(0, 1).flatten(1), of["self_attn.o_proj.weight"])
    inner = rms(x, of["post_attention_layernorm.weight"])
    gate, up, down = (of[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + F.linear(F.silu(F.linear(inner, gate)) * F.linear(inner, up), down)


def opened(folder: Path, given: Any) -> Eagle3:
    given.model.keep_states = lambda layers: setattr(given.model, "kept", layers)
    return Eagle3(SpeculativeConfig(method="eagle3", num_speculative_tokens=2, model=str(folder)), given)


@pytest.mark.parametrize("normed_residual", [False, True])
def test_a_head_computes_the_published_definition(normed_residual: bool, tmp_path: Path) -> None:
    """Runs a prompt in two chunks, then two drafts from the head's own features."""
    tensors, given = head_tensors(), target()
    eagle = opened(folder_of(tmp_path, HEAD | {"norm_before_residual": normed_residual}, tensors), given)
    tokens, states = torch.arange(3, 23), drawn(20, 4 * SIZE, seed=1) * 8
    memory = torch.zeros(8, 16, KV_HEADS, HEAD_DIM)
    cache, model, found = LayerCache(memory.clone(), memory.clone()), given.model, []
    with torch.inference_mode():
        features = eagle.head.project_states(states)
        for start, stop in ((0, 13), (13, 18)):
            part = batch(tokens[start:stop], start)
            found.append(eagle.head(model, features[start:stop].clone(), part, cache))
        for at in (18, 19):
            found.append(eagle.head(model, found[-1][-1:].clone(), batch(tokens[at : at + 1], at), cache))
        seen = F.linear(states[:18, SIZE:], tensors["fc.weight"])
        for _ in range(2):
            embedded = model.table[tokens[: len(seen)]]
            seen = torch.cat((seen, reference(tensors, embedded, seen, normed_residual=normed_residual)[-1:]))
        wanted = reference(tensors, model.table[tokens], seen, normed_residual=normed_residual)
        logits = eagle.logits(torch.cat(found))
        of_head = F.linear(rms(wanted, tensors["norm.weight"]), tensors["lm_head.weight"])
    torch.testing.assert_close(torch.cat(found), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits[:, TOKENS], of_head, atol=2e-5, rtol=1e-4)
    assert logits[:, ~MAPS["t2d"]].eq(float("-inf")).all()


def test_kept_layer_inputs_follow_the_hidden_states(tmp_path: Path) -> None:
    """Compares tape and separate kernels, for all tokens of a step and for some."""
    folder = ring_model(tmp_path / "model")
    found: list[Tensor] = []
    for backend in ("auto", "reference"):
        rig = Rig(folder, attention_backend=backend, block_size=16, record_logits=False)
        model = whole_model_of(rig.replica)
        with torch.inference_mode():
            plain = model.forward(batch(torch.arange(3, 12), 0), runner_of(rig.replica).caches)
            model.keep_states((0, 1, 1))
            found.append(model.forward(batch(torch.arange(3, 12), 0), runner_of(rig.replica).caches))
        assert (found[-1][:, :SIZE] == plain).all()
        assert torch.equal(model.logits(found[-1]), model.logits(plain))
        embedded = model.embedding(torch.arange(3, 12, dtype=torch.int32))
        torch.testing.assert_close(found[-1][:, SIZE : 2 * SIZE], embedded)
        assert torch.equal(found[-1][:, 2 * SIZE : 3 * SIZE], found[-1][:, 3 * SIZE :])
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "lacking", "text"),
    [
        ({"vocab_size": 60}, "", "the head's vocab_size is 60, the model's 64"),
        ({"target_hidden_size": 32}, "", "the head's target_hidden_size is 32, the model's 64"),
        ({"draft_vocab_size": 65}, "", "draft_vocab_size is 65, the model has 64 tokens"),
        ({"num_hidden_layers": 2}, "", "num_hidden_layers is 2, it must be 1"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
            "",
            r"\[0, 1, 2\]: 3 layers of the model's 2",
        ),
        ({}, "d2t", "lacks tensors that the model needs: d2t"),
        ({}, "fc.weight", "lacks tensors that the model needs: fc.weight"),
        ({"hidden_size": 32, "head_dim": 8}, "", "has shape"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], lacking: str, text: str, tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in head_tensors().items() if name != lacking}
    with pytest.raises(InvalidArgument, match=text):
        opened(folder_of(tmp_path, HEAD | changes, tensors), target())


def test_a_map_that_points_out_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tensors = head_tensors() | {"d2t": torch.full((DRAFT_VOCAB,), VOCAB)}
    with pytest.raises(InvalidArgument, match="d2t points to token 103, the model has 64"):
        opened(folder_of(tmp_path, HEAD, tensors), target())


def test_an_eagle3_checkpoint_is_detected(tmp_path: Path) -> None:
    for config in (HEAD, MODEL | {"draft_vocab_size": 32, "num_hidden_layers": 1}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = parse(json.dumps({"num_speculative_tokens": 2, "model": str(tmp_path)}))
        assert found is not None
        assert found.method == "eagle3"


def test_layers_default_to_the_authors_choice() -> None:
    model = target().model.config
    deep = type(model)(**{name: getattr(model, name) for name in model.__dataclass_fields__} | {"num_layers": 32})
    assert read_eagle3(HEAD, deep).layers == (2, 16, 29)
    named = HEAD | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 31]}}
    assert read_eagle3(named, deep).layers == (1, 2, 31)
    assert read_eagle3(HEAD, model).layers == (0, 1, 1)


def right_head() -> Tensors:
    """Returns a head whose drafts are always accepted: its layer adds nothing and `fc` selects the input of the model's
    first layer, the embedding of the second to last token, whose second successor the output head returns."""
    embedding, _ = ring_of_tokens()
    tensors = {name: tensor for name, tensor in head_tensors(scale=0.0).items() if name not in MAPS}
    output = torch.zeros(VOCAB, SIZE)
    output[successor(successor(torch.arange(VOCAB)))] = embedding
    fc = torch.cat((torch.eye(SIZE), torch.zeros(SIZE, 2 * SIZE)), dim=1)
    return tensors | {"fc.weight": fc, "norm.weight": torch.ones(SIZE), "lm_head.weight": output}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_backend": "reference"},
        pytest.param({"device": "cuda", "dtype": "bfloat16"}, marks=pytest.mark.gpu),
    ],
)
def test_a_right_head_is_accepted_and_a_wrong_one_changes_no_text(settings: dict[str, Any], tmp_path: Path) -> None:
    """Runs on the tape, kernel by kernel, and in CUDA graphs."""
    model, rates = ring_model(tmp_path / "model"), []
    for tensors, vocab_size in ((None, 0), (head_tensors(), DRAFT_VOCAB), (right_head(), VOCAB)):
        speculation = None
        if tensors is not None:
            folder = folder_of(tmp_path / "head", HEAD | {"draft_vocab_size": vocab_size}, tensors)
            speculation = {"method": "eagle3", "num_speculative_tokens": 1, "model": str(folder)}
            speculation["adaptive_length"] = False
        pair = Pair(build(speculation, model, num_blocks=64, max_num_seqs=4, **settings))
        for first in range(4):
            pair.ask(list(range(first, first + 7 * first + 1)), 40, eos=())
        pair.run()
        for answer in pair.answers:
            token = torch.tensor(answer.prompt[-1])
            for actual in answer.tokens:
                token = successor(token)
                assert actual == token
            assert len(answer.tokens) == 40
        counts = pair.core.speculation.counts
        rates.append(counts.accepted_tokens / max(1, counts.draft_tokens))
    assert rates[0] == 0
    assert rates[1] < 0.3
    assert rates[2] == 1


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"device": "cuda", "dtype": "bfloat16"}, marks=pytest.mark.gpu)], ids=str
)
def test_trees_of_a_head_with_a_small_vocabulary(settings: dict[str, Any], tmp_path: Path) -> None:
    """Tokens outside of the head's vocabulary are never guessed, so that trees may be smaller; the text is
    unchanged."""
    model, means = ring_model(tmp_path / "model"), []
    for tensors, vocab_size in ((head_tensors(), DRAFT_VOCAB), (right_head(), VOCAB)):
        folder = folder_of(tmp_path / "head", HEAD | {"draft_vocab_size": vocab_size}, tensors)
        tree = str([(rank,) for rank in range(VOCAB - 10)] + [(0, 0), (1, 0)])
        config = {"method": "eagle3", "num_speculative_tokens": 50, "model": str(folder), "adaptive_length": False}
        config["speculative_token_tree"] = tree
        pair = Pair(build(config, model, num_blocks=128, max_num_seqs=4, **settings))
        for first in range(4):
            pair.ask(list(range(first, first + 7 * first + 1)), 40, eos=())
        pair.run()
        for answer in pair.answers:
            token = torch.tensor(answer.prompt[-1])
            for actual in answer.tokens:
                token = successor(token)
                assert actual == token
        counts = pair.core.speculation.counts
        means.append((counts.draft_tokens / counts.drafts, counts.accepted_tokens / counts.drafts))
    assert means[0][0] < means[1][0] <= 50
    assert means[0][1] < means[1][1]
    assert means[1][1] >= 1
