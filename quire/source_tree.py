"""The parts of the source tree that no wheel contains: the bundled model's questions and its training."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make_importable() -> None:
    """Appends the source tree to the import path, if this copy of the package lies in one."""
    if (ROOT / "evals").is_dir() and str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
