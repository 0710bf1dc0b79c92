"""Trains the vision tower of quire-tiny and scores it on held-back pictures.

`python -m tools.training.pictures --minutes 3.5 --out DIR` on a machine with one GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from tools.training.export import BUNDLED, load_network
from tools.training.packing import Feed
from tools.training.pictures.evaluate import evaluate_pictures, picture_table
from tools.training.pictures.examples import PictureBatch, produce
from tools.training.pictures.export import VISION_FILE, load_tower, save_tower
from tools.training.pictures.recipe import PictureRecipe
from tools.training.pictures.trainer import TowerTrainer, train


def main() -> None:
    """Trains a tower from the command line, and saves it, its scores and the log; weights are saved during the
    training as well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1e6, help="length of the training itself")
    parser.add_argument("--steps", type=int, help="end after this many steps, if that is earlier")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tower, its scores and the log")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="folder of the text model")
    parser.add_argument("--start", type=Path, help="file of a trained tower to continue from")
    parser.add_argument("--guided", type=float, default=0.0, help="first share of the run, without the text network")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pictures", type=int, default=512, help="pictures of one step")
    parser.add_argument("--workers", type=int, default=14, help="processes that draw pictures")
    parser.add_argument("--per-size", type=int, default=100, help="held-back items of every size class to score")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.steps is None and arguments.minutes > 1e5:
        parser.error("--minutes or --steps is needed")
    device, out = torch.device(arguments.device), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    recipe = PictureRecipe(
        60 * arguments.minutes,
        arguments.steps,
        arguments.seed,
        arguments.pictures,
        workers=arguments.workers,
        guided=arguments.guided,
    )
    feed: Feed[PictureBatch] = Feed(produce, recipe.workers, recipe, arguments.model)
    try:
        file = out / VISION_FILE
        trainer = TowerTrainer(recipe, arguments.model, device)
        if arguments.start:
            trainer.tower.load(load_tower(arguments.start).tensors())
        train(trainer, recipe, feed, out / "log.jsonl", lambda tower: save_tower(tower, file))
    finally:
        feed.close()
    save_tower(trainer.tower, file)
    started = time.monotonic()
    network = load_network(arguments.model, device).to(trainer.dtype)
    result = evaluate_pictures(network, load_tower(file).to(device), arguments.per_size)
    (out / "evaluation.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(picture_table(result), f"scored in {time.monotonic() - started:.0f} s", sep="\n")


if __name__ == "__main__":
    main()
