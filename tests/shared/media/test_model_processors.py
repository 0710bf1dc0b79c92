"""A model's processors are the one table of what it takes: modalities, placeholders and rows."""

from __future__ import annotations

import json
from pathlib import Path

from quire.shared.media.modalities import MODALITIES
from quire.shared.media.model_processors import MediaProcessors
from tests.services.frontend.media.filming_folder import write_filming_folder
from tests.services.frontend.media.hearing import write_hearing_folder
from tests.services.frontend.media.seeing_folder import write_seeing_folder


def test_each_kind_of_model_has_its_modalities(tmp_path: Path) -> None:
    folders = {
        ("image",): write_seeing_folder(tmp_path / "seeing"),
        ("image", "video"): write_filming_folder(tmp_path / "filming"),
        ("audio",): write_hearing_folder(tmp_path / "hearing"),
    }
    for modalities, folder in folders.items():
        found = MediaProcessors.read(folder)
        assert found.modalities == tuple(found.by_modality) == tuple(found.placeholder_ids) == modalities
        assert set(modalities) <= set(MODALITIES)
        assert len(set(found.placeholder_ids.values())) == len(modalities), "each has a token of its own"
        assert found.max_embeddings == max(one.max_embeddings for one in found.by_modality.values())
        assert found.of_encoder is (found.image or found.audio)
        assert not found.attends


def test_a_decoder_that_attends_to_a_clip_has_no_placeholder(tmp_path: Path) -> None:
    config = {"model_type": "whisper", "d_model": 8, "num_mel_bins": 80, "max_source_positions": 1500}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 80}))
    found = MediaProcessors.read(tmp_path)
    assert (found.modalities, found.placeholder_ids, found.attends) == (("audio",), {}, True)
    assert found.of_encoder is found.audio


def test_a_text_model_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = MediaProcessors.read(tmp_path)
    assert found == MediaProcessors()
    assert (found.modalities, found.max_embeddings, found.of_encoder) == ((), 0, None)
