"""Prints what a rank of two sends in a sampling step, in bytes and number of exchanges.

Run: python -m tests.services.worker.sampling.bench_rank_traffic
"""

from __future__ import annotations

from typing import Any

import torch

from quire.services.worker.layers.sharding import Shard
from tests.services.worker.sampling.rank_threads import RankThreads
from tests.services.worker.sampling.test_sharded_vocabulary import logits_of, samples

VOCAB_SIZE, NUM_ROWS = 128_256, 64
DRAWN = {"temperature": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": DRAWN,
    "penalties, bias, temperature": {**DRAWN, "presence_penalty": 1.0, "logit_bias": {3: 1.0}},
    "min_p": {**DRAWN, "min_p": 0.05},
    "top_k 20, top_p": {**DRAWN, "top_k": 20, "top_p": 0.9},
    "top_p": {**DRAWN, "top_p": 0.9},
    "top_k 1000, top_p": {**DRAWN, "top_k": 1000, "top_p": 0.9},
    "top_n_sigma": {**DRAWN, "top_n_sigma": 1.0},
    "greedy, 5 logprobs": {"logprobs": 5},
}


def main() -> None:
    torch.set_num_threads(1)
    steps = logits_of(1, NUM_ROWS, VOCAB_SIZE)
    print(
        f"{NUM_ROWS} rows of {VOCAB_SIZE} tokens; half of their logits are {NUM_ROWS * VOCAB_SIZE:,} bytes in bfloat16"
    )
    for name, fields in CASES.items():
        threads = RankThreads(2)

        def work(shard: Shard, asked: dict[str, Any] = fields) -> object:
            return samples(shard, [asked] * NUM_ROWS, steps)

        threads.run(work)
        print(f"{name:30} {sum(x.nbytes for x in threads.sent):9,} bytes in {len(threads.sent)}")


if __name__ == "__main__":
    main()
