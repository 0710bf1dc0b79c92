"""Which projections a list of names, parts of names and patterns means."""

from __future__ import annotations

import re

PATTERN = "re:"  # compressed-tensors: what follows is a regular expression

# What no converter quantizes although nothing in the configuration says so.
NEVER_QUANTIZED = ("lm_head", "score", "mlp.gate", "shared_expert_gate", "router", "block_sparse_moe.gate")


def matches(name: str, listed: tuple[str, ...]) -> bool:
    """If one of `listed` is the name, a module around it, its last parts, or a pattern that begins to match it."""
    return any(_matches(name, one) for one in listed)


def _matches(name: str, listed: str) -> bool:
    if listed.startswith(PATTERN):
        return re.match(listed.removeprefix(PATTERN), name) is not None
    return f".{listed}." in f".{name}."
