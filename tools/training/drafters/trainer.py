"""Trains drafters: the model processes a batch once, and all drafters learn from its outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tools.training.drafters.networks import (
    DRAFT_SHAPE,
    NUM_MEDUSA_HEADS,
    EagleHead,
    MedusaHeads,
    features_of,
    soft_losses,
)
from tools.training.loop import Scores, send, spans_of
from tools.training.muon import Optimizer
from tools.training.network import Network, PackedSpan, Parts, Rope, rotary
from tools.training.packing import PROMPT, PackedBatch

EAGLE_DEPTH = 3
"""The head learns from its own features as well, so many drafts deep: that is what it sees when it drafts."""


class Targets:
    """Positions of a batch that are learned, and the model's logits there."""

    def __init__(self, batch: PackedBatch, positions: Tensor, device: torch.device) -> None:
        self.index = send(batch.target_index, device).long()
        self.weights = send(batch.weights, device)
        self.skills = send(batch.skills, device)
        self._depth = positions.index_select(0, self.index)

    def rows(self, distance: int) -> Tensor:
        """Returns the positions `distance` earlier, where the drafts of the targets are made."""
        return (self.index - distance).clamp(min=0)

    def weights_at(self, distance: int) -> Tensor:
        """Returns weights that are zero for targets too early in their conversation."""
        return self.weights * (self._depth >= distance)


@dataclass(frozen=True, slots=True)
class Text:
    """Packed conversations on the device."""

    tokens: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    spans: list[PackedSpan]


@dataclass(frozen=True, slots=True)
class DraftLesson:
    """A batch, and the model's outputs for it."""

    text: Text
    targets: Targets
    features: Tensor  # [num_tokens, hidden]
    teacher: Tensor  # [num_targets, vocab_size] logits


class DraftTrainer:
    """Owns the drafters, their optimisers, and the model, which does not change."""

    def __init__(self, target: Network, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = device
        compiled = device.type == "cuda"
        parts = Parts().compiled() if compiled else Parts()
        self._losses = torch.compile(soft_losses, dynamic=False) if compiled else soft_losses
        self.target = target.requires_grad_(False)
        self.target.parts = parts
        for layer in self.target.layers:
            layer._parts = parts
        self.draft = Network(DRAFT_SHAPE, parts).to(device)
        self.eagle = EagleHead(target.shape, parts).to(device)
        self.medusa = MedusaHeads(target.shape.hidden_size, NUM_MEDUSA_HEADS).to(device)
        drafters: tuple[nn.Module, ...] = (self.draft, self.eagle, self.medusa)
        self._optimizers = [Optimizer(drafter, muon_lr=0.02, adam_lr=0.004) for drafter in drafters]
        names = [
            "draft",
            *(f"eagle-{n + 1}" for n in range(EAGLE_DEPTH)),
            *(f"medusa-{n + 1}" for n in range(NUM_MEDUSA_HEADS)),
        ]
        self.scores = {name: Scores(device) for name in names}

    def step(self, batch: PackedBatch, lr_scale: float) -> None:
        """Runs the model on the batch without gradients, then updates all drafters from its features and logits."""
        tokens, positions = send(batch.tokens, self.device), send(batch.positions, self.device)
        text = Text(tokens, positions, spans_of(batch, self.device))
        targets = Targets(batch, positions, self.device)
        with torch.no_grad():
            hidden = self.target.hidden_states(text.tokens, text.positions, text.spans)
            features = features_of(hidden, self.target.final_norm, self.target.shape.rms_norm_eps)
            teacher = self.target.logits_of(features.index_select(0, targets.index))
        lesson = DraftLesson(text, targets, features, teacher)
        (self._draft_loss(lesson) + self._eagle_loss(lesson) + self._medusa_loss(lesson)).backward()
        for optimizer in self._optimizers:
            optimizer.step(lr_scale)

    def _draft_loss(self, lesson: DraftLesson) -> Tensor:
        """Returns the draft model's loss against the model's logits at the same targets, and records it under
        "draft"."""
        draft, text = self.draft, lesson.text
        hidden = draft.hidden_states(text.tokens, text.positions, text.spans).index_select(0, lesson.targets.index)
        features = features_of(hidden, draft.final_norm, draft.shape.rms_norm_eps)
        return self._loss("draft", features, draft.embedding, lesson, distance=0)

    def _eagle_loss(self, lesson: DraftLesson) -> Tensor:
        """Computes the loss depth by depth; between depths the features advance by one position, because the next
        draft follows."""
        text = lesson.text
        embedded = self.target.embed(text.tokens.roll(-1), torch.bfloat16)
        rope: Rope = rotary(text.positions, self.target.shape, torch.bfloat16)
        first = (text.positions == 0)[:, None]
        made, loss = lesson.features, torch.zeros((), device=self.device)
        for depth in range(EAGLE_DEPTH):
            made = self.eagle(embedded, made, rope, text.spans)
            chosen = made.index_select(0, lesson.targets.rows(1))
            loss = loss + self._loss(f"eagle-{depth + 1}", chosen, self.target.embedding, lesson, distance=depth + 1)
            made = torch.where(first, lesson.features, made.roll(1, dims=0))
        return loss

    def _medusa_loss(self, lesson: DraftLesson) -> Tensor:
        """Returns the sum of the heads' losses; head i, from 0, drafts the token i + 1 positions further than the
        model itself."""
        loss = torch.zeros((), device=self.device)
        for head in range(NUM_MEDUSA_HEADS):
            chosen = self.medusa(lesson.features.index_select(0, lesson.targets.rows(head + 1)), head)
            loss = loss + self._loss(f"medusa-{head + 1}", chosen, self.target.embedding, lesson, distance=head + 1)
        return loss

    def _loss(self, name: str, features: Tensor, embedding: Tensor, lesson: DraftLesson, *, distance: int) -> Tensor:
        """Mean over the targets; `distance`: positions between a target and what its draft is made from."""
        losses, right = self._losses(features, embedding, lesson.teacher)
        weights = lesson.targets.weights_at(distance)
        self.scores[name].add(lesson.targets.skills.where(weights > 0, PROMPT), losses, right)
        return (losses * weights).sum() / weights.sum()

    def take_scores(self) -> dict[str, dict[str, list[float]]]:
        """Drafter to skill to (mean loss, share of drafts that the model agrees with), and start anew."""
        return {name: scores.take() for name, scores in self.scores.items()}
