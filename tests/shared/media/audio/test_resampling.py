"""Resampling keeps tones and removes what the new rate cannot represent."""

from __future__ import annotations

import numpy as np
import pytest

from quire.shared.media.audio.resampling import resampled
from tests.shared.media.audio.files import noise, tone

RATES = [8_000, 11_025, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 44_099]


@pytest.mark.parametrize("rate", RATES)
def test_a_tone_keeps_its_level_time_and_length(rate: int) -> None:
    found, wanted = resampled(tone(1000, 0.5, rate), rate, 16_000), tone(1000, 0.5, 16_000)
    assert abs(len(found) - len(wanted)) <= 1
    inner = slice(400, 7000)  # the tone begins and ends abruptly
    np.testing.assert_allclose(found[inner], wanted[inner], atol=1e-3 if rate % 25 else 1e-4)


@pytest.mark.parametrize(("rate", "hertz"), [(48_000, 9_000), (48_000, 20_000), (44_100, 12_000), (96_000, 30_000)])
def test_sound_above_the_new_range_does_not_alias(rate: int, hertz: int) -> None:
    found = resampled(tone(hertz, 0.5, rate), rate, 16_000)
    assert np.abs(found[400:7000]).max() < 0.5 * 10 ** (-90 / 20)


def test_equal_rates_change_nothing_and_nothing_stays_nothing() -> None:
    samples = noise(100)
    assert resampled(samples, 16_000, 16_000) is samples
    assert len(resampled(np.zeros(0, np.float32), 48_000, 16_000)) == 0
    assert len(resampled(np.ones(1, np.float32), 48_000, 16_000)) == 1


def test_blocks_join_without_a_seam() -> None:
    samples = noise(120_000, seed=3)
    whole, part = resampled(samples, 48_000, 16_000), resampled(samples[60_000:], 48_000, 16_000)
    np.testing.assert_allclose(whole[20_100:39_000], part[100:19_000], atol=1e-6)
