"""Extracts names from PromQL expressions without a parser; where one is installed, a test compares the two."""

from __future__ import annotations

import re

KEYWORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "group_right"}
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
RANGE = re.compile(r"\[[^\]]*\]")
MATCHERS = re.compile(r"\{[^}]*\}")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
OFFSET = re.compile(r"\boffset\s+\S+")


def expanded(expression: str) -> str:
    """Substitutes Grafana's variables."""
    return expression.replace("$__rate_interval", "1m").replace("$model_name", "quire-tiny")


def metrics(expression: str) -> set[str]:
    bare = RANGE.sub("", MATCHERS.sub("", STRING.sub("", OFFSET.sub("", expression))))
    bare = GROUPING.sub("", bare)
    found = re.finditer(rf"(?<![\w:.]){NAME}(?!\s*\()(?![\w:])", bare)
    return {match[0] for match in found} - KEYWORDS


def labels(expression: str) -> set[str]:
    """Returns the labels that an expression matches and groups by."""
    bare = STRING.sub("", expression)
    grouped = {name.strip() for names in GROUPING.findall(bare) for name in names.split(",")}
    matched = {name for text in MATCHERS.findall(bare) for name in re.findall(rf"({NAME})\s*[=!]", text)}
    return (grouped | matched) - {""}
