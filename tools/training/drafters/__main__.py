"""Trains the drafters of quire-tiny: a draft model, an EAGLE head and Medusa heads, all at once.

`python -m tools.training.drafters --seconds 150 --out DIR` on a machine with one GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tools.training.drafters.export import save_draft, save_eagle, save_medusa
from tools.training.drafters.trainer import DraftTrainer
from tools.training.export import BUNDLED, load_network
from tools.training.packing import Feed, produce
from tools.training.recipe import BATCH_TOKENS, Recipe

LOG_EVERY_S = 10.0


def main() -> None:
    """Trains the drafters from the command line until the time is over, and saves each in a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, required=True, help="duration of the whole program, compilation included"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafters and the log")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="folder of the target model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="tokens of one step")
    parser.add_argument("--workers", type=int, default=8, help="processes that generate training text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    device = torch.device(arguments.device)
    recipe = Recipe(arguments.seconds, arguments.seed, arguments.batch_tokens, arguments.workers)
    arguments.out.mkdir(parents=True, exist_ok=True)
    feed = Feed(produce, recipe.workers, recipe, arguments.model)
    try:
        trainer = DraftTrainer(load_network(arguments.model, device), device, recipe.seed)
        with (arguments.out / "log.jsonl").open("a") as log:
            train(trainer, recipe, feed, until, lambda line: print(line, file=log, flush=True))
    finally:
        feed.close()
    save_draft(trainer.draft, arguments.out / "draft")
    save_eagle(trainer.eagle, arguments.out / "eagle")
    save_medusa(trainer.medusa, arguments.out / "medusa")


def train(trainer: DraftTrainer, recipe: Recipe, feed: Feed, until: float, log: Callable[[str], None]) -> None:
    """Trains until time.monotonic() reaches `until`; the schedule starts once the first step has compiled."""
    batches = iter(feed)
    trainer.step(next(batches), 0.0)
    trainer.take_scores()
    started = logged = time.monotonic()
    print(f"first step done, {until - started:.0f} s left", flush=True)
    steps = 0
    while (progress := (time.monotonic() - started) / (until - started)) < 1.0:
        feed.progress.value = progress
        trainer.step(next(batches), recipe.lr_scale(progress))
        steps += 1
        if time.monotonic() - logged > LOG_EVERY_S:
            scores = trainer.take_scores()
            logged = time.monotonic()
            tokens = round(steps * recipe.batch_tokens / (logged - started))
            seconds = round(logged - started, 1)
            log(json.dumps({"step": steps, "seconds": seconds, "tokens_per_s": tokens, "drafters": scores}))
            agreed = " ".join(f"{name} {_mean(by_skill):.3f}" for name, by_skill in scores.items())
            print(f"{steps} {seconds}s {tokens / 1e6:.3f}M/s {feed.waiting} {agreed}", flush=True)


def _mean(by_skill: dict[str, list[float]]) -> float:
    """Share of agreement, mean over the skills."""
    shares = [right for name, (_, right) in by_skill.items() if name != "prompt"]
    return sum(shares) / max(1, len(shares))


if __name__ == "__main__":
    main()
