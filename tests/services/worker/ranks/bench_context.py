"""A long prompt on one rank and on two that share it out, processes of one thread each.

What counts is rank 0's processor time, which other work on the machine changes little. (Behind the cache of the last
layer, ranks compute only what is read; the tape of one rank on the CPU computes all.)

python -m tests.services.worker.ranks.bench_context [--tokens 2048] [--hidden-size 512]"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.services.worker import checkpoints
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_sharding import ranked
from tests.services.worker.rig import Rig

ROUNDS = 5


def main(num_tokens: int, hidden_size: int) -> None:
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 4,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 128,
        "head_dim": 64,
        "max_position_embeddings": 2 * num_tokens,
    }
    settings: dict[str, Any] = {
        "attention_backend": "auto",
        "block_size": 16,
        "num_blocks": num_tokens // 8,
        "max_num_batched_tokens": num_tokens,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = checkpoints.make("llama", Path(name), **sizes).folder
        one = fastest(Rig(folder, record_logits=False, **settings), num_tokens)
        print(f"1 rank: {1e3 * one:.0f} ms for {num_tokens} tokens")
        with ranked(folder, size=1, contexts=2, record_logits=False, **settings) as rig:
            two = fastest(rig, num_tokens)
        print(f"2 ranks: {1e3 * two:.0f} ms of each, {two / one:.2f} of that")


def fastest(rig: Rig, num_tokens: int) -> float:
    """Processor seconds of a step with one prompt; the best of several."""
    found = []
    for number in range(ROUNDS):
        started = time.process_time()
        rig.step([New(0, prompt(num_tokens, number))], {0: num_tokens})
        found.append(time.process_time() - started)
        rig.scheduler.give_back(0)
        rig.step(released=[0])
    return min(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=512)
    arguments = parser.parse_args()
    main(arguments.tokens, arguments.hidden_size)
