"""Placement by cached prefixes compared with placement that ignores them."""

from __future__ import annotations

import argparse

import pytest

from tools.bench import placement
from tools.bench.conversations import conversations


def test_conversations_share_their_beginnings_and_nothing_else() -> None:
    talk = conversations(6, groups=3)
    assert talk == conversations(6, groups=3), "the same at every call"
    assert talk[0].system == talk[3].system != talk[1].system
    assert talk[0].turns != talk[3].turns


@pytest.mark.slow
def test_conversations_go_where_their_prompts_are_cached() -> None:
    parser = argparse.ArgumentParser()
    placement.configure(parser)
    flags = ["--replicas", "8", "--policies", "prefix,round_robin", "--step-ms", "10", "--answer", "8"]
    prefix, turns = placement.measure(parser.parse_args(flags))
    assert prefix["hit_rate"] > 1.2 * turns["hit_rate"]  # type: ignore[operator]
