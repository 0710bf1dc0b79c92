"""CLIP and SigLIP compute the vectors of transformers: texts in any company, and pictures from files of either age."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional

from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.columns import f32
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import media_pb2, pooling_pb2
from tests.services.worker.models.vision.towers import NORMALIZATION, random_model
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

SIDE, VOCAB, END = 28, 90, 89
LAYERS = {"intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {**LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": 1}
PICTURE = {**LAYERS, "image_size": SIDE, "patch_size": 7}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "clip": ("CLIPModel", "CLIPConfig", {"hidden_size": 32, "eos_token_id": END}, {"hidden_size": 48},
             {"projection_dim": 20}),
    "siglip": ("SiglipModel", "SiglipConfig", {"hidden_size": 32, "projection_size": 48}, {"hidden_size": 48}, {}),
    "siglip-heads-of-72": ("SiglipModel", "SiglipConfig", {"hidden_size": 144, "num_attention_heads": 2},
                           {"hidden_size": 144, "num_attention_heads": 2}, {}),
}  # fmt: skip


def make(name: str, folder: Path) -> Any:
    """Saves a random checkpoint with its processor's and its tokenizer's files; returns the model of transformers."""
    kind, config, text, picture, more = MODELS[name]
    values = getattr(transformers, config)(text_config={**TEXT, **text}, vision_config={**PICTURE, **picture}, **more)
    model = random_model(kind, values)
    model.save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    normalization = {"image_mean": NORMALIZATION.mean, "image_std": NORMALIZATION.std}
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": size, "resample": 3, **normalization}))
    added = {str(END): {"content": "<end>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "added_tokens_decoder": added}))
    return model


def text_of(length: int) -> list[int]:
    return [1, *((5 * place + length) % (VOCAB - 4) + 2 for place in range(length - 2)), END]


def picture(number: int) -> FetchedItem:
    pixels = np.random.default_rng(number).integers(0, 256, (1, SIDE, SIDE, 3), dtype=np.uint8)
    return FetchedItem(bytes([number]) * 32, 1, (), pixels)


def vectors(rig: Rig, prompts: Sequence[list[int] | FetchedItem], **params: Any) -> list[torch.Tensor]:
    """Returns the vectors of texts and pictures that are computed in one step."""
    items = [prompt for prompt in prompts if isinstance(prompt, FetchedItem)]
    if items:
        with torch.inference_mode():
            assert set(rig.replica.media.encode(items).errors) == {None}
    new = []
    for slot, prompt in enumerate(prompts):
        tokens, media = (prompt, ()) if isinstance(prompt, list) else ([END], (_item(prompt),))
        new.append(New(slot, tokens, pooling=pooling_pb2.PoolingParams(**params), media=media))
    rig.step(new, {one.slot: len(one.tokens) for one in new})
    found = torch.from_numpy(f32(rig.last_result.pooled.values).copy()).view(len(prompts), -1)
    rig.end_epoch()
    return [*found]


def _item(fetched: FetchedItem) -> media_pb2.MediaItem:
    return media_pb2.MediaItem(identifier=fetched.identifier, offset=0, length=1, num_embeddings=1, modality="image")


def expected(model: Any, prompt: list[int] | FetchedItem) -> torch.Tensor:
    """Returns transformers' vector of a text or a picture."""
    with torch.inference_mode():
        if isinstance(prompt, list):
            found = model.get_text_features(torch.tensor([prompt]), return_dict=True)
        else:
            pixels = torch.from_numpy(prompt.pixels).float() * NORMALIZATION.factor
            pixels = (pixels - torch.tensor(NORMALIZATION.mean)) / torch.tensor(NORMALIZATION.std)
            found = model.get_image_features(pixels.permute(0, 3, 1, 2), return_dict=True)
    return found.pooler_output[0]


@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_those_of_transformers_in_any_company(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    rig = Rig(tmp_path)
    prompts = [text_of(9), picture(1), text_of(24), text_of(3), picture(2), picture(1)]
    for chosen in (prompts, prompts[:1], prompts[1:2], prompts[3:]):
        for prompt, found in zip(chosen, vectors(rig, chosen, normalize=False), strict=True):
            torch.testing.assert_close(found, expected(model, prompt), atol=2e-4, rtol=2e-4)
        for prompt, found in zip(chosen, vectors(rig, chosen), strict=True):
            wanted = functional.normalize(expected(model, prompt), dim=0)
            torch.testing.assert_close(found, wanted, atol=5e-5, rtol=5e-4)
    cut = vectors(rig, prompts[:2], dimensions=8)
    assert [len(part) for part in cut] == [8, 8]
    torch.testing.assert_close(
        cut[1], functional.normalize(expected(model, prompts[1])[:8], dim=0), atol=5e-5, rtol=5e-4
    )


def test_files_with_the_first_names_are_read(tmp_path: Path) -> None:
    """The first checkpoints store positions as tensors."""
    model = make("clip", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for tower in ("text_model", "vision_model"):
        tensors[f"{tower}.embeddings.position_ids"] = torch.arange(24)[None]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (found,) = vectors(Rig(tmp_path), [text_of(6)], normalize=False)
    torch.testing.assert_close(found, expected(model, text_of(6)), atol=2e-4, rtol=2e-4)


def test_texts_are_served_without_pictures(tmp_path: Path) -> None:
    model = make("siglip", tmp_path)
    rig = Rig(tmp_path, language_model_only=True)
    assert rig.replica.media.modalities == ()
    (found,) = vectors(rig, [text_of(24)], normalize=False)
    torch.testing.assert_close(found, expected(model, text_of(24)), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vision_use_head": False}, "vision_use_head is False: a tower without its pooling head"),
        ({"hidden_size": 32}, "vision_config.hidden_size is 32: vectors of texts have 48 elements"),
        ({"model_type": "siglip2_vision_model"}, "vision_config.model_type is 'siglip2_vision_model'"),
    ],
)
def test_towers_that_do_not_fit_are_refused_by_field(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    make("siglip", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match=said):
        Rig(tmp_path)


def test_an_encoder_has_no_encode_workers(tmp_path: Path) -> None:
    make("clip", tmp_path)
    with pytest.raises(InvalidArgument, match="role: the model is an encoder"):
        Rig(tmp_path, role="encode")
