"""`quire bench embed`: embeddings of many inputs as with `LLM.embed`, alternating with batches of transformers."""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from quire.bench import target
from quire.bench.measuring.ratio import ratio_of_rounds
from quire.bench.report import Row, progress
from quire.bench.target import Target
from quire.bench.workload import shapes
from quire.client import Client
from quire.flags.parser import CommandParser
from quire.flags.setting_flags import human_int

Inputs = Sequence[Sequence[int]]
Side = Callable[[Inputs], None]
LEAST_ID = 3  # smaller ids are special tokens
CONNECTIONS_EACH = 4
BATCH = 64  # batch size of transformers, inputs of similar length


def configure(parser: CommandParser) -> None:
    """Adds the target's flags and those of the inputs, calls and the comparison."""
    target.configure(parser)
    parser.add_argument("--inputs", type=human_int, default=512, metavar="COUNT", help="token sequences of a run")
    parser.add_argument(
        "--tokens", type=human_int, default=512, metavar="COUNT", help="tokens of the longest input; see --ragged"
    )
    parser.add_argument("--ragged", action="store_true", help="uniform lengths from --tokens / 8 to --tokens")
    parser.add_argument("--per-call", type=human_int, default=64, metavar="COUNT", help="inputs of one call")
    parser.add_argument("--calls", type=human_int, default=8, metavar="COUNT", help="calls in flight")
    parser.add_argument("--runs", type=human_int, default=3)
    parser.add_argument(
        "--beside-transformers",
        default="",
        choices=("", "cpu", "cuda"),
        metavar="DEVICE",
        help="also measure transformers with padded batches, in alternating runs: float32 on the cpu, bfloat16 on cuda",
    )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures each target, alternating with transformers if that is requested, and yields one row per side."""
    with tempfile.TemporaryDirectory() as scratch:
        for served in target.targets(arguments, Path(scratch)):
            inputs = _inputs(arguments, served.vocab_size)
            with ThreadPoolExecutor(arguments.calls) as pool, ExitStack() as opened:
                # A connection is served by one frontend, chosen by the kernel.
                connections = 1 if served.frontends == 1 else CONNECTIONS_EACH * served.frontends
                clients = [opened.enter_context(Client(served.grpc_address)) for _ in range(connections)]
                sides = {"quire": _quire(clients, pool, arguments.per_call)}
                if arguments.beside_transformers:
                    folder = shapes.prepare(served.name, Path(scratch)).folder
                    assert folder is not None, "the bundled model is no encoder"
                    sides["transformers"] = _transformers(folder, arguments.beside_transformers)
                yield from _rows(served, sides, inputs, arguments.runs)


def _rows(served: Target, sides: dict[str, Side], inputs: Inputs, runs: int) -> Iterator[Row]:
    """Alternates the sides for a warm-up and `runs` runs, in reversed order every other time, with empty prefix
    caches. Yields medians and the ratio to transformers."""
    shape = served.name
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(runs + 1):  # the first is a warm-up
        served.reset_prefix_cache()  # otherwise a generating model would find the previous run's inputs cached
        for name in [*sides][:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            sides[name](inputs)
            rate = len(inputs) / (time.perf_counter() - started)
            progress(f"{shape} {name}: {rate:,.0f} inputs/s{'' if turn else ' (warm-up)'}")
            if turn:
                rates[name].append(rate)
    mean_tokens = sum(map(len, inputs)) / len(inputs)
    for name, found in rates.items():
        row: Row = {"shape": shape, "side": name, "inputs": len(inputs), "mean_tokens": mean_tokens}
        beside: Row = {} if len(rates) == 1 else {"ratio": ratio_of_rounds(found, rates["transformers"]).value}
        yield {**row, "inputs_s": median(found), "tokens_s": median(found) * mean_tokens, **beside}


def _inputs(arguments: argparse.Namespace, vocab_size: int) -> Inputs:
    """Returns random token sequences, the same for each call; ragged ones have an eighth of the length to all of it."""
    numbers = random.Random(1)
    least = arguments.tokens // 8 if arguments.ragged else arguments.tokens
    lengths = [numbers.randint(max(1, least), arguments.tokens) for _ in range(arguments.inputs)]
    return [numbers.choices(range(LEAST_ID, vocab_size), k=length) for length in lengths]


def _quire(clients: Sequence[Client], pool: ThreadPoolExecutor, per_call: int) -> Side:
    """Returns a function that embeds all inputs in calls of `per_call`, spread over clients and threads."""

    def run(inputs: Inputs) -> None:
        """Embeds all inputs and checks the number of vectors."""
        calls = [inputs[start : start + per_call] for start in range(0, len(inputs), per_call)]
        turns = itertools.cycle(clients)
        for found, asked in zip(pool.map(lambda call: next(turns).embed(call), calls), calls, strict=True):
            assert len(found) == len(asked)

    return run


def _transformers(folder: Path, device: str) -> Side:
    """Returns a side that computes batches sorted by length and padded, as sentence-transformers does: the first
    token's state, normalized."""
    import torch
    import transformers

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModel.from_config(config, dtype=dtype).to(device).eval()

    @torch.inference_mode()
    def run(inputs: Inputs) -> None:
        """Embeds all inputs in padded batches, sorted by length, and normalizes the first token's states."""
        ordered = sorted(inputs, key=len)
        for start in range(0, len(ordered), BATCH):
            batch = [torch.tensor(ids) for ids in ordered[start : start + BATCH]]
            ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(device)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in batch], batch_first=True)
            states = model(ids, attention_mask=mask.to(device)).last_hidden_state[:, 0]
            torch.nn.functional.normalize(states.float(), dim=1).cpu()

    return run
