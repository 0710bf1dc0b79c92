"""Trains quire-tiny from nothing: tokenizer, weights, evaluation.

`python -m tools.training --seconds 520 --out DIR` on a machine with one GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from tools.training.evaluate import evaluate, table
from tools.training.export import save_configs, save_weights
from tools.training.loop import train
from tools.training.packing import Feed, produce
from tools.training.recipe import BATCH_TOKENS, Recipe
from tools.training.tokenizer import train_tokenizer


def main() -> None:
    """Trains tokenizer and network from the command line and saves the model and its log; weights are saved during
    the training as well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="duration of the training")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, its evaluation and the log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="tokens of one step")
    parser.add_argument("--workers", type=int, default=8, help="processes that generate training text")
    parser.add_argument("--per-size", type=int, default=200, help="held-back items of every size class to score")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    recipe = Recipe(arguments.seconds, arguments.seed, arguments.batch_tokens, arguments.workers)
    folder: Path = arguments.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(recipe.seed).save(str(folder / "tokenizer.json"))
    save_configs(recipe.shape, folder)
    feed = Feed(produce, recipe.workers, recipe, folder)
    try:
        network = train(recipe, feed, device, arguments.out / "log.jsonl", lambda net: save_weights(net, folder))
    finally:
        feed.close()
    save_weights(network, folder)
    result = evaluate(folder, arguments.per_size, device)
    (arguments.out / "evaluation.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(table(result))
    print("same text in bfloat16 and float32:", result["same_text_in_both"])


if __name__ == "__main__":
    main()
