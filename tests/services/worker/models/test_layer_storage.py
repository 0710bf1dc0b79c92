"""Layers quantized at load: only layers being filled hold memory for unquantized weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.services.worker.attention.reference import ReferenceAttention
from quire.services.worker.layers.placement import LayerPlacement, memory_of
from quire.services.worker.layers.storage import is_empty
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.loading.dummy_weights import fill_dummy
from quire.services.worker.models.loading.loader import load_tensors
from quire.services.worker.models.loading.weights import _tensors as tensors_of
from quire.services.worker.models.registry import find_model, read_model_config
from quire.shared.models.model_identity import read_config
from tests.services.worker.checkpoints import Checkpoint

Make = Callable[[str], Checkpoint]
FAMILIES = ("llama", "qwen3-tied", "granite", "gemma2", "gpt2")


def built(made: Checkpoint, quantization: str = "fp8") -> CausalLM:
    values, device = read_config(made.folder), torch.device("cpu")
    place = LayerPlacement(kernels.load("cpu"), torch.bfloat16, device, quantization)
    return find_model(values)(read_model_config(values), ReferenceAttention(), place, 64)


def named(made: Checkpoint) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().to(torch.bfloat16)) for name, tensor in made.model.state_dict().items()]


def layered(model: CausalLM, token_ids: Tensor) -> Tensor:
    """Returns the outputs of all feed-forward layers for embeddings."""
    states = model.embedding.embed_step(token_ids)
    return torch.cat([layer.mlp(states) for layer in model.layers]).float()  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_has_room_while_it_is_filled(checkpoint: Make, family: str) -> None:
    made = checkpoint(family)
    model, given = built(made), named(made)
    matrices = [
        [memory_of(one) for name, one in layer.destinations() if "norm" not in name and memory_of(one).dim() > 1]
        for layer in model.layers
    ]
    assert all(map(is_empty, chain(*matrices)))
    most = 0

    def streamed() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, tensor in given:
            yield name, tensor
            most = max(most, sum(not all(map(is_empty, layer)) for layer in matrices))

    load_tensors(model, streamed())
    assert most == 1
    assert all(map(is_empty, chain(*matrices)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_tensors_does_not_matter(checkpoint: Make, family: str) -> None:
    made = checkpoint(family)
    models, given = [built(made), built(made)], named(made)
    load_tensors(models[0], given)
    random.Random(family).shuffle(given)
    load_tensors(models[1], given)
    pairs = list(zip(*(tensors_of(model, set()) for model in models), strict=True))
    assert len(pairs) > 4 * len(models[0].layers)
    for one, other in pairs:
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_dummy_weights_are_quantized(checkpoint: Make) -> None:
    made = checkpoint("llama")
    whole, model = built(made, "none"), built(made)
    fill_dummy(whole, seed=5)
    fill_dummy(model, seed=5)
    batch = torch.arange(9)
    rounded, exact = (layered(one, batch) for one in (model, whole))
    assert 0.001 < float((rounded - exact).norm() / exact.norm()) < 0.1
    assert torch.equal(model.embedding.table, whole.embedding.table)
