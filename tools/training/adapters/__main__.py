"""Trains quire-tiny's adapters and scores them on held-back questions.

`python -m tools.training.adapters --out DIR` on a CPU: some minutes for each.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.evals import Split, check, items
from tools.training.adapters.answer_styles import ANSWER_STYLES, SIZES, AnswerStyle
from tools.training.adapters.trainer import AdapterTrainer
from tools.training.chat import prompt
from tools.training.decode import GreedyDecoder
from tools.training.export import BUNDLED, END, END_OF_TEXT, load_network
from tools.training.network import Network
from tools.training.tokenizer import FastEncoder


def main() -> None:
    """Trains, saves and scores one adapter per answer style from the command line, on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the adapters to, one folder each")
    parser.add_argument("--only", nargs="*", default=list(ANSWER_STYLES), choices=list(ANSWER_STYLES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-size", type=int, default=10, help="held-back items of every size class to score")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    for name in arguments.only:
        network = load_network(BUNDLED, torch.device("cpu"))
        trainer = AdapterTrainer(network, FastEncoder(tokenizer), ANSWER_STYLES[name], arguments.seed)
        trainer.train(arguments.steps, lambda line, name=name: print(name, line, flush=True))  # type: ignore[misc]
        trainer.save(arguments.out / name)
        print(name, score(network, tokenizer, ANSWER_STYLES[name], arguments.per_size), flush=True)


@torch.inference_mode()
def score(network: Network, tokenizer: Tokenizer, style: AnswerStyle, per_size: int) -> dict[str, str]:
    """Returns by skill the number of answers in this style, and of correct ones among them."""
    decoder, scores = GreedyDecoder(network, (END, END_OF_TEXT)), {}
    for skill, sizes in SIZES.items():
        asked = [item for size in sizes for item in islice(items(skill, Split.HELD_BACK, size), per_size)]
        prompts = [tokenizer.encode(prompt(item.messages, item.tools)).ids for item in asked]
        most = 24 + max(item.max_tokens for item in asked)
        texts = [style.strip(tokenizer.decode(found.tokens)) for found in decoder.generate(prompts, most)]
        in_manner = [(item, text) for item, text in zip(asked, texts, strict=True) if text is not None]
        right = sum(check(item, text).right for item, text in in_manner)
        scores[skill] = f"{len(in_manner)} in this style, {right} right, of {len(asked)}"
    return scores


if __name__ == "__main__":
    main()
