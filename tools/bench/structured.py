"""`python -m tools.bench structured`: every request with a schema of its own, and the same requests without."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.bench import load, target
from quire.bench.load_client.timing import LoadResult
from quire.bench.report import Row
from quire.bench.workload.workloads import BenchRequest, Workload
from quire.flags.parser import CommandParser
from quire.flags.setting_flags import human_int

WORK = "schemas"
PROMPT = 32
LARGEST_ID = 4_000  # within the bundled model's vocabulary
FREE, BOUND = "free", "own schema"


def configure(parser: CommandParser) -> None:
    """Adds the flags of target and load, and the number of schemas."""
    target.configure(parser)
    load.configure(parser, work="", reset=True)
    parser.set_defaults(temperature=1.0)  # for varied output: strings, numbers, lists of any length
    parser.add_argument(
        "--load", default="burst", metavar="A,B,...", help="as for `quire bench serve` (default: burst)"
    )
    parser.add_argument("--schemas", type=human_int, default=64, help="number of requests, each with its own schema")
    parser.add_argument("--tokens", type=human_int, default=256, help="maximum tokens of each answer")


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Alternates requests with and without schemas on one cluster. Schemas are compiled in the warm-up."""
    effort = load.load_options(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        for served in target.targets(arguments, Path(scratch)):
            asked = effort.trimmed(work(arguments.schemas, arguments.tokens), served.vocab_size)
            side = load.side_of_clients(served, load.grpc_caller(served, asked, final_only=False))
            sides = {FREE: replace(side, asks=Workload.without_schemas), BOUND: side}
            for arrival in arguments.load.split(","):
                measured = load.measure([*sides.values()], asked, arrival=arrival, effort=effort, read=_read)
                for name, row in zip(sides, measured, strict=True):
                    about = {"shape": served.name, "work": asked.name, "load": arrival, "constraint": name}
                    yield {**about, "of_free": row["out_tok_s"] / measured[0]["out_tok_s"], **row}


def work(count: int, num_output: int) -> Workload:
    """Builds a workload of `count` random prompts, each with a JSON schema of its own."""
    draw = random.Random(8)
    return Workload(
        WORK,
        tuple(
            BenchRequest(
                tuple(draw.randint(0, LARGEST_ID) for _ in range(PROMPT)), num_output, json.dumps(schema(number))
            )
            for number in range(count)
        ),
    )


def schema(number: int) -> dict[str, Any]:
    """Returns a schema of unbounded records, different for every number."""
    words = [f"word{number}{letter}" for letter in "abcde"]
    fields = {
        f"title{number}": {"type": "string", "maxLength": 40},
        f"count{number}": {"type": "integer", "minimum": -1000, "maximum": 1000},
        f"kind{number}": {"enum": words},
        f"ratio{number}": {"type": "number"},
        f"tags{number}": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "maxItems": 4},
        f"done{number}": {"type": "boolean"},
    }
    record = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "items": record, "minItems": 1000}


def _read(outcome: LoadResult) -> dict[str, float]:
    """Returns the throughput, errors, median time to first token and inter-token latencies of a run."""
    rates, latencies = outcome.rates(), outcome.latencies()
    return {name: rates[name] for name in ("out_tok_s", "errors")} | {
        name: value for name, value in latencies.items() if name.startswith(("ttft_p50", "itl_p"))
    }
