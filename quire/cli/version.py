"""`quire version`: the version and the commit that it was built from."""

from __future__ import annotations

import argparse

from quire.shared.version import version_text


def configure(_parser: argparse.ArgumentParser) -> None:
    pass


def run(_arguments: argparse.Namespace) -> int:
    print(version_text())
    return 0
