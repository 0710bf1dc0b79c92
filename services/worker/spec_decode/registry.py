"""Proposers by method."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.spec_decode.config import SpeculativeConfig
from services.worker.spec_decode.history import TokenHistory
from services.worker.spec_decode.ngram import NgramProposer
from services.worker.spec_decode.proposer import Proposer
from services.worker.spec_decode.suffix import SuffixProposer, SuffixRule


def make_ngram(config: SpeculativeConfig, history: TokenHistory) -> Proposer:
    return NgramProposer(config.shortest_match, config.prompt_lookup_max)


def make_suffix(config: SpeculativeConfig, history: TokenHistory) -> Proposer:
    rule = SuffixRule(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
    )
    return SuffixProposer(rule, config.suffix_decoding_max_cached_requests, history)


PROPOSERS: dict[str, Callable[[SpeculativeConfig, TokenHistory], Proposer]] = {
    "ngram": make_ngram,
    "suffix": make_suffix,
}
