"""Pages of the stored benchmark results: one section for each document, with its command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.docs.reference.markdown import cell, table

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "benchmarks" / "results"

# Key in a document's rows -> title of the column.
COLUMNS = {
    "shape": "Model",
    "work": "Work",
    "protocol": "Protocol",
    "load": "Load",
    "server": "Server",
    "method": "Method",
    "constraint": "Constraint",
    "cache": "Page cache",
    "running": "Running sequences",
    "mode": "Mode",
    "total_us": "Schedule and apply, µs",
    "p99_us": "p99, µs",
    "plan_bytes": "Plan, bytes",
    "speedup": "Speed-up",
    "full_speedup": "Speed-up, full batch",
    "of_free": "Share of unconstrained speed",
    "out_tok_s": "Output tokens/s",
    "prompt_tok_s": "Prompt tokens/s",
    "upper_bound_tok_s": "Upper bound, tokens/s",
    "total_s": "All requests, s",
    "inputs_s": "Inputs/s",
    "tokens_s": "Tokens/s",
    "ttft_p50_ms": "First token p50, ms",
    "ttft_p99_ms": "First token p99, ms",
    "itl_p50_ms": "Between tokens p50, ms",
    "itl_p99_ms": "Between tokens p99, ms",
    "ready_s": "Ready, s",
    "first_token_s": "First token, s",
    "errors": "Errors",
}
METHOD = (
    "[Method](method.md) says how these are measured and what each work is. Every section is one stored document.\n"
)


def h200() -> str:
    return _page("One H200", "h200-")


def cpu() -> str:
    return _page("CPU", "cpu-")


def _page(title: str, prefix: str) -> str:
    """Returns the page of all stored results whose file names begin with `prefix`."""
    parts = [f"# {title}\n", METHOD]
    for path in sorted(RESULTS.glob(f"{prefix}*.json")):
        parts.extend(_section(path))
    return "\n".join(parts)


def _section(path: Path) -> Iterator[str]:
    """Yields a result's title, machine, command, notes, and table of the columns that any row has."""
    document = json.loads(path.read_text())
    yield f"## {path.stem}\n\n`{path.relative_to(ROOT)}`, {_machine(document['machine'])}:\n"
    yield f"```\n{document['command']}\n```\n"
    if notes := document.get("notes"):
        yield f"{notes}\n"
    rows = document["rows"]
    keys = [key for key in COLUMNS if any(key in row for row in rows)]
    yield table([COLUMNS[key] for key in keys], ([_value(row.get(key, "")) for key in keys] for row in rows))


def _machine(machine: dict[str, Any]) -> str:
    named = (str(machine[key]) for key in ("gpu", "cpu") if machine.get(key))
    return cell(", ".join(named))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return cell(str(value)) if value != "" else ""
