"""`python -m tools.bench MODE`: the modes of `quire bench`, and those that need the checkout."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

from quire.bench.workload import workloads
from quire.cli import bench
from tools import program
from tools.bench import tiny_work

NAME = "python -m tools.bench"
# name -> (module, what it measures)
MODES = {
    **bench.MODES,
    "restart": ("tools.bench.restart", "prompts that come back to a worker that was killed and started again"),
    "placement": (
        "tools.bench.placement",
        "where conversations go: hit rate and latency by placement, simulated workers",
    ),
    "roles": ("tools.bench.roles", "prompts computed apart from what decodes, against workers that do both"),
    "speculation": ("tools.bench.speculation", "the same questions with every way of drafting, and without"),
    "structured": ("tools.bench.structured", "answers under a schema each, and the same requests without"),
    "soak": ("tools.bench.soak", "a mixed load with cancels, broken connections and killed workers: what grows"),
    "kernels": ("tools.bench.kernel_programs", "the benches of the kernels"),
}


def run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    return bench.measured(arguments, MODES, [*NAME.split(), *words])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m tools.bench` and returns its exit status; adds the workloads of the bundled model."""
    workloads.add(tiny_work.WORKLOADS, "tiny")
    words = sys.argv[1:] if arguments is None else arguments
    text = "measure, print a table or JSON, and compare with what was measured before"
    configure = functools.partial(bench.configure, modes=MODES)
    return program.main(NAME, text, configure, functools.partial(run, words=words), words)


if __name__ == "__main__":
    sys.exit(main())
