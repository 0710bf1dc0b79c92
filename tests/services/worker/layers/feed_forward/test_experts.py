"""Mixtures of experts: config.json fields and token counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from quire import kernels
from quire.services.worker.layers.feed_forward.experts import SparseMLP
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.models.families.deepseek import DeepseekV3ForCausalLM
from quire.services.worker.models.registry import read_model_config
from quire.services.worker.spec_decode.draft_models.eagle_head import read_eagle
from quire.shared.errors import InvalidArgument
from quire.shared.kv.kv_specs import Latent
from quire.shared.metrics.worker import ExpertLoadCollector
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
}
MIXTRAL = {**BASE, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
QWEN3 = {**BASE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "moe_intermediate_size": 32}
QWEN2 = {**QWEN3, "architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 96}


def test_families_choose_and_weigh_experts_in_their_own_ways() -> None:
    mixtral, qwen2 = read_model_config(MIXTRAL).experts, read_model_config(QWEN2).experts
    qwen3 = read_model_config({**QWEN3, "norm_topk_prob": True}).experts
    assert mixtral is not None
    assert qwen2 is not None
    assert qwen3 is not None
    assert (mixtral.num_experts, mixtral.intermediate_size, mixtral.routing.renormalize) == (8, 128, True)
    assert (qwen2.num_experts, qwen2.intermediate_size, qwen2.routing.renormalize) == (16, 32, False)
    assert (qwen2.shared_intermediate_size, qwen2.shared_is_gated) == (96, True)
    assert (qwen3.shared_intermediate_size, qwen3.routing.renormalize) == (0, True)


def test_layers_that_have_experts() -> None:
    def sparse(**changes: Any) -> tuple[bool, ...]:
        experts = read_model_config({**QWEN3, **changes}).experts
        assert experts is not None
        return experts.sparse_layers

    assert sparse() == (True,) * 4
    assert sparse(mlp_only_layers=[0, 3]) == (False, True, True, False)
    assert sparse(decoder_sparse_step=2) == (False, True, False, True)
    assert sparse(num_experts=None, num_local_experts=4) == (True,) * 4


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts is None: a whole number is needed"),
        ({**MIXTRAL, "num_local_experts": 4096}, "num_local_experts is 4096: 1 to 1024 experts are possible"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok is 9: a token can take 1 to 8 experts"),
        ({**QWEN3, "decoder_sparse_step": 0}, "decoder_sparse_step is 0: must be 1 or more"),
        ({**QWEN3, "mlp_only_layers": "none"}, "mlp_only_layers is 'none': a list of layers is needed"),
        ({**QWEN3, "norm_topk_prob": 1}, "norm_topk_prob is 1: true or false is needed"),
    ],
)
def test_invalid_configs_are_rejected(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_model_config(values)
    assert text in str(refused.value)


def test_quantization_is_for_dense_layers() -> None:
    experts = read_model_config(MIXTRAL).experts
    assert experts is not None
    place = LayerPlacement(kernels.load("cpu"), torch.float32, torch.device("cpu"), quantization="fp8")
    with pytest.raises(InvalidArgument, match="quantization: fp8 is supported for dense layers only"):
        SparseMLP("mlp", 64, experts, place)


def test_the_tokens_of_every_expert_are_counted(checkpoint: Callable[[str], Checkpoint]) -> None:
    """Counts are per layer; each token counts once for each of its experts."""
    rig = Rig(checkpoint("qwen2-moe").folder, attention_backend="auto")
    rig.step([New(0, list(range(11)))], {0: 11})
    rig.step()
    load = rig.replica.experts.read_load()
    assert {layer: sum(counts) for layer, counts in load.items()} == {0: 12 * 3, 2: 12 * 3}
    assert all(len(counts) == 8 for counts in load.values())


def test_dense_models_have_no_expert_counts(checkpoint: Callable[[str], Checkpoint]) -> None:
    assert Rig(checkpoint("llama").folder).replica.experts.read_load() == {}


def test_metrics_of_expert_load_balance() -> None:
    registry = CollectorRegistry()
    registry.register(ExpertLoadCollector(lambda: {0: (5, 1, 0, 2), 3: (0, 0, 0, 0)}))

    def value(name: str, layer: int) -> float | None:
        return registry.get_sample_value(name, {"layer": str(layer)})

    assert [value("quire_worker_expert_tokens_total", layer) for layer in (0, 3)] == [8, 0]
    assert [value("quire_worker_expert_busiest_ratio", layer) for layer in (0, 3)] == [2.5, 0]
    assert [value("quire_worker_experts_unused", layer) for layer in (0, 3)] == [1, 4]


def test_gpt_oss_has_windows_on_every_other_layer_or_as_it_says() -> None:
    values = {**MIXTRAL, "architectures": ["GptOssForCausalLM"], "sliding_window": 100}
    config = read_model_config(values)
    assert config.sliding_windows == (100, 0, 100, 0)
    assert config.attention.has_sinks
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    assert read_model_config({**values, "layer_types": kinds}).sliding_windows == (0, 0, 100, 0)
    with pytest.raises(InvalidArgument, match=r"layer_types is .*: one of full_attention, sliding_attention is needed"):
        read_model_config({**values, "layer_types": kinds[:2]})
    with pytest.raises(
        InvalidArgument, match=r"quantization_config\.quant_method is 'awq': it is not supported for experts"
    ):
        read_model_config({**values, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}})


def test_olmoe_that_cuts_its_queries_off_is_refused() -> None:
    values = {**QWEN3, "architectures": ["OlmoeForCausalLM"]}
    assert read_model_config({**values, "clip_qkv": None}).experts is not None
    with pytest.raises(
        InvalidArgument, match=r"clip_qkv is 8\.0: clipping of queries, keys and values is not supported"
    ):
        read_model_config({**values, "clip_qkv": 8.0})


DEEPSEEK = {
    **{**BASE, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 16, "moe_intermediate_size": 32},
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "n_shared_experts": 2},
    **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
}


def test_deepseek_caches_one_vector_a_token_and_chooses_by_groups() -> None:
    v3 = read_model_config(DEEPSEEK)
    assert (v3.head_dim, v3.num_kv_heads) == (32, 1)
    assert DeepseekV3ForCausalLM.kv_specs(v3) == (Latent(16, 8),) * 4
    assert v3.experts is not None
    assert v3.experts.sparse_layers == (False, True, True, True)
    assert (v3.experts.shared_intermediate_size, v3.experts.shared_is_gated) == (64, False)
    routing = v3.experts.routing
    assert (routing.scoring, routing.num_groups, routing.top_groups, routing.group_top) == ("sigmoid", 4, 2, 2)
    v2 = read_model_config({**DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"]}).experts
    assert v2 is not None
    assert (v2.routing.scoring, v2.routing.num_groups, v2.score_correction_bias) == ("softmax", 1, False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_group": 3}, "n_group is 3: must divide the number of experts, 16"),
        ({"topk_group": 5}, "topk_group is 5: of 4 groups of 4 experts a token takes 2"),
        ({"n_group": 16, "topk_group": 16}, "topk_group is 16: of 16 groups of 1 experts"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7: it must be even"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None: a whole number is needed"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True}, "norm_topk_prob is True"),
    ],
)
def test_deepseek_that_would_be_computed_wrongly_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_model_config({**DEEPSEEK, **changes})
    assert text in str(refused.value)


def test_an_eagle_head_of_such_a_model_is_dense() -> None:
    """The head's layer is Llama's, regardless of the model's layers."""
    sizes = {**BASE, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    for values in ({**MIXTRAL, "architectures": ["GptOssForCausalLM"]}, DEEPSEEK):
        head = read_eagle(sizes, read_model_config(values)).decoder
        assert (head.experts, head.latent, head.attention.has_sinks, head.attention.scale) == (None, None, False, None)
