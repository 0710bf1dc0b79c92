"""`python -m tools.reach`: counts the files and functions that a submission and a step run through.

Drives an engine inside of this process (`LLMEngine`) with the bundled model and records, with `sys.setprofile`, every
Python function of the source tree that a steady step, a first step and a submission enter. `--list steady_step` prints
them by file; `--most 45,70,35` fails if one of the three runs through more files than that.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from quire import LLMEngine, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("quire", "services", "shared", "kernels", "protos")
PROMPT = "Once upon a time there was a fox"
WARM_STEPS = 8  # steps until compilation, recording and caching are complete
PHASES = ("steady_step", "first_step", "submission")


@dataclass(slots=True)
class CalledFunctions:
    """Functions that were entered, by the file that defines them."""

    functions: dict[str, set[tuple[int, str]]] = field(default_factory=lambda: defaultdict(set))

    @property
    def num_files(self) -> int:
        return len(self.functions)

    @property
    def num_functions(self) -> int:
        return sum(map(len, self.functions.values()))

    def enter(self, frame: FrameType, event: str, _argument: object) -> None:
        """Records a call, as `sys.setprofile` reports it."""
        if event == "call" and (file := source_file(frame.f_code.co_filename)):
            self.functions[file].add((frame.f_code.co_firstlineno, frame.f_code.co_qualname))


@functools.cache
def source_file(name: str) -> str:
    """Returns the path inside the checkout of a file that belongs to the product; empty for any other file."""
    path = Path(name)
    if not path.is_absolute():
        return ""
    try:
        parts = path.resolve().relative_to(ROOT).parts
    except ValueError:
        return ""
    return "/".join(parts) if parts[0] in PACKAGES else ""


@contextmanager
def recorded() -> Iterator[CalledFunctions]:
    """Records the calls of this thread and of the threads that are started meanwhile."""
    reach = CalledFunctions()
    threading.setprofile(reach.enter)
    sys.setprofile(reach.enter)
    try:
        yield reach
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def measure(**settings: Any) -> dict[str, CalledFunctions]:
    """Returns the reach of each phase, for a request like one that the same engine has answered before."""
    with LLMEngine(device="cpu", **settings) as engine:
        _run(engine, "warm", WARM_STEPS)
        with recorded() as submission:
            engine.add_request("measured", PROMPT, _params(WARM_STEPS + 1))
        with recorded() as first_step:
            engine.step()
        for _ in range(WARM_STEPS // 2):
            engine.step()
        with recorded() as steady_step:
            engine.step()
    return {"steady_step": steady_step, "first_step": first_step, "submission": submission}


def _run(engine: LLMEngine, name: str, num_steps: int) -> None:
    engine.add_request(name, PROMPT, _params(num_steps))
    while engine.has_unfinished_requests():
        engine.step()


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def table(reaches: Mapping[str, CalledFunctions]) -> str:
    lines = [f"{'PHASE':<12} {'FILES':>6} {'FUNCTIONS':>10}"]
    lines += [f"{phase:<12} {reach.num_files:>6} {reach.num_functions:>10}" for phase, reach in reaches.items()]
    return "\n".join(lines)


def listing(reach: CalledFunctions) -> str:
    """Returns the files with the functions of each, in the order of their lines."""
    lines = []
    for file, functions in sorted(reach.functions.items()):
        lines += [f"{file} ({len(functions)})", *(f"    {line:>4} {name}" for line, name in sorted(functions))]
    return "\n".join(lines)


def excess(reaches: Mapping[str, CalledFunctions], most: Mapping[str, int]) -> list[str]:
    """Returns a line for each phase that runs through more files than `most` says."""
    return [
        f"{phase}: {reaches[phase].num_files} files, the limit is {limit}"
        for phase, limit in most.items()
        if reaches[phase].num_files > limit
    ]


def limits(text: str) -> dict[str, int]:
    """Parses the most files of the phases STEADY,FIRST,SUBMISSION; raises ArgumentTypeError for anything but three
    numbers."""
    numbers = text.split(",")
    if len(numbers) != len(PHASES) or not all(number.isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers of files: {','.join(PHASES)}")
    return dict(zip(PHASES, map(int, numbers), strict=True))


def main(arguments: list[str] | None = None, measured: Callable[[], Mapping[str, CalledFunctions]] = measure) -> int:
    """Measures, prints the table and optionally a listing; returns 1 if a phase runs through more files than --most
    allows."""
    parser = argparse.ArgumentParser("python -m tools.reach", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--list", choices=PHASES, help="print the files and functions of this phase")
    parser.add_argument("--most", type=limits, default={}, metavar="45,70,35", help="fail if more files are reached")
    parsed = parser.parse_args(arguments)
    reaches = measured()
    print(table(reaches))
    if parsed.list:
        print(listing(reaches[parsed.list]))
    for line in (excesses := excess(reaches, parsed.most)):
        print(line, file=sys.stderr)
    return 1 if excesses else 0


if __name__ == "__main__":
    sys.exit(main())
