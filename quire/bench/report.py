"""Prints results as a table, and stores and compares them as JSON documents."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.bench.measuring import machine
from quire.shared.errors import InvalidArgument

Value = float | int | str
Row = Mapping[str, Value]
WIDEST = 160  # characters of a table
DIGITS = 5  # significant digits of stored results; no measurement is more precise
OWN_FLAGS = ("--out", "--compare")  # flags that do not affect the measurement


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--out", default="", metavar="FILE", help="also write the JSON document to this file")
    parser.add_argument("--compare", default="", metavar="FILE", help="show the ratios to a stored document")


def publish(arguments: argparse.Namespace, rows: Sequence[Row], typed: Sequence[str]) -> None:
    """Prints the rows as a table or JSON, stores them with --out, and prints their ratios to a stored result with
    --compare."""
    document = document_of(rows, typed)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document) if arguments.json else table(document["rows"]), flush=True)
    if arguments.compare:
        text = comparison(document["rows"], stored_rows(arguments.compare))
        print(f"\nratio to {arguments.compare}\n{text}", file=sys.stderr if arguments.json else sys.stdout, flush=True)


def document_of(rows: Sequence[Row], typed: Sequence[str]) -> dict[str, Any]:
    """Returns the result document: machine, versions, the command as typed, and rounded rows."""
    return {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "command": command(typed),
        "rows": [{name: _rounded(value) for name, value in row.items()} for row in rows],
    }


def command(words: Sequence[str]) -> str:
    """Returns the shell-quoted arguments that repeat a measurement: `words` without the flags for its output."""
    kept: list[str] = []
    words = iter(words)  # type: ignore[assignment]
    for word in words:
        if word in OWN_FLAGS:
            next(iter(words), None)
        elif word != "--json" and not word.startswith(tuple(f"{flag}=" for flag in OWN_FLAGS)):
            kept.append(word)
    return shlex.join(kept)


def stored_rows(path: str) -> list[Row]:
    """Reads the rows of a stored result; raises InvalidArgument if the file is not one."""
    try:
        rows: list[Row] = json.loads(Path(path).read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"compare: {path!r} cannot be read as a result that --out has stored: {error!r}", field="compare"
        ) from None
    return rows


def comparison(rows: Sequence[Row], stored: Sequence[Row]) -> str:
    """Returns a table of measured / stored for each number that both have."""
    before = {frozenset(about(row).items()): row for row in stored}
    pairs = [(row, before.get(frozenset(about(row).items()))) for row in rows]
    ratios = [ratio(row, old) for row, old in pairs if old is not None]
    return table(ratios) if ratios else "the stored result and this one have no row in common"


def about(row: Row) -> Row:
    """Returns the label of a row: its texts, and the number of runs."""
    return {name: value for name, value in row.items() if isinstance(value, str) or name == "running"}


def ratio(row: Row, before: Row) -> Row:
    """Returns the row with each number replaced by its ratio to the earlier row's; numbers without an earlier one
    are left out."""
    ratios = dict(about(row))
    for name, value in row.items():
        old = before.get(name)
        if name not in ratios and not isinstance(value, str) and isinstance(old, (int, float)) and old:
            ratios[name] = f"{value / old:.2f}x"
    return ratios


def table(rows: Sequence[Row]) -> str:
    """Returns one line per row, or one column per row where lines would be too long; only columns with values are
    shown."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]
    words = [all(isinstance(row.get(name, ""), str) for row in rows) for name in names]
    text = _aligned(cells, words)
    return text if len(text.partition("\n")[0]) <= WIDEST else _aligned([*zip(*cells, strict=True)], [True])


def _aligned(lines: Sequence[Sequence[str]], words: Sequence[bool]) -> str:
    """Aligns texts to the left and numbers to the right; the last entry of `words` applies to all following columns."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    is_word = [words[i] if i < len(words) else not words[0] for i in range(len(widths))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_word, strict=True)
        ).rstrip()
        for line in lines
    )


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _rounded(value: Value) -> Value:
    """Rounds a float to DIGITS significant digits; large ones become integers."""
    if not isinstance(value, float) or value == 0 or not math.isfinite(value):
        return value
    rounded = round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))
    return int(rounded) if rounded.is_integer() and abs(rounded) >= 10 ** (DIGITS - 1) else rounded


def _cell(value: Value) -> str:
    """Formats a value for the table: thousands separators, four significant digits for small floats."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
