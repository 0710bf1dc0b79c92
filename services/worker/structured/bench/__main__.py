"""Measures compile time, mask time, memory and coverage: python -m quire.services.worker.structured.bench [folder]

Uses the installed libraries with the bundled model's vocabulary and, if a folder is given, with one of 150,000 tokens,
which is trained there on first use.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from quire.services.worker.structured.bench import vocabulary
from quire.services.worker.structured.bench.features import FEATURES, Feature
from quire.services.worker.structured.bench.libraries import NAMES, BenchLibrary, SchemaRejected, follows
from quire.services.worker.structured.bench.schemas import CASES, text

TINY = Path(__file__).parents[4] / "quire/tiny/model"
BIG = 150_000
NUM_VARIANTS = 64
NUM_REPEATS = 5


def main(folder: Path | None = None) -> None:
    """Prints the measurements of every installed library; trains the large vocabulary in `folder` if it is not
    there."""
    vocabularies = [(TINY / "tokenizer.json", 4096)]
    if folder is not None:
        big = folder / "tokenizer.json"
        if not big.exists():
            folder.mkdir(parents=True, exist_ok=True)
            vocabulary.train(BIG, big)
        vocabularies.append((big, BIG))
    for path, size in vocabularies:
        tokenizer = Tokenizer.from_file(str(path))
        for name in NAMES:
            library = _open(name, path, size)
            if library is not None:
                _times(library, tokenizer)
                _memory(library)
                if size == 4096:
                    _coverage(library, tokenizer)


def _open(name: str, path: Path, size: int) -> BenchLibrary | None:
    """Opens a library and prints the time and memory that it took; None, with the reason printed, if it is not
    installed."""
    before, started = _resident_mb(), time.perf_counter()
    try:
        library = BenchLibrary(name, path, size, 0)
    except ImportError as error:
        print(f"{name}: {error}")
        return None
    seconds = time.perf_counter() - started
    print(f"\n{library.name}, {size} tokens: opened in {seconds:.2f} s, {_resident_mb() - before:.0f} MB")
    return library


def _times(library: BenchLibrary, tokenizer: Tokenizer) -> None:
    """Prints the time to compile each schema once, and of every mask and token along a text that fulfils it."""
    mask = np.zeros((1, -(-tokenizer.get_vocab_size() // 32)), dtype=np.int32)
    print(f"{'':14}{'compile ms':>12}{'mask us: 50 %':>16}{'90 %':>8}{'99 %':>8}{'token us':>10}")
    for name, (schema, value) in CASES.items():
        started = time.perf_counter()
        try:
            grammar = library.compile(schema)
        except SchemaRejected as error:
            print(f"{name:14}{error}")
            continue
        compiled_s = time.perf_counter() - started
        fills, accepts = [], []
        for _ in range(NUM_REPEATS):
            matcher = library.start(grammar)
            for token_id in tokenizer.encode(text(value), add_special_tokens=False).ids:
                fills.append(_timed(lambda: library.fill(matcher, mask)))  # noqa: B023
                accepts.append(_timed(lambda: library.accept(matcher, token_id)))  # noqa: B023
        percentiles = statistics.quantiles(fills, n=100)
        row = (percentiles[49], percentiles[89], percentiles[98], statistics.median(accepts))
        print(f"{name:14}{compiled_s * 1e3:12.2f}{row[0]:16.1f}{row[1]:8.1f}{row[2]:8.0f}{row[3]:10.1f}")


def _memory(library: BenchLibrary) -> None:
    """Prints the memory of grammars that differ in every name, each with one matcher."""
    try:
        kept = [_variant(library, -1)]
        before = _resident_mb()
        kept += [_variant(library, number) for number in range(NUM_VARIANTS)]
    except SchemaRejected as error:
        print(f"memory: {error}")
        return
    each_kb = (_resident_mb() - before) / NUM_VARIANTS * 1e3
    print(f"memory: {each_kb:.0f} KB a grammar ({NUM_VARIANTS} that differ in every name)")


def _variant(library: BenchLibrary, number: int) -> tuple[Any, Any]:
    """Compiles a schema whose property names contain `number`, and starts a matcher on it."""
    properties = {f"{name}{number}": CASES[name][0] for name in ("person", "order", "events")}
    grammar = library.compile({"type": "object", "properties": properties})
    return grammar, library.start(grammar)


def _coverage(library: BenchLibrary, tokenizer: Tokenizer) -> None:
    """Prints how many of the schema features the library enforces, refuses, or gets wrong."""
    outcomes: dict[str, list[str]] = {}
    for feature in FEATURES:
        outcomes.setdefault(_outcome(library, tokenizer, feature), []).append(feature.name)
    for outcome, names in sorted(outcomes.items(), key=lambda item: -len(item[1])):
        print(f"{outcome}: {len(names)}" + (f" ({', '.join(names)})" if outcome != "enforced" else ""))


def _outcome(library: BenchLibrary, tokenizer: Tokenizer, feature: Feature) -> str:
    """Classifies a feature: refused, too strict (a valid value is not allowed), not enforced (an invalid one is), or
    enforced."""
    try:
        grammar = library.compile(feature.schema)
    except SchemaRejected:
        return "refused"

    def fulfils(value: Any) -> bool:
        """Returns whether the grammar accepts the JSON text of `value`."""
        ids = tokenizer.encode(text(value), add_special_tokens=False).ids
        return follows(library, library.start(grammar), ids)

    if not all(fulfils(value) for value in feature.right):
        return "too strict"
    return "not enforced" if any(fulfils(value) for value in feature.wrong) else "enforced"


def _timed(call: Callable[[], object]) -> float:
    """Returns the microseconds that `call` takes."""
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e3


def _resident_mb() -> float:
    """Returns the process's resident memory, without what the allocator keeps free."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
