"""A sequence with an adapter has the logits of a model with the adapter merged, whatever else is in the step.

Computed in float32, with the tolerances of test_logits.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.building.build import build_replica
from quire.services.worker.lora.no_adapters import NO_ADAPTERS
from quire.services.worker.lora.open_adapters import damaged_adapter_names
from quire.services.worker.lora.peft import peft_folder
from quire.shared.errors import InvalidArgument
from tests.kernels.cpu.closeness import needs_library
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.layers.quantization import layouts as quantized
from tests.services.worker.lora import peft_folders
from tests.services.worker.models.test_logits import MAX_ERROR, Make, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import whole_model_of
from tests.services.worker.rig import Rig
from tests.services.worker.step.test_beam_moves import MAX_ERROR_OF_STATES

# Separate and fused projections, reordered rows, biases, factors, transposed weights, experts, latent attention.
FAMILIES = ("llama-biases-tied", "qwen3-tied", "glm4", "gemma3-tied", "granite", "phi3-partial", "cohere", "starcoder2",
            "gpt2", "opt", "mixtral", "deepseek-v3", "llama4")  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_merged_weights(checkpoint: Make, family: str, tmp_path: Path) -> None:
    """Runs two adapters and a sequence without one, in chunks and decodes, in the same steps."""
    made = checkpoint(family)
    first = peft_folders.save(made, tmp_path / "first", seed=1)
    second = peft_folders.save(made, tmp_path / "second", seed=2, rank=7, use_rslora=True)
    rig = Rig(made.folder, lora={"one": str(first.folder), "two": str(second.folder)})
    new = [New(0, prompt(11, 1), adapter="one"), New(2, prompt(9, 2)), New(3, prompt(14, 3), adapter="two")]
    rig.step(new, {0: 11, 2: 9, 3: 6})
    rig.step(counts={3: 8})
    for _ in range(4):
        rig.step()
    assert error(rig, first, 0) < MAX_ERROR
    assert error(rig, made, 2) < MAX_ERROR
    assert error(rig, second, 3) < MAX_ERROR
    assert error(rig, made, 0) > 0.1, "the adapter has no measurable effect"


def test_some_projections_of_a_fused_layer(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")
    merged = peft_folders.save(made, tmp_path / "a", seed=3, wanted=lambda name: name.endswith(("v_proj", "gate_proj")))
    rig = Rig(made.folder, lora={"a": str(merged.folder)})
    rig.step([New(0, prompt(8), adapter="a")], {0: 8})
    rig.step()
    assert error(rig, merged, 0) < MAX_ERROR


def test_ranks_and_scales_of_some_projections(checkpoint: Make, tmp_path: Path) -> None:
    """Includes projections that are fused into one layer."""
    made = checkpoint("qwen3-tied")
    patterns = {"rank_pattern": {"k_proj": 9, "layers.1.mlp.up_proj": 2}, "alpha_pattern": {"v_proj": 1.5}}
    merged = peft_folders.save(made, tmp_path / "a", seed=3, **patterns)
    rig = Rig(made.folder, lora={"a": str(merged.folder)})
    rig.step([New(0, prompt(8), adapter="a")], {0: 8})
    rig.step()
    assert error(rig, merged, 0) < MAX_ERROR


# Biases, fused parts, reordered rows, factors, transposed weights.
@pytest.mark.parametrize("family", ["llama-biases-tied", "phi3-partial", "glm4", "granite", "gpt2"])
def test_dora_scales_the_layers_outputs(checkpoint: Make, family: str, tmp_path: Path) -> None:
    """Adapts all layers, and one part of fused ones; another sequence has no adapter."""
    made = checkpoint(family)
    whole = peft_folders.save(made, tmp_path / "whole", seed=1, use_dora=True)
    some = peft_folders.save(made, tmp_path / "some", seed=2, use_dora=True, wanted=lambda name: "v_proj" not in name)
    rig = Rig(made.folder, lora={"whole": str(whole.folder), "some": str(some.folder)})
    new = [New(0, prompt(11, 1), adapter="whole"), New(2, prompt(9, 2)), New(3, prompt(14, 3), adapter="some")]
    rig.step(new, {0: 11, 2: 9, 3: 14})
    for _ in range(2):
        rig.step()
    assert error(rig, whole, 0) < MAX_ERROR
    assert error(rig, made, 2) < MAX_ERROR
    assert error(rig, some, 3) < MAX_ERROR


@pytest.mark.parametrize("layout", ["gptq", "fp8-blocks"])
def test_dora_over_a_quantized_base(tmp_path: Path, layout: str) -> None:
    """Row norms are those of the dequantized weights; `quantized.make` returns the model with these."""
    base = quantized.make(quantized.LAYOUTS[layout], tmp_path / "base")
    made = Checkpoint(base.folder, base.model)
    merged = peft_folders.save(made, tmp_path / "a", seed=1, use_dora=True)
    rig = Rig(made.folder, lora={"a": str(merged.folder)})
    rig.step([New(0, prompt(9), adapter="a"), New(1, prompt(9, 1))], {0: 9, 1: 9})
    rig.step()
    assert error(rig, merged, 0) < MAX_ERROR
    assert error(rig, made, 1) < MAX_ERROR


@pytest.mark.parametrize("use_dora", [False, True])
def test_gates_fused_with_their_projection(checkpoint: Make, tmp_path: Path, use_dora: bool) -> None:
    """The fused order differs from the checkpoint's."""
    made = checkpoint("qwen3-next")
    merged = peft_folders.save(made, tmp_path / "a", seed=5, use_dora=use_dora)
    rig = Rig(made.folder, lora={"a": str(merged.folder)}, block_size=16)
    rig.step([New(0, prompt(9), adapter="a"), New(1, prompt(9, 1))], {0: 9, 1: 9})
    rig.step()
    assert error(rig, merged, 0) < MAX_ERROR_OF_STATES
    assert error(rig, made, 1) < MAX_ERROR_OF_STATES


