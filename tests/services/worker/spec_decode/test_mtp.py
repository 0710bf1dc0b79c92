"""Multi-token prediction layers in DeepSeek-V3's format: drafts follow the paper's definition, and the text is that of
the model alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from quire import kernels
from quire.services.worker.attention.backends import choose_attention
from quire.services.worker.attention.port import AttentionMetadata
from quire.services.worker.building.build import build_replica
from quire.services.worker.kv import kv_cache
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.attention_spec import attention_spec
from quire.services.worker.models.families.deepseek import DeepseekV3ForCausalLM
from quire.services.worker.models.loading.loader import Loader
from quire.services.worker.models.registry import read_model_config
from quire.services.worker.spec_decode.config import parse
from quire.services.worker.spec_decode.drafter import DraftTarget
from quire.services.worker.spec_decode.methods.mtp import Mtp
from quire.shared.errors import InvalidArgument
from quire.shared.settings import WorkerSettings
from tests.kv_groups.models import greedy
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.spec_decode.pair import Pair, build

NUM_LAYERS, SIZE = 3, 48
NORMS = ("enorm", "hnorm")
PREFIX = f"model.layers.{NUM_LAYERS}"  # of the first prediction layer
MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive_length": False}


def drawn(*shape: int, seed: int) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise * shape[1] ** -0.5 if len(shape) > 1 else 1 + 0.2 * noise


def make(folder: Path, *inputs: Tensor, contribution: float = 1.0, **config: Any) -> tuple[Checkpoint, Any]:
    """Builds a model whose last layers are converted to prediction layers, and returns both with all tensors.

    `inputs`: eh_proj of each prediction layer; `contribution`: scale of what all layers add to the residual stream; if
    less than 1, norms keep directions.
    """
    made = checkpoints.make("deepseek-v3", folder, num_hidden_layers=NUM_LAYERS + len(inputs), **config)
    for name, parameter in made.model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            parameter.data *= contribution
    made.model.save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    layers = made.model.model.layers
    prediction_layers, made.model.model.layers = layers[NUM_LAYERS:], layers[:NUM_LAYERS]
    for depth, weight in enumerate(inputs):
        ends = _ends(tensors, seed=len(NORMS) * depth, plain=contribution < 1) | {"eh_proj": weight.clone()}
        tensors |= {f"model.layers.{NUM_LAYERS + depth}.{name}.weight": tensor for name, tensor in ends.items()}
    save_file(tensors, path)
    written = json.loads((folder / "config.json").read_text())
    written |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": len(inputs)}
    (folder / "config.json").write_text(json.dumps(written))
    return made, (prediction_layers, tensors)


def _ends(tensors: dict[str, Tensor], seed: int, *, plain: bool) -> dict[str, Tensor]:
    """Returns the tensors of a prediction layer besides a decoder layer's, without its input projection."""
    repeated = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head", "shared_head.norm": "model.norm"}
    found = {name: tensors[f"{of}.weight"].clone() for name, of in repeated.items()}
    return found | {name: torch.ones(SIZE) if plain else drawn(SIZE, seed=seed + i) for i, name in enumerate(NORMS)}


def forgetful(folder: Path, *inputs: Tensor) -> Checkpoint:
    """Builds a checkpoint whose next token depends mostly on the last one: its embedding dominates the residual
    stream."""
    return make(folder, *inputs, contribution=0.001)[0]


OF_TOKEN = torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), dim=1)
OF_FEATURE = torch.cat((torch.zeros(SIZE, SIZE), torch.eye(SIZE)), dim=1)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB_SIZE, (length,), generator=draw).tolist() for length in (30, 7, 19)]


