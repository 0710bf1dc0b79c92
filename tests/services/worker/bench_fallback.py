"""Without compiled kernels, beside transformers: python -m tests.services.worker.bench_fallback [--threads 2]

A random Llama of 8 layers, hidden size 512. Both get the same token ids, in turn; a row says what a step takes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import kernels
from tests.services.worker import checkpoints
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
WORK = ((1, 128, 64), (8, 128, 32), (1, 1024, 8), (8, 512, 8))  # sequences, prompt, steps that decode


def quire_steps(rig: Rig, num_seqs: int, prompt: int, steps: int) -> list[float]:
    """Seconds of the prompts' step and of each that decodes."""
    new = [New(slot, ids(slot, prompt)) for slot in range(num_seqs)]
    taken = [_timed(lambda: rig.step(new, dict.fromkeys(range(num_seqs), prompt)))]
    taken += [_timed(rig.step) for _ in range(steps)]
    rig.rest()
    return taken


def transformers_steps(model: torch.nn.Module, num_seqs: int, prompt: int, steps: int) -> list[float]:
    cache = DynamicCache(config=model.config)
    tokens = torch.tensor([ids(slot, prompt) for slot in range(num_seqs)])
    taken = []

    def step() -> None:
        nonlocal tokens
        logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
        tokens = logits[:, -1:].argmax(-1)

    for _ in range(1 + steps):
        taken.append(_timed(step))
    return taken


def ids(slot: int, count: int) -> list[int]:
    return [(slot * 7919 + i * 31) % SHAPE["vocab_size"] for i in range(count)]


def _timed(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    kernels.PACKAGES["cpu"] = ("kernels.reference",)
    with tempfile.TemporaryDirectory() as folder:
        made = checkpoints.make("llama", Path(folder), **SHAPE)
        rig = Rig(
            made.folder,
            record_logits=False,
            attention_backend="reference",
            dtype=arguments.dtype,
            block_size=16,
            num_blocks=4096,
            max_num_batched_tokens=8192,
            threads=arguments.threads,
        )
        dtype = getattr(torch, arguments.dtype)
        model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=dtype).eval()
    torch.set_num_threads(arguments.threads)
    for num_seqs, prompt, steps in WORK:
        rows = [
            (quire_steps(rig, num_seqs, prompt, steps), transformers_steps(model, num_seqs, prompt, steps))
            for _ in range(arguments.runs)
        ]
        for name, cut in (("prompts", slice(0, 1)), ("decoding", slice(1, None))):
            ours, theirs = (min(statistics.median(run[side][cut]) for run in rows) * 1e3 for side in (0, 1))
            title, ratio = f"{num_seqs} x {prompt:4} {name:8}", theirs / ours
            print(f"{title}  {ours:8.2f} ms  transformers {theirs:8.2f} ms  {ratio:.2f} x")


if __name__ == "__main__":
    main()
