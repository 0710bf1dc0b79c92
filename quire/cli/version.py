"""`quire version`."""

from __future__ import annotations

import argparse

from quire.shared.version import VERSION


def configure(_parser: argparse.ArgumentParser) -> None:
    pass


def run(_arguments: argparse.Namespace) -> int:
    print(VERSION)
    return 0