@torch.inference_mode()
def test_the_layer_computes_the_published_definition(tmp_path: Path) -> None:
    made, ((prediction_layers,), tensors) = make(tmp_path, drawn(SIZE, 2 * SIZE, seed=9))
    config = read_model_config(json.loads((tmp_path / "config.json").read_text()))
    place = LayerPlacement(kernels.load("cpu"), torch.float32, torch.device("cpu"))
    backend = choose_attention("reference", attention_spec(config, 4, place))
    model, loader = DeepseekV3ForCausalLM(config, backend, place, 64), Loader("auto", 0)
    loader.load(model, tmp_path)
    limits = WorkerLimits(block_size=4, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, num_blocks=8)
    settings = parse(json.dumps(MTP))
    assert settings is not None
    mtp = Mtp(settings, DraftTarget(model, place, limits, "reference", loader, tmp_path))
    count = 11
    tokens = torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(1))
    features, positions = drawn(count, SIZE, seed=2) * SIZE**0.5, torch.arange(count)
    (cache,) = kv_cache.allocate(mtp.shape, 8, place.device)
    attention = AttentionMetadata(
        torch.tensor([[2, 5, 3]]).int(), torch.tensor([0, count]).int(), torch.tensor([count]).int(), count, count
    )
    places = torch.tensor([2, 5, 3])[positions // 4] * 4 + positions % 4
    batch = ForwardBatch(tokens.int(), positions.int(), places.int(), attention, None)
    got = mtp.logits(mtp.heads[0](model, features, batch, cache))

    def rms(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (SIZE,), tensors[f"{PREFIX}.{name}.weight"], config.rms_norm_eps)

    reference = made.model.model
    embedded = rms(reference.embed_tokens(tokens), "enorm")
    x = (torch.cat((embedded, rms(features, "hnorm")), dim=1) @ tensors[f"{PREFIX}.eh_proj.weight"].T)[None]
    mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
    angles = reference.rotary_emb(x, positions[None])
    x = prediction_layers(x, attention_mask=mask, position_ids=positions[None], position_embeddings=angles)
    x = x[0] if isinstance(x, tuple) else x
    want = made.model.lm_head(rms(x[0], "shared_head.norm"))
    assert (got - want).abs().max() < 5e-5


WAYS = [{"attention_backend": "cpu"}, {"attention_backend": "reference"}]


@pytest.mark.parametrize("way", [*WAYS, pytest.param({"device": "cuda"}, marks=pytest.mark.gpu)], ids=str)
def test_greedy_text_is_unchanged_and_good_drafts_are_accepted(tmp_path: Path, way: dict[str, Any]) -> None:
    made = forgetful(tmp_path, OF_TOKEN)
    run = Pair(build(MTP, tmp_path, num_blocks=200, max_num_seqs=4, **way))
    asked = [run.ask(tokens, max_tokens=40, eos=()) for tokens in prompts()]
    run.run()
    assert [a.tokens for a in asked] == [greedy(made, a.prompt, 40) for a in asked]
    counts = run.core.speculation.counts
    assert counts.accepted_tokens > 0.9 * counts.draft_tokens > 0, counts
    assert run.num_steps < 40


def test_bad_drafts_are_refused_and_change_no_text(tmp_path: Path) -> None:
    """The layer ignores the token after the feature, so that it predicts one position too early."""
    made = forgetful(tmp_path, OF_FEATURE)
    run = Pair(build(MTP, tmp_path, num_blocks=200, max_num_seqs=4))
    asked = [run.ask(tokens, max_tokens=25, eos=()) for tokens in prompts()]
    run.run()
    assert [a.tokens for a in asked] == [greedy(made, a.prompt, 25) for a in asked]
    counts = run.core.speculation.counts
    assert counts.accepted_tokens < 0.5 * counts.draft_tokens, counts


def test_prefix_hits_and_preemption_with_such_drafts(tmp_path: Path) -> None:
    made = forgetful(tmp_path, OF_TOKEN)
    run = Pair(build(MTP, tmp_path, num_blocks=200, max_num_seqs=4, block_size=4, max_num_batched_tokens=16))
    first = prompts()[0]
    said = run.ask(first, max_tokens=12, eos=())
    run.run()
    again = [run.ask(tokens, max_tokens=15, eos=()) for tokens in ([*first, *said.tokens, 5], [*first[:20], 7])]
    for _ in range(4):
        run.plan()
        run.result()
    run.core.preempt(int(run.core.running.live.nonzero()[0][0]))
    run.run()
    assert [a.tokens for a in again] == [greedy(made, a.prompt, 15) for a in again]
    assert run.core.counts.cached_tokens >= 40 + 16
    assert run.core.counts.preemptions == 1


def test_without_drafts_the_layer_is_not_loaded(tmp_path: Path) -> None:
    made = forgetful(tmp_path, OF_TOKEN)
    run = Pair(build(None, tmp_path, num_blocks=100))
    asked = run.ask(prompts()[1], max_tokens=8, eos=())
    run.run()
    assert asked.tokens == greedy(made, asked.prompt, 8)


Make = Callable[[str], Checkpoint]


@pytest.mark.parametrize(
    ("family", "changes", "asked", "text"),
    [
        (
            "deepseek-v3",
            {"num_nextn_predict_layers": 0},
            {},
            "num_nextn_predict_layers is 0: no layer to draft",
        ),
        (
            "deepseek-v3",
            {"num_nextn_predict_layers": -1},
            {},
            "num_nextn_predict_layers is -1: must be 0 to 128",
        ),
        ("llama", {}, {}, r"speculative_config\.method: mtp: config\.json says num_nextn_predict_layers is 0"),
        ("llama", {}, {"model": "/somewhere"}, "model: '/somewhere': must be empty for the method mtp"),
    ],
)
def test_models_without_prediction_layers_are_refused(
    checkpoint: Make, tmp_path: Path, family: str, changes: dict[str, Any], asked: dict[str, Any], text: str
) -> None:
    config = json.loads((checkpoint(family).folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    speculation = json.dumps({**MTP, "method": "deepseek_mtp", **asked})
    with pytest.raises(InvalidArgument, match=text):
        build_replica(WorkerSettings(model=str(tmp_path), speculative_config=speculation))


@pytest.mark.parametrize("there", [0, 1])
def test_the_error_names_missing_tensors_of_a_layer(tmp_path: Path, there: int) -> None:
    make(tmp_path, *[OF_TOKEN] * there)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": there + 1}))
    lacking = rf"lacks tensors that the model needs: model\.layers\.{NUM_LAYERS + there}\.enorm\.weight"
    with pytest.raises(InvalidArgument, match=lacking):
        build_replica(WorkerSettings(model=str(tmp_path), num_blocks=20, speculative_config=json.dumps(MTP)))
