"""Proposers by method."""

from __future__ import annotations

from services.worker.spec_decode.config import SpeculativeConfig
from services.worker.spec_decode.ngram import NgramProposer
from services.worker.spec_decode.proposer import Proposer


def make_proposer(config: SpeculativeConfig) -> Proposer:
    return NgramProposer(config.shortest_match, config.prompt_lookup_max)
