"""Renders tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """Returns `text` as one table cell: one line, with characters escaped that Markdown or HTML would interpret."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join(lines) + "\n"
