"""Matches projection names against lists of names, name parts and patterns."""

from __future__ import annotations

import re

PATTERN = "re:"  # compressed-tensors: prefix of regular expressions

# Never quantized by converters, although configurations do not list them.
NEVER_QUANTIZED = ("lm_head", "score", "mlp.gate", "shared_expert_gate", "router", "block_sparse_moe.gate")


def matches(name: str, listed: tuple[str, ...]) -> bool:
    """Returns whether an entry of `listed` is the name, an enclosing module, consecutive parts of it, or a pattern
    ("re:...") matching its start."""
    return any(_matches(name, one) for one in listed)


def _matches(name: str, listed: str) -> bool:
    """Returns whether one entry matches: a regular expression from the name's start, or consecutive dotted parts of the
    name."""
    if listed.startswith(PATTERN):
        return re.match(listed.removeprefix(PATTERN), name) is not None
    return f".{listed}." in f".{name}."
