"""Low-rank updates (LoRA, Hu et al. 2021) of a network's attention, and the loop that learns them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tools.training.adapters.answer_styles import AnswerStyle, sample, styled_conversation
from tools.training.chat import Segment
from tools.training.export import LAYER_NAMES
from tools.training.network import Network, PackedSpan
from tools.training.tokenizer import FastEncoder

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK, ALPHA = 8, 16
BATCH, PEAK_LR, LONGEST = 10, 4e-3, 400


class LowRankUpdate(nn.Module):
    """Low-rank update: W + s B A in place of W."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(RANK, columns) * columns**-0.5)
        self.b = nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + ALPHA / RANK * (self.b @ self.a)


class AdapterTrainer:
    """Trains adapters for `network`, whose own weights do not change."""

    def __init__(self, network: Network, encoder: FastEncoder, style: AnswerStyle, seed: int) -> None:
        torch.manual_seed(seed)
        self._network, self._encoder, self._style, self._rng = network, encoder, style, Random(f"adapters/{seed}")
        network.requires_grad_(False)
        self._updates: dict[str, LowRankUpdate] = {}  # by the projection's name in the checkpoint
        for number, layer in enumerate(network.layers):
            for name in PROJECTIONS:
                update = LowRankUpdate(getattr(layer, name))
                parametrize.register_parametrization(layer, name, update)
                self._updates[f"model.layers.{number}.{LAYER_NAMES[name]}"] = update
        parameters = [parameter for update in self._updates.values() for parameter in update.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, PEAK_LR, weight_decay=0.0)

    def train(self, steps: int, log: Callable[[str], None]) -> None:
        """Trains with a learning rate that rises for 20 steps and decreases linearly to zero; logs every tenth loss."""
        for step in range(steps):
            for group in self._optimizer.param_groups:
                group["lr"] = PEAK_LR * (1 - step / steps) * min(1.0, (step + 1) / 20)
            loss = self.step()
            if step % 10 == 0:
                log(f"{step} {loss:.4f}")

    def step(self) -> float:
        """Samples a batch and trains on its answers; returns the mean loss before the update."""
        batch = [self._encode(styled_conversation(sample(self._rng), self._style)) for _ in range(BATCH)]
        batch = [(tokens[:LONGEST], answers[:LONGEST]) for tokens, answers in batch]
        lengths = [len(tokens) for tokens, _ in batch]
        limits = torch.tensor([0, *lengths]).cumsum(0)
        tokens = torch.tensor([token for tokens, _ in batch for token in tokens])
        positions = torch.cat([torch.arange(length) for length in lengths])
        learned = torch.tensor([answer for _, answers in batch for answer in answers])
        learned[limits[:-1]] = False  # a first token has no predecessor
        wanted = learned.nonzero().squeeze(1)
        span = PackedSpan(0, len(tokens), limits.int(), max(lengths))
        with parametrize.cached():
            hidden = self._network.hidden_states(tokens, positions, [span])
            losses, _ = self._network.losses(hidden[wanted - 1], tokens[wanted])
        loss = losses.mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(loss.detach())

    def save(self, folder: Path) -> None:
        """Writes the adapter to the folder in PEFT format, in bfloat16, readable by all users."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, update in self._updates.items():
            for letter, weight in (("A", update.a), ("B", update.b)):
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = weight.detach().bfloat16().contiguous()
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_model.safetensors").chmod(0o644)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "quire-tiny",
            "r": RANK,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(PROJECTIONS),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _encode(self, parts: Sequence[Segment]) -> tuple[list[int], list[bool]]:
        """Returns the tokens of all parts and, for each token, whether it is to be learned."""
        tokens: list[int] = []
        answers: list[bool] = []
        for text, is_answer in parts:
            ids = self._encoder.encode(text)
            tokens += ids
            answers += [is_answer] * len(ids)
        return tokens, answers
