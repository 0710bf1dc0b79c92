"""Every combination of filters, with and without earlier features, samples each token with its specified
probability.

The expected probabilities are computed token by token in plain Python.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from quire import kernels
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.sampler import Sampler
from quire.services.worker.step.admission import SlotAdmission
from quire.shared import columns
from quire.shared.pb.common.v1 import sampling_pb2
from tests.services.worker.sampling.test_sampler import LOGITS, VOCAB_SIZE

DRAWS = 3000
PROMPT, OUTPUT, EOS = [3, 6], [9, 9, 5], 1

FILTERS = [
    dict(chosen)
    for count in range(4)
    for chosen in itertools.combinations([("top_k", 5), ("top_p", 0.8), ("min_p", 0.15)], count)
]
BEFORE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bans": {"bad_words": [[9, 5, 3]], "min_tokens": 5},
    "ids": {"logit_bias": {6: 4.0, 1: -1.0}, "allowed_token_ids": [1, 3, 5, 6, 9, 11]},
    "all": {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "bad_words": [[9, 5, 3]],
        "min_tokens": 5,
        "logit_bias": {6: 4.0, 11: -0.9},
        "allowed_token_ids": [1, 3, 5, 6, 9, 11],
    },
}


def expected(asked: dict[str, Any]) -> list[float]:
    """Returns the probability of each token: allowed ids, bad words, min_tokens, bias, penalties, temperature, min_p,
    top_k, top_p."""
    logits = LOGITS.tolist()
    for token in range(VOCAB_SIZE):
        if token not in asked.get("allowed_token_ids", range(VOCAB_SIZE)):
            logits[token] = -math.inf
        if any(word[-1] == token and OUTPUT[1:] == word[:-1] for word in asked.get("bad_words", [])):
            logits[token] = -math.inf
        if token == EOS and len(OUTPUT) < asked.get("min_tokens", 0):
            logits[token] = -math.inf
        logits[token] += asked.get("logit_bias", {}).get(token, 0.0)
        if token in PROMPT + OUTPUT:
            penalty = asked.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        logits[token] -= asked.get("frequency_penalty", 0.0) * OUTPUT.count(token)
        logits[token] -= asked.get("presence_penalty", 0.0) * (token in OUTPUT)
    kept = softmax([logit / asked["temperature"] for logit in logits])
    kept = [p if p >= asked.get("min_p", 0.0) * max(kept) else 0.0 for p in kept]
    if "top_k" in asked:
        least = sorted(kept, reverse=True)[asked["top_k"] - 1]
        kept = [p if p >= least else 0.0 for p in kept]
    kept = [p / sum(kept) for p in kept]
    if "top_p" in asked:
        mass = 0.0
        for p in sorted(kept, reverse=True):
            mass += p
            if mass >= asked["top_p"]:
                kept = [q if q >= p else 0.0 for q in kept]
                break
    return [p / sum(kept) for p in kept]


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def draw(asked: dict[str, Any]) -> list[int]:
    """Counts how often each token is sampled, over as many seeds."""
    bad_words = asked.get("bad_words", [])
    params = {name: value for name, value in asked.items() if name != "bad_words"}
    device, ops = torch.device("cpu"), kernels.load("cpu")
    sampler = Sampler(DRAWS, VOCAB_SIZE, 5, ops, device)
    for slot in range(DRAWS):
        admission = SlotAdmission(
            token_ids=columns.i32_bytes(PROMPT + OUTPUT),
            num_prompt_tokens=len(PROMPT),
            sampling=sampling_pb2.SamplingParams(seed=1000 + slot, **params),
            eos_token_ids=columns.u32_bytes([EOS]),
            bad_word_token_ids=[columns.i32_bytes(word) for word in bad_words],
        )
        sampler.admit(slot, admission)
    positions = np.full(DRAWS, len(PROMPT + OUTPUT), dtype=np.int32)
    rows = LOGITS.expand(DRAWS, -1).clone()
    sampled = sampler.sample(rows, np.arange(DRAWS), Positions(positions, torch.from_numpy(positions)))
    return np.bincount(sampled.token_ids.numpy(), minlength=VOCAB_SIZE).tolist()


def critical(freedom: int) -> float:
    """Returns the chi-square value that is exceeded with a probability of 1e-6 (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 4.753 * math.sqrt(spread)) ** 3)


@pytest.mark.parametrize("temperature", [0.7, 1.6])
@pytest.mark.parametrize("filters", FILTERS, ids=lambda chosen: "+".join(chosen) or "unfiltered")
@pytest.mark.parametrize("before", BEFORE)
def test_tokens_follow_the_expected_distribution(before: str, filters: dict[str, Any], temperature: float) -> None:
    asked = {"temperature": temperature, **BEFORE[before], **filters}
    shares, counts = expected(asked), draw(asked)
    assert [token for token, share in enumerate(shares) if not share and counts[token]] == []
    likely = [(count, share * DRAWS) for count, share in zip(counts, shares, strict=True) if share * DRAWS >= 5]
    rare = [(count, share * DRAWS) for count, share in zip(counts, shares, strict=True) if 0 < share * DRAWS < 5]
    cells = [*likely, (sum(c for c, _ in rare), sum(e for _, e in rare))] if rare else likely
    if len(cells) > 1:
        chi_square = sum((count - share) ** 2 / share for count, share in cells)
        assert chi_square < critical(len(cells) - 1)
