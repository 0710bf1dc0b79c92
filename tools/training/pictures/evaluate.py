"""Scores tower and text model on held-back pictures, without a server.

Run as `python -m tools.training.pictures.evaluate --model DIR --out FILE`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tools.evals import Item, held_back_items
from tools.evals.registry import PICTURE_SKILLS
from tools.training.chat import IMAGE, prompt
from tools.training.decode import GreedyDecoder, Replaced
from tools.training.evaluate import GreedyAnswer, mistakes, score
from tools.training.export import BUNDLED, END, END_OF_TEXT
from tools.training.network import Network
from tools.training.pictures.examples import resized
from tools.training.pictures.tower import TrainedTower
from tools.training.tokenizer import load_tokenizer

BATCH = 64


def picture_of(item: Item) -> Image.Image:
    """Returns the picture of an item."""
    url = item.messages[-1]["content"][0]["image_url"]["url"]
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


@torch.inference_mode()
def answer_pictures(
    network: Network, tower: TrainedTower, items: list[Item], tokenizer: Path = BUNDLED
) -> list[GreedyAnswer]:
    """Returns the greedy answers to items with one picture each, in the dtype of the network."""
    encoder = load_tokenizer(tokenizer)
    decoder, dtype = GreedyDecoder(network, (END, END_OF_TEXT)), network.embedding.dtype
    image = encoder.token_to_id(IMAGE)
    answers: list[GreedyAnswer] = []
    for start in range(0, len(items), BATCH):
        batch = items[start : start + BATCH]
        pixels = torch.from_numpy(np.stack([resized(picture_of(i), tower.shape.image_size) for i in batch]))
        rows = tower(pixels.to(network.embedding.device), dtype)
        text = IMAGE * tower.shape.num_patches
        prompts = [encoder.encode(prompt(i.messages).replace(IMAGE, text), add_special_tokens=False).ids for i in batch]
        found = decoder.generate(prompts, max(i.max_tokens for i in batch), Replaced(image, rows.flatten(0, 1)))
        answers += [GreedyAnswer(encoder.decode(tokens), lead) for tokens, lead in found]
    return answers


def evaluate_pictures(network: Network, tower: TrainedTower, per_size: int) -> dict[str, Any]:
    """Returns the scores on held-back items of all picture skills, and the first mistakes."""
    items = held_back_items(per_size, tuple(PICTURE_SKILLS))
    answers = answer_pictures(network, tower, items)
    return {"per_size": per_size, "scores": score(items, answers), "mistakes": _mistakes(items, answers)}


def _mistakes(items: list[Item], answers: list[GreedyAnswer]) -> list[dict[str, str]]:
    plain = [Item(i.skill, i.size, ({"role": "user", "content": i.key},), i.expected, i.key) for i in items]
    return mistakes(plain, answers, 60)


def picture_table(result: dict[str, Any]) -> str:
    """Returns the scores as a Markdown table."""
    lines = ["| skill | items | right |", "|---|---|---|"]
    return "\n".join(
        lines + [f"| {name} | {row['items']} | {row['right']:.1%} |" for name, row in result["scores"].items()]
    )


def main() -> None:
    """Evaluates a model folder from the command line, writes the result as JSON, and prints its scores."""
    from tools.training.export import load_network
    from tools.training.pictures.export import load_tower

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--vision", type=Path, help="file of a trained tower, in place of the model's own")
    parser.add_argument("--per-size", type=int, default=100, help="held-back items of every size class")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    network = load_network(arguments.model, device).to(getattr(torch, arguments.dtype))
    result = evaluate_pictures(network, load_tower(arguments.vision or arguments.model).to(device), arguments.per_size)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(picture_table(result))


if __name__ == "__main__":
    main()
