"""Models with sliding windows: random ones, and quire-tiny with windows in some layers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.bundled_text import write_text_model
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint

Make = Callable[[str], Checkpoint]
WINDOW = 9
ALTERNATING = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# Name -> (family, configuration)
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "all-windows": ("mistral-window", {"sliding_window": WINDOW}),
    "alternating": ("qwen2-windows", ALTERNATING),
    "chunks": ("llama4", {"attention_chunk_size": WINDOW, "tie_word_embeddings": True, "intermediate_size": 40}),
    "one-in-three": ("qwen2-windows", {"sliding_window": WINDOW, "max_window_layers": 2}),
}


def make(name: str, folder: Path) -> Checkpoint:
    """Creates a checkpoint; `name`: one of RANDOM, or a family."""
    family, config = RANDOM.get(name, (name, {}))
    return checkpoints.make(family, folder, **config)


def tiny(folder: Path, window: int) -> Checkpoint:
    """Creates quire-tiny with a window in every other layer: other answers, but no random ones."""
    write_text_model(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kinds = ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
    config |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    path.write_text(json.dumps(config))
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return Checkpoint(folder, model.eval())


@functools.cache
def _said(model: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def greedy(made: Checkpoint, prompt: list[int], count: int) -> list[int]:
    """Generates greedily with transformers, recomputing everything for each token."""
    return list(_said(made.model, tuple(prompt), count))


def confirmed(made: Checkpoint, prompt: list[int], answer: list[int]) -> list[int]:
    """Returns transformers' greedy tokens after the prompt and after each token of `answer`, in one pass.

    Equals the answer if greedy() gives it.
    """
    return made.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :].argmax(1).tolist()
