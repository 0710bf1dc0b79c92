"""The path through an alignment is that of transformers, and finds tokens where their attention is."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from quire.shared.transcription.alignment import first_rows


def expected(alignment: np.ndarray) -> list[int]:
    """Returns the first row of each token on the path of transformers."""
    tokens, rows = _dynamic_time_warping(-alignment.astype(np.float64))
    return [int(rows[tokens == token].min()) for token in range(len(alignment))]


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 2), (3, 40), (40, 3), (17, 60), (30, 30)])
def test_random_alignments_have_the_path_of_transformers(shape: tuple[int, int]) -> None:
    for seed in range(5):
        alignment = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        assert first_rows(alignment).tolist() == expected(alignment), seed


def test_tokens_begin_where_they_attend() -> None:
    starts = [0, 4, 5, 13, 20]
    alignment = np.full((5, 30), -1.0, np.float32)
    for token, (start, end) in enumerate(zip(starts, [*starts[1:], 30], strict=True)):
        alignment[token, start:end] = 1.0
    assert first_rows(alignment).tolist() == starts


def test_rows_never_fall() -> None:
    alignment = np.random.default_rng(7).normal(size=(50, 200)).astype(np.float32)
    found = first_rows(alignment)
    assert found[0] == 0
    assert (np.diff(found) >= 0).all()
    assert found[-1] < 200
