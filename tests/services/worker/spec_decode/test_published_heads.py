"""EAGLE and Medusa heads in the authors' format, compared with the papers' definitions in plain torch, and drafting."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from quire import kernels
from quire.services.worker.attention.port import AttentionMetadata
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.families.llama import LlamaForCausalLM
from quire.services.worker.models.loading.loader import Loader
from quire.services.worker.spec_decode.config import SpeculativeConfig, parse
from quire.services.worker.spec_decode.drafter import DraftTarget
from quire.services.worker.spec_decode.methods.eagle import Eagle
from quire.services.worker.spec_decode.methods.medusa import Medusa
from quire.shared.errors import InvalidArgument
from tests.spec_decode.pair import Pair, build

VOCAB, SIZE, HEADS, KV_HEADS, HEAD_DIM = 64, 64, 4, 2, 16
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
EAGLE = MODEL | {"num_hidden_layers": 1}
NORMS = {"add_para_norm": True, "skip_prenorm": False, "skip_output_norm": False}
MEDUSA = {"base_model_name_or_path": "somebody/model", "medusa_num_heads": 2, "medusa_num_layers": 1}
LAYER = {
    "self_attn.q_proj": (SIZE, SIZE),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, SIZE),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, SIZE),
    "self_attn.o_proj": (SIZE, SIZE),
    "mlp.gate_proj": (96, SIZE),
    "mlp.up_proj": (96, SIZE),
    "mlp.down_proj": (SIZE, 96),
}
Tensors = dict[str, Tensor]


def drawn(*shape: int, seed: int) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise * shape[1] ** -0.5 if len(shape) > 1 else 1 + 0.2 * noise


def folder_of(path: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(whole, path / file)
    else:
        torch.save(whole, path / file)
    return path


def eagle_tensors(scale: float = 1.0) -> Tensors:
    """Returns random weights. `scale`: of the layer's contribution."""
    tensors = {
        f"layers.0.{name}.weight": drawn(*shape, seed=i) * (scale if name.endswith(("o_proj", "down_proj")) else 1)
        for i, (name, shape) in enumerate(LAYER.items())
    }
    tensors["layers.0.post_attention_layernorm.weight"] = drawn(SIZE, seed=20)
    return tensors | {"fc.weight": drawn(SIZE, 2 * SIZE, seed=21), "embed_tokens.weight": drawn(VOCAB, SIZE, seed=22)}


def norm_tensors() -> Tensors:
    names = ("enorm", "hnorm", "layers.0.input_layernorm", "norm")
    return {f"{name}.weight": drawn(SIZE, seed=30 + i) for i, name in enumerate(names)}


def target(load_format: str = "auto") -> DraftTarget:
    """Returns a model without decoder layers."""
    embedding, output = drawn(VOCAB, SIZE, seed=40), drawn(VOCAB, SIZE, seed=41)
    model: Any = SimpleNamespace(
        config=LlamaForCausalLM.read(ConfigFile(MODEL)),
        embedding=lambda ids: embedding[ids.long()],
        table=embedding,
        whole_logits=lambda features: features @ output.T,
        output=output,
    )
    place = LayerPlacement(kernels.load("cpu"), torch.float32, torch.device("cpu"))
    limits = WorkerLimits(block_size=16, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, num_blocks=8)
    return DraftTarget(model, place, limits, "auto", Loader(load_format, 0), Path())


