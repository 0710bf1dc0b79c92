"""Compares adapters with models that have them merged: the logits are equal in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.layers.quantization import layouts
from tests.services.worker.lora.test_loading import load, rig_of, unload
from tests.services.worker.models.test_logits import MAX_ERROR, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig


def check_side_by_side(made: Checkpoint, given: Mapping[str, Checkpoint]) -> None:
    """Runs one sequence per adapter in chunks and decodes; `given`: four adapter names with their merged models, "" ->
    `made`."""
    rig = Rig(made.folder, lora={name: str(merged.folder) for name, merged in given.items() if name})
    news = [New(slot, prompt(9 + slot, slot), adapter=name) for slot, name in enumerate(given)]
    rig.step(news, {0: 9, 1: 10, 2: 5, 3: 12})
    rig.step(counts={2: 6})
    for _ in range(3):
        rig.step()
    for slot, merged in enumerate(given.values()):
        assert error(rig, merged, slot) < MAX_ERROR
        assert merged is made or error(rig, made, slot) > 0.05, "the adapter has no measurable effect"


def check_over_a_quantized_base(
    layout: str, folder: Path, new: Callable[[Checkpoint, Path], Checkpoint], **base: Any
) -> None:
    """Runs a sequence with and one without the adapter. `new`: saves an adapter of such a base; `base`: its weights."""
    quantized = layouts.make(layouts.LAYOUTS[layout], folder / "base", **base)
    made = Checkpoint(quantized.folder, quantized.model)  # the model with dequantized weights
    merged = new(made, folder / "a")
    rig = Rig(made.folder, lora={"a": str(merged.folder)})
    rig.step([New(0, prompt(9), adapter="a"), New(1, prompt(9, 1))], {0: 9, 1: 9})
    rig.step()
    assert error(rig, merged, 0) < MAX_ERROR
    assert error(rig, made, 1) < MAX_ERROR


def check_on_the_tape(
    made: Checkpoint, folder: Path, new: Callable[[int], Checkpoint], seeds: tuple[int, int], **settings: object
) -> None:
    """Loads adapters after everything was recorded, one after the other under the same number."""
    rig = rig_of(made, folder, attention_backend="auto", block_size=16, max_loras=1, **settings)
    for seed in seeds:
        merged = new(seed)
        adapter = load(rig, merged)
        rig.logits.clear()
        rig.step([New(0, prompt(9, seed), adapter="a"), New(1, prompt(8))], {0: 9, 1: 8})
        rig.step()
        assert error(rig, merged, 0) < MAX_ERROR
        assert error(rig, made, 1) < MAX_ERROR
        rig.step(released=[0, 1])
        unload(rig, adapter)
