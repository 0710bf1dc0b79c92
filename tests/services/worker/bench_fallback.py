"""Without compiled kernels, beside transformers: python -m tests.services.worker.bench_fallback [MODEL ...]

Processor time of one process with one thread. Both sides get the same token ids, in turn; a row says what the step of
the prompts takes, or one that decodes, in the fastest of several runs. transformers computes a padded batch on a cache
of its own, and of its two ways to attend the faster one counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from quire import kernels
from quire.bench.workload import shapes
from quire.shared.models.model_identity import read_config
from tests.bundled_text import write_text_model
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

MODELS = ("tiny", "qwen3-0.6b")
DTYPES = ("float32", "bfloat16")
MOST_SEQUENCES = 32


@dataclass(frozen=True)
class BenchWorkload:
    """Prompts that arrive at once, and the decoding steps after them."""

    name: str
    prompts: tuple[int, ...]  # tokens of each
    steps: int


WORK = (
    BenchWorkload("1 x 128", (128,), 64),
    BenchWorkload("32 x 32..128", tuple(32 + 96 * i // 31 for i in range(MOST_SEQUENCES)), 64),
    BenchWorkload("1 x 1024", (1024,), 0),
)


class BenchTime(NamedTuple):
    """Seconds of the prompts' step and of all others; chosen tokens by sequence."""

    prompts: float
    decoding: float
    tokens: list[list[int]]


Side = Callable[[BenchWorkload], BenchTime]


def quire_side(folder: Path, dtype: str) -> Side:
    rig = Rig(
        folder,
        record_logits=False,
        attention_backend="reference",
        dtype=dtype,
        block_size=16,
        num_blocks=512,
        max_num_seqs=MOST_SEQUENCES,
        max_num_batched_tokens=4096,
        max_model_len=1100,
    )
    vocab_size = read_config(folder)["vocab_size"]

    def step(*planned: Any) -> float:
        plan = rig.scheduler.plan(*planned)
        begin = time.process_time()
        result = rig.execute(plan)
        took = time.process_time() - begin
        rig.scheduler.take(result)
        return took

    def run(work: BenchWorkload) -> BenchTime:
        new = [New(slot, ids(slot, count, vocab_size)) for slot, count in enumerate(work.prompts)]
        prompts = step(new, dict(enumerate(work.prompts)))
        decoding = sum(step() for _ in range(work.steps))
        tokens = [rig.tokens(slot)[count:] for slot, count in enumerate(work.prompts)]
        for slot in range(len(work.prompts)):
            rig.scheduler.give_back(slot)
        rig.end_epoch()
        return BenchTime(prompts, decoding, tokens)

    return run


def transformers_side(folder: Path, dtype: str, attention: str) -> Side:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).eval()
    torch.set_num_threads(1)

    def run(work: BenchWorkload) -> BenchTime:
        longest = max(work.prompts)
        mask = torch.tensor([[0] * (longest - count) + [1] * count for count in work.prompts])
        rows = [ids(slot, count, model.config.vocab_size) for slot, count in enumerate(work.prompts)]
        token_ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        positions = (mask.cumsum(1) - 1).clamp_(min=0)
        is_padded = min(work.prompts) < longest
        cache, chosen, times = DynamicCache(config=model.config), [], [time.process_time()]
        for _ in range(1 + work.steps):
            logits = model(
                token_ids,
                attention_mask=mask if is_padded else None,
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=1,
            ).logits
            token_ids = logits[:, -1:].argmax(-1)
            chosen.append(token_ids.flatten().tolist())
            positions = positions[:, -1:] + 1
            if is_padded:
                mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
            times.append(time.process_time())
        tokens = [list(column) for column in zip(*chosen, strict=True)]
        return BenchTime(times[1] - times[0], times[-1] - times[1], tokens)

    return run


def ids(slot: int, count: int, vocab_size: int) -> list[int]:
    return [(slot * 7919 + i * 31) % vocab_size for i in range(count)]


@contextmanager
def model_folder(name: str, layers: int) -> Iterator[Path]:
    """The bundled model, or a random one of a benchmark shape with `layers` layers."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if name == shapes.TINY:
            yield write_text_model(folder)
            return
        (folder / "config.json").write_text(json.dumps({**shapes.CONFIGS[name], "num_hidden_layers": layers}))
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(
            folder
        )
        yield folder


def sides_of(folder: Path, dtype: str) -> dict[str, Side]:
    """Both sides, Quire first."""
    kernels.PACKAGES["cpu"] = ("quire.kernels.reference",)
    sides = {"quire": quire_side(folder, dtype)}
    return sides | {attention: transformers_side(folder, dtype, attention) for attention in ("sdpa", "eager")}


@torch.inference_mode()
def compare(title: str, sides: dict[str, Side], work: BenchWorkload, runs: int) -> None:
    taken: dict[str, list[BenchTime]] = {name: [] for name in sides}
    for _ in range(runs):
        for name, run in sides.items():
            taken[name].append(run(work))
    for part, steps in (("prompts", 1), ("decoding", work.steps)):
        if steps:
            ours, *theirs = (min(getattr(run, part) for run in of_side) * 1e3 / steps for of_side in taken.values())
            row = f"{title:20} {work.name:12} {part:8} {ours:9.2f} ms  transformers {min(theirs):9.2f} ms"
            print(f"{row}  {min(theirs) / ours:.2f} x", flush=True)
    ours, sdpa = taken["quire"][0].tokens, taken["sdpa"][0].tokens
    pairs = [a == b for row in zip(ours, sdpa, strict=True) for a, b in zip(*row, strict=True)]
    if not all(pairs):
        print(f"{title:20} {work.name:12} {sum(pairs)} of {len(pairs)} tokens are the same")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help=f"tiny or a shape; {MODELS}")
    parser.add_argument("--layers", type=int, default=4, help="of a shape")
    parser.add_argument("--dtype", nargs="*", default=DTYPES, choices=DTYPES)
    parser.add_argument("--steps", type=int, default=64, help="that decode, at most")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    for name in arguments.models:
        with model_folder(name, arguments.layers) as folder:
            for dtype in arguments.dtype:
                sides = sides_of(folder, dtype)
                for work in WORK:
                    steps = min(work.steps, arguments.steps)
                    compare(f"{name} {dtype}", sides, replace(work, steps=steps), arguments.runs)


if __name__ == "__main__":
    main()