def rms(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else F.rms_norm(x, (x.size(-1),), weight, MODEL["rms_norm_eps"])


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotates [num_tokens, num_heads, head_dim] by halves, as Llama does."""
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def reference_eagle(tensors: Tensors, embedded: Tensor, features: Tensor) -> Tensor:
    """Computes a whole sequence without a KV cache (arXiv 2401.15077, figure 6)."""
    of = tensors.get
    both = torch.cat((rms(embedded, of("enorm.weight")), rms(features, of("hnorm.weight"))), dim=-1)
    x = F.linear(both, tensors["fc.weight"], of("fc.bias"))
    normed, positions = rms(x, of("layers.0.input_layernorm.weight")), torch.arange(len(x))
    q, k, v = (
        F.linear(normed, tensors[f"layers.0.self_attn.{n}_proj.weight"], of(f"layers.0.self_attn.{n}_proj.bias"))
        for n in "qkv"
    )
    q, k, v = (part.unflatten(1, (-1, HEAD_DIM)) for part in (q, k, v))
    q, k = rotated(q, positions), rotated(k, positions)
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
    attended = F.scaled_dot_product_attention(*(p.transpose(0, 1) for p in (q, k, v)), is_causal=True)
    x = x + F.linear(attended.transpose(0, 1).flatten(1), tensors["layers.0.self_attn.o_proj.weight"])
    normed = rms(x, tensors["layers.0.post_attention_layernorm.weight"])
    gate, up, down = (tensors[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    x = x + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)
    return rms(x, of("norm.weight"))


def batch(tokens: Tensor, first: int) -> ForwardBatch:
    """Returns a batch from position `first` on, in blocks 1 and 2."""
    count, positions = len(tokens), torch.arange(first, first + len(tokens), dtype=torch.int32)
    lens = torch.tensor([first + count], dtype=torch.int32)
    tables, starts = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32)
    attention = AttentionMetadata(tables, starts, lens, max_query_len=count, max_seq_len=first + count)
    return ForwardBatch(tokens.int(), positions, positions + 16, attention, None)


QKV_BIASES = {
    f"layers.0.self_attn.{n}_proj.bias": drawn(1, LAYER[f"self_attn.{n}_proj"][0], seed=60 + i)[0]
    for i, n in enumerate("qkv")
}


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {}),
        ({}, {"fc.bias": drawn(SIZE, seed=50), "lm_head.weight": drawn(VOCAB, SIZE, seed=51)}),
        ({"qkv_bias": True}, QKV_BIASES),
        ({"architectures": ["Qwen2ForCausalLM"]}, QKV_BIASES),
        (NORMS, norm_tensors()),
    ],
)
def test_an_eagle_head_computes_the_published_definition(
    changes: dict[str, Any], more: Tensors, file: str, tmp_path: Path
) -> None:
    """Runs a prompt in two chunks, then two drafts from the head's own features."""
    tensors, given = eagle_tensors() | more, target()
    folder = folder_of(tmp_path, EAGLE | changes, tensors, file)
    eagle = Eagle(SpeculativeConfig(method="eagle", num_speculative_tokens=2, model=str(folder)), given)
    tokens, features = torch.arange(3, 23), drawn(20, SIZE, seed=1) * 8
    memory = torch.zeros(8, 16, KV_HEADS, HEAD_DIM)
    cache, model, found = LayerCache(memory.clone(), memory.clone()), given.model, []
    with torch.inference_mode():
        for start, stop in ((0, 13), (13, 18)):
            part = batch(tokens[start:stop], start)
            found.append(eagle.head(model, features[start:stop].clone(), part, cache))
        for at in (18, 19):
            found.append(eagle.head(model, found[-1][-1:].clone(), batch(tokens[at : at + 1], at), cache))
        seen = features[:18]
        for _ in range(2):
            seen = torch.cat((seen, reference_eagle(tensors, model.table[tokens[: len(seen)]], seen)[-1:]))
        wanted = reference_eagle(tensors, model.table[tokens], seen)
    torch.testing.assert_close(torch.cat(found), wanted, atol=2e-5, rtol=1e-4)


def medusa_tensors(num_heads: int, num_blocks: int, *, own: bool) -> Tensors:
    tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors[f"{head}.{block}.linear.weight"] = drawn(SIZE, SIZE, seed=10 * head + block)
            tensors[f"{head}.{block}.linear.bias"] = drawn(SIZE, seed=100 + 10 * head + block)
        if own:
            tensors[f"{head}.{num_blocks}.weight"] = drawn(VOCAB, SIZE, seed=200 + head)
    return tensors


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize(("num_heads", "num_blocks", "own"), [(2, 1, True), (5, 1, True), (3, 2, True), (2, 1, False)])
def test_medusa_heads_compute_the_published_definition(
    num_heads: int, num_blocks: int, own: bool, file: str, tmp_path: Path
) -> None:
    """Published files contain more heads than their config.json states."""
    tensors, given = medusa_tensors(num_heads, num_blocks, own=own), target()
    folder = folder_of(tmp_path, MEDUSA | {"medusa_num_layers": num_blocks}, tensors, file)
    medusa = Medusa(SpeculativeConfig(method="medusa", num_speculative_tokens=2, model=str(folder)), given)
    assert medusa.heads.num_heads == num_heads
    features = drawn(7, SIZE, seed=3)
    for head in range(num_heads):
        x = features
        for block in range(num_blocks):
            x = x + F.silu(
                F.linear(x, tensors[f"{head}.{block}.linear.weight"], tensors[f"{head}.{block}.linear.bias"])
            )
        wanted = x @ tensors[f"{head}.{num_blocks}.weight"].T if own else given.model.whole_logits(x)
        found = medusa.heads.logits(given.model, features, head)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "lacking", "text"),
    [
        ({"hidden_size": 32}, "", "the head's hidden_size is 32, the model's 64"),
        ({"vocab_size": 60}, "", "the head's vocab_size is 60, the model's 64"),
        ({"num_hidden_layers": 2}, "", "num_hidden_layers is 2, it must be 1"),
        ({"draft_vocab_size": 32}, "", "an EAGLE-3 head"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "", "an EAGLE-3 head"),
        ({"skip_output_norm": "no"}, "", "skip_output_norm is 'no': true or false is needed"),
        ({"skip_output_norm": False}, "", "lacks tensors that the model needs: model.norm.weight"),
        ({}, "fc.weight", "lacks tensors that the model needs: model.fc.weight"),
        ({"intermediate_size": 48}, "", r"down_proj.weight has shape \[64, 96\], config.json implies \[64, 48\]"),
    ],
)
def test_an_eagle_head_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], lacking: str, text: str, tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in eagle_tensors().items() if name != lacking}
    folder = folder_of(tmp_path, EAGLE | changes, tensors)
    with pytest.raises(InvalidArgument, match=text):
        Eagle(SpeculativeConfig(method="eagle", num_speculative_tokens=2, model=str(folder)), target())