@pytest.mark.parametrize("use_dora", [False, True])
def test_outputs_of_one_layer_can_have_factors_of_their_own(checkpoint: Make, tmp_path: Path, use_dora: bool) -> None:
    """Covers keys, gates, and the five parts of a state space's input projection; input factors do not scale biases."""
    made = checkpoint("falcon-h1-norms")
    merged = peft_folders.save(made, tmp_path / "a", seed=5, use_dora=use_dora)
    rig = Rig(made.folder, lora={"a": str(merged.folder)})
    rig.step([New(0, prompt(9), adapter="a"), New(1, prompt(9, 1))], {0: 9, 1: 9})
    rig.step()
    assert error(rig, merged, 0) < MAX_ERROR
    assert error(rig, made, 1) < MAX_ERROR


def test_a_slot_forgets_its_adapter(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")
    merged = peft_folders.save(made, tmp_path / "a", seed=4)
    rig = Rig(made.folder, lora={"a": str(merged.folder)})
    rig.step([New(0, prompt(8), adapter="a")], {0: 8})
    rig.step(released=[0])
    rig.logits.clear()
    rig.step([New(0, prompt(10, 5))], {0: 10})
    rig.step()
    assert error(rig, made, 0) < MAX_ERROR


def called(*_: object) -> torch.Tensor:
    raise AssertionError("the model was called kernel by kernel")


@pytest.mark.skipif(**needs_library)
def test_on_the_tape(checkpoint: Make, tmp_path: Path) -> None:
    """Replays alternating steps with and without adapters."""
    made = checkpoint("qwen3-tied")
    merged = peft_folders.save(made, tmp_path / "a", seed=5)
    rig = Rig(made.folder, lora={"a": str(merged.folder)}, attention_backend="auto", block_size=16)
    whole_model_of(rig.replica).forward = called
    rig.step([New(0, prompt(8))], {0: 8})
    rig.step([New(1, prompt(9, 1), adapter="a")], {1: 9})
    rig.step()
    assert error(rig, merged, 1) < MAX_ERROR
    rig.step(released=[1])
    rig.step()
    assert error(rig, made, 0) < MAX_ERROR
    assert len(rig.logits[0]) == 5


def test_the_digest_depends_on_weights_and_scale(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")
    ways = {"as it is": {}, "again": {}, "other weights": {"seed": 10}, "other scale": {"use_rslora": True}}
    digests = {
        way: peft_folder.read("a", peft_folders.save(made, tmp_path / way, **{"seed": 9, **config}).folder).digest()
        for way, config in ways.items()
    }
    assert digests["as it is"] == digests["again"]
    assert len(set(digests.values())) == 3


def test_an_unknown_adapter_fails_its_sequence_alone(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")
    merged = peft_folders.save(made, tmp_path / "a", seed=6)
    rig = Rig(made.folder, lora={"a": str(merged.folder)})
    rig.step([New(0, prompt(8), adapter="b"), New(1, prompt(8), adapter="a")], {0: 8, 1: 8})
    (failure,) = rig.last_result.failures
    assert failure.slot == 0
    assert "adapter: 'b' does not exist on this worker; available: a" in failure.error.message
    assert error(rig, merged, 1) < MAX_ERROR


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"r": 0}, "lora: a: r is 0, a whole number from 1 to 256 is needed"),
        ({"r": 8}, "o_proj has shapes [4, 96] and [48, 4], r is 8"),
        ({"lora_alpha": "x"}, "lora: a: lora_alpha is 'x', a number of at most 1,000,000 is needed"),
        ({"lora_alpha": float("nan")}, "lora: a: lora_alpha is nan, a number of at most 1,000,000 is needed"),
        ({"lora_alpha": 10**400}, "000, a number of at most 1,000,000 is needed"),
        ({"peft_type": "IA3"}, "lora: a: peft_type is 'IA3', only 'LORA' can be served"),
        (
            {"use_dora": True},
            "self_attn.o_proj has magnitude vectors of shapes [], one of 48 is needed",
        ),
        ({"rank_pattern": {"o_proj": 999}}, "rank_pattern o_proj is 999, a whole number from 1 to 256 is needed"),
        ({"rank_pattern": {"o_proj": 2}}, "o_proj has shapes [4, 96] and [48, 4], r is 2"),
        ({"alpha_pattern": {"(a+)+b": 2}}, "alpha_pattern has '(a+)+b': only names of modules are supported"),
        ({"alpha_pattern": [1]}, "alpha_pattern is [1], an object of at most 100,000 names is needed"),
        # PEFT's guide on checkpoint conversion: these change the model's own weights (peft#1961, vllm#9118).
        (
            {"init_lora_weights": "pissa"},
            "lora: a: init_lora_weights is 'pissa': it was trained on changed weights",
        ),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion makes an adapter"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'"),
        ({"init_lora_weights": ["pissa"]}, "init_lora_weights is ['pissa']"),
        ({"bias": "all"}, "lora: a: bias is 'all', only 'none' can be served"),
    ],
)
def test_unsupported_adapters_are_refused_by_field(
    checkpoint: Make, tmp_path: Path, config: dict[str, object], text: str
) -> None:
    made = checkpoint("qwen3-tied")
    folder = peft_folders.save(made, tmp_path / "a", seed=7, wanted=lambda name: name.endswith("o_proj")).folder
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(InvalidArgument) as refused:
        build_replica(Rig.settings(made.folder, lora={"a": str(folder)}))
    assert text in refused.value.message


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "orthogonal", "eva"])
def test_initialisations_that_keep_the_models_weights_are_served(
    checkpoint: Make, tmp_path: Path, init: object
) -> None:
    """EVA chooses A and the ranks by activations and starts with a zero B: the model's weights are unchanged."""
    folder = peft_folders.save(checkpoint("qwen3-tied"), tmp_path / "a", seed=7).folder
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": init}))
    assert peft_folder.read("a", folder).modules


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_a_damaged_file_takes_no_other_adapter_away(
    checkpoint: Make, tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The other adapters are served; `left`: bytes of the file that remain."""
    made = checkpoint("qwen3-tied")
    whole = peft_folders.save(made, tmp_path / "whole", seed=6)
    cut = peft_folders.save(made, tmp_path / "cut", seed=7).folder
    file = cut / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    rig = Rig(made.folder, lora={"whole": str(whole.folder), "cut": str(cut)})
    assert [held.id.name for held in rig.replica.adapters.loaded()] == ["whole"]
    assert "skipped an adapter" in caplog.text
    rig.step([New(0, prompt(8), adapter="whole"), New(1, prompt(8)), New(2, prompt(8), adapter="cut")], {0: 8, 1: 8})
    assert error(rig, whole, 0) < MAX_ERROR
    assert error(rig, made, 1) < MAX_ERROR
    settings = Rig.settings(made.folder, lora={"whole": str(whole.folder), "cut": str(cut)})
    assert damaged_adapter_names(settings, rig.replica.adapters) == ["cut"]
    alone = Rig(made.folder, lora={"cut": str(cut)})
    assert not alone.replica.adapters.loaded()
    assert damaged_adapter_names(settings, NO_ADAPTERS) == ["cut", "whole"]


def test_the_error_names_unknown_layers(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")
    folder = peft_folders.save(made, tmp_path / "a", seed=8).folder
    weights = load_file(folder / "adapter_model.safetensors")
    for part, shape in (("A", (4, 48)), ("B", (211, 4))):
        weights[f"base_model.model.score.lora_{part}.weight"] = torch.zeros(shape)
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(
        InvalidArgument, match="score is not a linear layer, embedding or experts of this model that can"
    ):
        build_replica(Rig.settings(made.folder, lora={"a": str(folder)}))


def test_the_models_name_is_refused_for_an_adapter(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")
    settings = Rig.settings(made.folder, lora={made.folder.name: "x"})
    with pytest.raises(InvalidArgument, match="is the name of the model"):
        build_replica(settings)
