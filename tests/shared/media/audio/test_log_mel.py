"""Features equal those of transformers' WhisperFeatureExtractor."""

from __future__ import annotations

import numpy as np
import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.media.audio.log_mel import MelSettings, log_mel, mel_filters, read_mel_settings
from tests.shared.media.audio.files import noise, tone

TOLERANCE = 2e-4  # of values from -1 to 2: both compute in float32, and logarithms near the floor amplify rounding


@pytest.mark.parametrize("bins", [80, 128])
def test_filters_are_those_of_transformers(bins: int) -> None:
    from transformers.audio_utils import mel_filter_bank

    wanted = mel_filter_bank(201, bins, 0.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_filters(bins, 400, 16_000), wanted.T, atol=1e-7)


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("num_samples", [1, 159, 160, 401, 16_000, 79_999, 479_700, 479_900, 480_000, 500_000])
def test_padded_features_equal_those_of_transformers(bins: int, num_samples: int) -> None:
    from transformers import WhisperFeatureExtractor

    samples = noise(num_samples, seed=num_samples)
    wanted = WhisperFeatureExtractor(feature_size=bins)(samples, sampling_rate=16_000).input_features[0]
    found = log_mel(samples, MelSettings(bins), 480_000)
    assert found.shape == wanted.shape == (bins, 3000)
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)


@pytest.mark.parametrize("samples", [noise(8_000), tone(440, 0.77, 16_000), np.zeros(4_000, np.float32)])
def test_features_without_padding_equal_those_of_transformers(samples: np.ndarray) -> None:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=128)
    wanted = extractor(samples, sampling_rate=16_000, padding="do_not_pad", truncation=False).input_features[0]
    np.testing.assert_allclose(log_mel(samples, MelSettings(128)), wanted, atol=TOLERANCE)


def test_silence_has_finite_features() -> None:
    features = log_mel(np.zeros(100, np.float32), MelSettings(), 480_000)
    assert np.isfinite(features).all()
    np.testing.assert_allclose(features, -1.5, atol=1e-6)


def test_settings_that_change_the_features_are_refused() -> None:
    settings = read_mel_settings({"feature_size": 128, "chunk_length": 8}, "preprocessor_config.json")
    assert (settings.bins, settings.chunk_frames) == (128, 800)
    with pytest.raises(InvalidArgument, match=r"preprocessor_config.json: do_normalize is True"):
        read_mel_settings({"do_normalize": True}, "preprocessor_config.json")
    with pytest.raises(InvalidArgument, match="feature_size is '80'"):
        read_mel_settings({"feature_size": "80"}, "preprocessor_config.json")
