"""Sampling flags of `quire chat` and `quire complete`."""

from __future__ import annotations

import argparse

from quire.flags.setting_flags import human_int
from quire.params import SamplingParams


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the sampling flags; those that are left out take the model's defaults."""
    parser.add_argument("--temperature", type=float, help="0: greedy")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=human_int)
    parser.add_argument("--max-tokens", type=human_int)
    parser.add_argument("--seed", type=int)


def params_of(arguments: argparse.Namespace) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
    return SamplingParams(**{name: getattr(arguments, name) for name in names})
