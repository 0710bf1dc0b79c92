"""Random multimodal models of transformers, and our encoders opened from their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.models.loading.loader import Loader
from quire.services.worker.models.vision.port import MediaInput
from quire.shared.media.picture_sizes import CLIP_MEAN, CLIP_STD
from quire.shared.media.processor import Normalization

NORMALIZATION = Normalization(CLIP_MEAN, CLIP_STD)
TEXT_SIZE = 48
TEXT = {
    "hidden_size": TEXT_SIZE, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 120,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
FILE = "model.safetensors"


def random_model(name: str, config: Any) -> Any:
    """Returns an instance of transformers' class `name` with random weights, norms and biases included."""
    torch.manual_seed(7)
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def saved(model: Any, folder: Path, rename: Callable[[str], str] = str) -> Path:
    """Writes the model's folder with its tensors renamed."""
    model.save_pretrained(folder)
    tensors = {rename(name): tensor for name, tensor in load_file(folder / FILE).items()}
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


def read_sections(folder: Path) -> tuple[ConfigFile, ConfigFile]:
    """Reads config.json and its vision section, completed by transformers' defaults."""
    file = ConfigFile(transformers.AutoConfig.from_pretrained(folder).to_dict())
    vision = file.section("vision_config")
    assert vision is not None
    return file, vision


class StrictKernels:
    """Reference kernels with the condition on strides that those for GPUs have."""

    def __init__(self) -> None:
        self._ops = kernels.load("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def ragged_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        assert q.stride() == k.stride() == v.stride()
        assert q.stride()[1:] == (q.size(2), 1)
        attended: torch.Tensor = self._ops.ragged_attention(q, k, v, *rest)
        return attended


def opened(folder: Path, read: Callable[..., Any], encoder: Callable[..., Any], place: Any = None) -> Any:
    """Opens our encoder of a folder, in float32 on the CPU if no `place` is given."""
    place = place or LayerPlacement(StrictKernels(), torch.float32, torch.device("cpu"))
    found = encoder(read(*read_sections(folder), TEXT_SIZE), place, NORMALIZATION)
    Loader("auto", 0).load(found, folder, is_on_other_stage=lambda _: True)
    return found


def random_item(num_tiles: int, side: int, layout: tuple[int, ...] = ()) -> MediaInput:
    generator = torch.Generator().manual_seed(num_tiles)
    shape = (num_tiles, side, side, 3)
    return MediaInput(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8), layout)


def normalized(items: Sequence[MediaInput]) -> torch.Tensor:
    """Returns the tiles of all items as transformers' processors hand them to models."""
    pixels = torch.cat([item.pixels for item in items]).float() * NORMALIZATION.factor
    return ((pixels - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD)).permute(0, 3, 1, 2)
