"""Trains the tower and the projector through the frozen text network."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.training.export import load_network
from tools.training.loop import send, spans_of
from tools.training.muon import Optimizer
from tools.training.packing import Feed
from tools.training.pictures.examples import SIZES, PictureBatch
from tools.training.pictures.guides import Guides
from tools.training.pictures.recipe import PictureRecipe
from tools.training.pictures.tower import TrainedTower, tower_layer

SIZE_PENALTY = 1.0
LOG_EVERY_S, CHECKPOINT_EVERY_S = 5.0, 45.0


class PictureScores:
    """Sums of losses and of right tokens, by kind of question, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, len(SIZES), device=device)

    def add(self, kinds: Tensor, weights: Tensor, losses: Tensor, right: Tensor) -> None:
        """Adds the results of one batch; `weights` are 0 for padding."""
        rows = torch.stack((weights, losses.detach() * weights, right * weights))
        self._sums.index_add_(1, kinds.clamp_min(0), rows)

    def take(self) -> dict[str, list[float]]:
        """Returns mean loss and share of right tokens by kind, and starts anew."""
        counts, losses, right = self._sums.tolist()
        self._sums.zero_()
        return {
            name: [round(losses[i] / counts[i], 4), round(right[i] / counts[i], 4)]
            for i, name in enumerate(SIZES)
            if counts[i]
        }


class TowerTrainer:
    """Owns the tower and its optimiser on one device, and the text network, which does not change."""

    def __init__(self, recipe: PictureRecipe, text_model: Path, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        is_cuda = device.type == "cuda"
        self.device = device
        self.dtype = torch.bfloat16 if is_cuda else torch.float32  # CPUs compute in float32 much faster
        self.network = load_network(text_model, device).to(self.dtype).requires_grad_(False)
        if is_cuda:
            self.network.compile_parts()
        layer = torch.compile(tower_layer, dynamic=False) if is_cuda else tower_layer
        self.tower = TrainedTower(recipe.shape, self.network.shape.hidden_size, layer).to(device)
        self._embedding_size = self.network.embedding.float().square().mean().log()
        self.scores = PictureScores(device)
        self._optimizer = Optimizer(self.tower, recipe.muon_lr, recipe.adam_lr)
        self._guides = Guides(recipe.shape.hidden_size).to(device)
        self._guide_lr = recipe.guide_lr
        self._guide_optimizer = torch.optim.AdamW(self._guides.parameters(), recipe.guide_lr, weight_decay=0.01)
        self.recognized = torch.zeros(2, device=device)  # moving shares of digits and words, by the guides

    def step(self, batch: PictureBatch, lr_scale: float, *, guides_only: bool = False) -> Tensor:
        """Trains on one batch with the learning rate times `lr_scale`; returns the loss before the update.
        `guides_only`: not through the text network."""
        features = self.tower.features(send(batch.pixels, self.device), self.dtype)
        loss, recognized = self._guides(features, send(batch.labels, self.device))
        self.recognized.lerp_(recognized, 0.05)
        rows = self.tower.project(features).flatten(0, 1)
        loss = loss + (SIZE_PENALTY * self.size_error(rows) if guides_only else self._text_loss(batch, rows))
        loss.backward()
        self._optimizer.step(lr_scale)
        for group in self._guide_optimizer.param_groups:
            group["lr"] = self._guide_lr * lr_scale
        self._guide_optimizer.step()
        self._guide_optimizer.zero_grad()
        return loss.detach()

    def _text_loss(self, batch: PictureBatch, rows: Tensor) -> Tensor:
        """Returns the loss of the answers, and of the size of the rows."""
        weights = send(batch.weights, self.device)
        losses, right = self.losses(batch, rows)
        self.scores.add(send(batch.kinds, self.device), weights, losses, right)
        return (losses * weights).sum() / weights.sum() + SIZE_PENALTY * self.size_error(rows)

    def size_error(self, rows: Tensor) -> Tensor:
        """Returns the mean square logarithm of the size of rows, relative to that of the text's embeddings.

        The text network norms its input, so that the loss alone would let rows grow, and large rows change slowly.
        """
        return 0.25 * (rows.float().square().mean(-1).add(1e-8).log() - self._embedding_size).square().mean()

    def losses(self, batch: PictureBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the cross-entropy of the batch's targets, and whether the likeliest token is the target. `rows`:
        embeddings of all patches of the batch."""
        x = self.network.embed(send(batch.tokens, self.device), self.dtype)
        x = x.index_copy(0, send(batch.picture_index, self.device), rows)
        hidden = self.network.transform(x, send(batch.positions, self.device), spans_of(batch, self.device))
        chosen = hidden.index_select(0, send(batch.target_index, self.device))
        return self.network.losses(chosen, send(batch.targets, self.device))


def train(
    trainer: TowerTrainer,
    recipe: PictureRecipe,
    feed: Feed[PictureBatch],
    log: Path,
    checkpoint: Callable[[TrainedTower], None],
) -> None:
    """Trains for the recipe's seconds or steps, writing a line of JSON to `log` every few seconds."""
    batches = iter(feed)
    trainer.step(next(batches), 0.0)  # compiles; the schedule's clock starts after it
    started = logged = saved = time.monotonic()
    steps = 0
    while (progress := _progress(recipe, steps, time.monotonic() - started)) < 1.0:
        trainer.step(next(batches), recipe.lr_scale(progress), guides_only=progress < recipe.guided)
        steps += 1
        now = time.monotonic()
        if now - logged > LOG_EVERY_S:
            line = {"step": steps, "seconds": round(now - started, 1), "waiting": feed.waiting}
            line["recognized"] = [round(share, 3) for share in trainer.recognized.tolist()]
            _write_log(log, line | {"kinds": trainer.scores.take()})
            logged = now
        if now - saved > CHECKPOINT_EVERY_S:
            checkpoint(trainer.tower)
            saved = now


def _progress(recipe: PictureRecipe, steps: int, seconds: float) -> float:
    return max(seconds / recipe.seconds, steps / recipe.steps if recipe.steps else 0.0)


def _write_log(log: Path, line: dict[str, Any]) -> None:
    """Appends the line as JSON to the log file and prints it in short."""
    with log.open("a") as file:
        file.write(json.dumps(line) + "\n")
    scores = " ".join(f"{name} {loss:.3f}/{right:.3f}" for name, (loss, right) in line["kinds"].items())
    print(f"{line['step']} {line['seconds']}s waiting {line['waiting']} {line['recognized']} {scores}", flush=True)
