"""Names of weights."""

from __future__ import annotations

AT_START = "0"  # version of the weights that no update has changed
