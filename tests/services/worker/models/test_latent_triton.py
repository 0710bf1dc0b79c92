"""DeepSeek with the GPU kernels, in Triton's interpreter without a GPU, equals transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from quire import kernels
from quire.services.worker.attention.triton import TritonAttention
from tests.kernels.triton.tuned import tune
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import MAX_ERROR, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig


@pytest.fixture
def on_kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    accepts = TritonAttention.reject_reason
    monkeypatch.setattr(
        TritonAttention, "reject_reason", lambda self, spec: accepts(self, dataclasses.replace(spec, device="cuda"))
    )
    monkeypatch.setattr("quire.kernels.triton.unavailable", lambda: None)
    tune(monkeypatch, "attention.latent_blocks", enough_programs=4)
    names = {"latent_store", "latent_attention"}  # the others have their own tests and are slow in the interpreter
    load = kernels.load

    def loading(device: str, packages: tuple[str, ...] = ()) -> kernels.Ops:
        plain, ours = load(device, ("quire.kernels.reference",)), load(device, kernels.PACKAGES["cuda"])
        chosen: dict[str, Any] = {name: getattr(ours, name) for name in names}
        return dataclasses.replace(
            plain, **chosen, sources={**plain.sources, **dict.fromkeys(names, "quire.kernels.triton")}
        )

    monkeypatch.setattr(kernels, "load", loading)


@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3-yarn"])
@pytest.mark.usefixtures("on_kernels_of_gpus")
def test_logits(checkpoint: Callable[[str], Checkpoint], family: str) -> None:
    """One run has chunks, prefix hits and mixed batches."""
    made = checkpoint(family)
    rig = Rig(made.folder, attention_backend="triton", max_model_len=64)
    head = prompt(8, 5)
    rig.step([New(0, head + prompt(21, 6))], {0: 20})
    rig.step([New(1, [*head, 3, 4], cached_blocks=rig.blocks(0)[:2])], {0: 9, 1: 2})
    for _ in range(3):
        rig.step()
    assert max(error(rig, made, slot) for slot in (0, 1)) < MAX_ERROR