@pytest.mark.parametrize(
    ("changes", "lacking", "text"),
    [
        ({"medusa_num_heads": 0}, "", "medusa_num_heads is 0; it must be 1 to 128"),
        ({"medusa_num_heads": 10**9}, "", "medusa_num_heads is 1000000000; it must be 1 to 128"),
        ({"medusa_num_layers": 2}, "", "lacks tensors that the model needs: 0.1.linear.weight"),
        ({"hidden_size": 32}, "", "the heads' hidden_size is 32, the model's 64"),
        ({"medusa_num_heads": 3}, "", "lacks tensors that the model needs: 2.0.linear.weight"),
        ({}, "1.1.weight", "lacks tensors that the model needs: 1.1.weight"),
    ],
)
def test_medusa_heads_that_do_not_fit_are_refused_by_name(
    changes: dict[str, Any], lacking: str, text: str, tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in medusa_tensors(2, 1, own=True).items() if name != lacking}
    folder = folder_of(tmp_path, MEDUSA | changes, tensors)
    with pytest.raises(InvalidArgument, match=text):
        Medusa(SpeculativeConfig(method="medusa", num_speculative_tokens=2, model=str(folder)), target())


def test_a_huge_head_number_allocates_no_memory(tmp_path: Path) -> None:
    tensors = medusa_tensors(1, 1, own=True) | {"99999999.1.weight": torch.ones(1, 1)}
    folder = folder_of(tmp_path, MEDUSA, tensors)
    with pytest.raises(InvalidArgument, match="a tensor of head 99999999; there are at most 128 heads"):
        Medusa(SpeculativeConfig(method="medusa", num_speculative_tokens=2, model=str(folder)), target())


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (MEDUSA, "medusa"),
        ({"architectures": ["MedusaModel"]}, "medusa"),
        (EAGLE | {"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        (MODEL, "draft_model"),
    ],
)
def test_the_method_is_detected_from_the_checkpoint(config: dict[str, Any], method: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = parse(json.dumps({"num_speculative_tokens": 2, "model": str(tmp_path)}))
    assert found is not None
    assert found.method == method


def test_a_single_layer_is_ambiguous(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EAGLE))
    with pytest.raises(InvalidArgument, match="num_hidden_layers is 1: use the method eagle or draft_model"):
        parse(json.dumps({"num_speculative_tokens": 2, "model": str(tmp_path)}))


def successor(token: Tensor) -> Tensor:
    return (token * 5 + 3) % VOCAB


def ring_of_tokens() -> tuple[Tensor, Tensor]:
    """Returns embeddings, and an output embedding with which each token is followed by its successor."""
    embedding, _ = torch.linalg.qr(torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(5)))
    output = torch.empty_like(embedding)
    output[successor(torch.arange(VOCAB))] = embedding
    return embedding * 4, output * 4


def ring_model(path: Path) -> Path:
    """Writes a model whose layers add nothing, so that the next token depends on the last one alone."""
    embedding, output = ring_of_tokens()
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": output, "model.norm.weight": torch.ones(SIZE)}
    for index in range(MODEL["num_hidden_layers"]):
        layer = eagle_tensors(scale=0.0) | {"layers.0.input_layernorm.weight": torch.ones(SIZE)}
        tensors |= {f"model.layers.{index}.{n.removeprefix('layers.0.')}": t for n, t in layer.items() if "layers" in n}
    return folder_of(path, MODEL, tensors)


def right_eagle() -> Tensors:
    """Returns an EAGLE head whose drafts follow from the token alone."""
    return eagle_tensors(scale=0.0) | {"fc.weight": torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), dim=1)}


def right_medusa() -> Tensors:
    """Returns Medusa heads of which head k follows the ring k + 2 times."""
    tensors, (embedding, _), ends = medusa_tensors(2, 1, own=True), ring_of_tokens(), successor(torch.arange(VOCAB))
    for head in range(2):
        ends = successor(ends)
        tensors[f"{head}.0.linear.weight"].zero_()
        tensors[f"{head}.0.linear.bias"].zero_()
        tensors[f"{head}.1.weight"][ends] = embedding
    return tensors


@pytest.mark.parametrize(
    ("method", "config", "wrong", "right"),
    [
        ("eagle", EAGLE, eagle_tensors(), right_eagle()),
        ("medusa", MEDUSA, medusa_tensors(2, 1, own=True), right_medusa()),
    ],
)
def test_right_heads_are_accepted_and_wrong_ones_change_no_text(
    method: str, config: dict[str, Any], wrong: Tensors, right: Tensors, tmp_path: Path
) -> None:
    model, rates = ring_model(tmp_path / "model"), []
    for tensors in (None, wrong, right):
        speculation = None
        if tensors is not None:
            folder = folder_of(tmp_path / "head", config, tensors)
            speculation = {"method": method, "num_speculative_tokens": 2, "model": str(folder)}
            speculation["adaptive_length"] = False
        pair = Pair(build(speculation, model, num_blocks=64, max_num_seqs=4))
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
