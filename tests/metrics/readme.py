"""Writes the table of shared/metrics/README.md: `python -m tests.metrics.readme`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tests.metrics.catalogue import PROCESS_WIDE, families

README = Path(__file__).resolve().parents[2] / "shared" / "metrics" / "README.md"
BEGIN = "<!-- The rest is made from the catalogues: python -m tests.metrics.readme -->\n"


def table() -> str:
    parts = []
    for service, group in groupby(families(), key=lambda family: family.service):
        rows = [
            f"| `{family.name}` | {family.type} | {', '.join(family.labels)} | {family.text} |"
            for family in group
            if not family.name.startswith(PROCESS_WIDE)
        ]
        parts.append(f"\n## {service.capitalize()}\n\n| name | type | labels | what |\n|---|---|---|---|\n")
        parts.append("\n".join(rows) + "\n")
    return "".join(parts)


def main() -> None:
    before, _, _ = README.read_text().partition(BEGIN)
    README.write_text(before + BEGIN + table())


if __name__ == "__main__":
    main()
