"""Conversion between a trained tower and a LLaVA checkpoint.

`python -m tools.training.pictures.export --vision FILE --out DIR` adds a trained tower to the text model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tools.training.chat import IMAGE
from tools.training.export import BUNDLED, TEXT_PREFIX, text_tensors, write_json
from tools.training.pictures.recipe import MEAN, STD, TowerShape
from tools.training.pictures.tower import PROJECTOR, TOWER, TrainedTower
from tools.training.tokenizer import load_tokenizer

VISION_FILE = "vision.safetensors"
COPIED = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def save_tower(tower: TrainedTower, file: Path) -> None:
    """Writes the weights of tower and projector in bfloat16, with the tower's sizes among the metadata."""
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in tower.tensors().items()}
    part = file.with_suffix(".part")
    save_file(tensors, part, metadata={"format": "pt", "shape": json.dumps(asdict(tower.shape))})
    part.chmod(0o644)
    part.replace(file)


def load_tower(path: Path) -> TrainedTower:
    """Returns the tower of a file written by `save_tower`, or of a model's folder."""
    with safe_open(path / "model.safetensors" if path.is_dir() else path, "pt") as stored:
        if path.is_dir():
            values = json.loads((path / "config.json").read_text())["vision_config"]
            shape = TowerShape(**{name: values[name] for name in asdict(TowerShape())})
        else:
            shape = TowerShape(**json.loads(stored.metadata()["shape"]))
        names = [name for name in stored.keys() if name.startswith((TOWER, PROJECTOR))]  # noqa: SIM118
        tensors: dict[str, Tensor] = {name: stored.get_tensor(name) for name in names}
    tower = TrainedTower(shape, tensors[f"{PROJECTOR}.linear_2.bias"].numel())
    tower.load(tensors)
    return tower


def vision_config(shape: TowerShape) -> dict[str, Any]:
    """Returns the `vision_config` of this shape."""
    return {
        "model_type": "siglip_vision_model",
        **asdict(shape),
        "num_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "vision_use_head": False,
    }


def preprocessor_config(shape: TowerShape) -> dict[str, Any]:
    """Returns the preprocessor_config.json: pictures are scaled to one size without their aspect."""
    return {
        "image_processor_type": "SiglipImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": shape.image_size, "width": shape.image_size},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
    }


def llava_config(text: dict[str, Any], shape: TowerShape, image_token: int) -> dict[str, Any]:
    """Returns the config.json of the text model with this tower. `text`: the text model's own config.json."""
    outer = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": image_token,
        "image_seq_length": shape.num_patches,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        **{name: text[name] for name in outer},
        "text_config": text,
        "vision_config": vision_config(shape),
    }


def processor_config(shape: TowerShape) -> dict[str, Any]:
    """Returns the processor_config.json, from which transformers knows how many tokens a picture takes."""
    return {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE,
        "patch_size": shape.patch_size,
        "num_additional_image_tokens": 0,
        "vision_feature_select_strategy": "full",
    }


def save_llava(text_model: Path, tower: TrainedTower, folder: Path) -> None:
    """Writes the model with this tower. The text model's tensors are copied bit for bit, under LLaVA's names.

    `text_model` may have a tower already, which is replaced, and may be the same folder.
    """
    config = json.loads((text_model / "config.json").read_text())
    text = {f"{TEXT_PREFIX}{name}": tensor for name, tensor in text_tensors(text_model).items()}
    seen = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in tower.tensors().items()}
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve() != text_model.resolve():
        for name in COPIED:
            shutil.copy(text_model / name, folder)
    part = folder / "model.safetensors.part"
    save_file(text | seen, part, metadata={"format": "pt"})
    part.chmod(0o644)
    part.replace(folder / "model.safetensors")
    image = load_tokenizer(text_model).token_to_id(IMAGE)
    write_json(folder / "config.json", llava_config(config.get("text_config", config), tower.shape, image))
    write_json(folder / "preprocessor_config.json", preprocessor_config(tower.shape))
    write_json(folder / "processor_config.json", processor_config(tower.shape))


def main() -> None:
    """Adds a trained tower to a text model from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vision", type=Path, required=True, help="file of the trained tower")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="folder of the text model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new model; may be the text model's")
    arguments = parser.parse_args()
    save_llava(arguments.model, load_tower(arguments.vision), arguments.out)


if __name__ == "__main__":
    main()
