"""Process that checks the lines of a batch, which may be tens of thousands of JSON documents.

Usage: PATH and ENDPOINT on the command line; the result is JSON on stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from quire.shared import batch_lines
from quire.shared.process.priority import lower_priority


def main(path: str, endpoint: str) -> None:
    """Checks all lines of the file for one endpoint and prints {"total", "errors"} as JSON, at a lowered process
    priority."""
    lower_priority()
    with Path(path).open("rb") as file:
        total, wrong = batch_lines.check_file(file, (endpoint,))
    errors = [
        {"code": "invalid_line", "line": one.number, "message": one.message, "param": one.field or None}
        for one in wrong
    ]
    print(json.dumps({"total": total, "errors": errors}))


if __name__ == "__main__":
    main(*sys.argv[1:])
