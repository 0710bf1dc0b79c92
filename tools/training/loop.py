"""The training loop: batches in, a trained network out, a line of log every few seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.evals import SKILLS
from tools.training.muon import Optimizer
from tools.training.network import Network, PackedSpan, Parts
from tools.training.packing import PROMPT, Feed, PackedBatch
from tools.training.recipe import Recipe, longest_document

LOG_EVERY_S = 10.0
CHECKPOINT_EVERY_S = 60.0


class Scores:
    """Loss and share of right tokens by skill since the last log line, kept on the device so that no step waits."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, PROMPT + 1, device=device)

    def add(self, skills: Tensor, losses: Tensor, right: Tensor) -> None:
        """Count targets [num_targets] under their skills."""
        ones = torch.ones_like(losses)
        self._sums.index_add_(1, skills, torch.stack((ones, losses.detach(), right.float())))

    def take(self) -> dict[str, list[float]]:
        """Returns the mean loss and the share of right tokens by skill, and resets the sums; skills without tokens
        are left out."""
        totals, loss, right = self._sums.tolist()
        self._sums.zero_()
        return {
            name: [round(loss[i] / totals[i], 4), round(right[i] / totals[i], 4)]
            for i, name in enumerate((*SKILLS, "prompt"))
            if totals[i]
        }


class Trainer:
    """Owns the network and its optimiser on one device."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.device = device
        parts = Parts().compiled() if device.type == "cuda" else Parts()
        self.network = Network(recipe.shape, parts).to(device)
        self.scores = Scores(device)
        self._optimizer = Optimizer(self.network, recipe.muon_lr, recipe.adam_lr)

    def step(self, batch: PackedBatch, lr_scale: float) -> None:
        """Trains the network on one batch with the learning rate times `lr_scale`, and adds its losses to the
        scores."""
        skills, weights = send(batch.skills, self.device), send(batch.weights, self.device)
        net = self.network
        tokens, positions = send(batch.tokens, self.device), send(batch.positions, self.device)
        hidden = net.hidden_states(tokens, positions, spans_of(batch, self.device))
        chosen = hidden.index_select(0, send(batch.target_index, self.device))
        losses, right = net.losses(chosen, send(batch.targets, self.device))
        ((losses * weights).sum() / weights.sum()).backward()
        self._optimizer.step(lr_scale)
        self.scores.add(skills, losses, right)


def send(array: object, device: torch.device) -> Tensor:
    """The array on the device, without waiting for it."""
    tensor = torch.as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def spans_of(batch: PackedBatch, device: torch.device) -> list[PackedSpan]:
    """Returns the batch's conversations as spans for packed attention, with their limits on `device`."""
    spans = []
    for limits in batch.limits:
        start, stop = int(limits[0]), int(limits[-1])
        longest = int((limits[1:] - limits[:-1]).max())
        spans.append(PackedSpan(start, stop, send(limits - limits[0], device), longest))
    return spans


def train(
    recipe: Recipe, feed: Feed[PackedBatch], device: torch.device, log: Path, checkpoint: Callable[[Network], None]
) -> Network:
    """Train for `recipe.seconds`, writing a line of JSON to `log` every few seconds."""
    trainer = Trainer(recipe, device)
    batches = iter(feed)
    # The first step compiles; the clock of the schedule starts after it, with the learning rate still at zero.
    trainer.step(next(batches), 0.0)
    started = logged = saved = time.monotonic()
    steps = logged_steps = 0
    while (progress := (time.monotonic() - started) / recipe.seconds) < 1.0:
        feed.progress.value = progress
        trainer.step(next(batches), recipe.lr_scale(progress))
        steps += 1
        now = time.monotonic()
        if now - logged > LOG_EVERY_S:
            line: dict[str, Any] = {
                "step": steps,
                "seconds": round(now - started, 1),
                "longest_document": longest_document(progress),
            }
            line["batches_waiting"] = feed.waiting
            line["skills"] = trainer.scores.take()
            # Reading the scores waits for the device, so all steps are finished only now.
            line["tokens_per_s"] = round((steps - logged_steps) * recipe.batch_tokens / (time.monotonic() - logged))
            _write_log(log, line)
            logged, logged_steps = time.monotonic(), steps
        if now - saved > CHECKPOINT_EVERY_S:
            checkpoint(trainer.network)
            saved = now
    return trainer.network


def _write_log(log: Path, line: dict[str, Any]) -> None:
    """Appends the line as JSON to the log file and prints a short form with loss and accuracy per skill."""
    with log.open("a") as file:
        file.write(json.dumps(line) + "\n")
    scores = " ".join(f"{name} {loss:.3f}/{right:.3f}" for name, (loss, right) in line["skills"].items())
    print(
        f"{line['step']} {line['seconds']}s {line['tokens_per_s'] / 1e6:.3f}M/s {line['batches_waiting']} {scores}",
        flush=True,
    )
