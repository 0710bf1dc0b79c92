"""Names of weights before the first update."""

from __future__ import annotations

AT_START = "0"  # version of the weights that no update has changed
