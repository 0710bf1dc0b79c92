"""Runs a long fuzz of the parsers.

Usage: `python -m tests.services.frontend.output_processor.fuzz --cases 5000 --family hermes`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from tests.services.frontend.output_processor.fuzz.conversations import ANSWERS
from tests.services.frontend.output_processor.fuzz.reading import failures, marked_tokenizer
from tests.services.frontend.output_processor.fuzz.spellings import FAMILIES


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cases", type=int, default=1000, help="of each family")
    options.add_argument("--first-seed", type=int, default=0)
    options.add_argument("--family", default="", help="only those whose tool parser has this name")
    options.add_argument("--show", type=int, default=1, help="failures of each rule to print")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = marked_tokenizer(Path(folder) / "model")
        for family in FAMILIES:
            if chosen.family not in ("", family.tools):
                continue
            seeds = range(chosen.first_seed, chosen.first_seed + chosen.cases)
            found = failures(family, tokenizer, ANSWERS, seeds)
            rules = Counter(failure.rule for failure in found)
            print(f"{family.tools} + {family.reasoning or 'none'}: {len(found)} of {chosen.cases} fail {dict(rules)}")
            for rule in rules:
                for failure in [failure for failure in found if failure.rule == rule][: chosen.show]:
                    print(f"  {rule}\n    {failure.text!r}\n    {failure.found}")


if __name__ == "__main__":
    main()
