"""Generates the reference pages from the code, so that they cannot differ from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tools.docs.reference import benchmarks, errors, flags, http, metrics, models, parsers, protos, settings

PAGES: Mapping[str, Callable[[], str]] = {
    "benchmarks/cpu.md": benchmarks.cpu,
    "benchmarks/h200.md": benchmarks.h200,
    "models/supported.md": models.page,
    "reference/errors.md": errors.page,
    "reference/flags.md": flags.page,
    "reference/http.md": http.page,
    "reference/metrics.md": metrics.page,
    "reference/parsers.md": parsers.page,
    "reference/settings.md": settings.page,
}


def pages() -> dict[str, str]:
    """Returns the Markdown of every generated page by its path in the site."""
    areas = {f"reference/protos/{area}.md": text for area, text in protos.pages().items()}
    return {path: page() for path, page in PAGES.items()} | areas
