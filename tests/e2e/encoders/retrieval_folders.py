"""Small random ColPali and ColQwen2 checkpoints with tokenizers and processors, and the vectors of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.services.worker.checkpoints import SHAPE
from tests.services.worker.media.qwen_pictures import IN_PARTS, PATCH, PIXELS

SIDE, DIMENSIONS = 32, 12
SHIPPED = {"colpali": ("<pad>", "<bos>", "<image>"), "colqwen2": ("<|endoftext|>", "<|im_start|>", "<|im_end|>",
           "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
PLACEHOLDER = {"colpali": "<image>", "colqwen2": "<|image_pad|>"}


class Retriever(NamedTuple):
    """Model and processors of transformers."""

    kind: str
    model: Any
    tokenizer: transformers.PreTrainedTokenizerFast
    pictures: Any

    def query(self, text: str) -> torch.Tensor:
        """Returns the vectors of a query, float32 [num_tokens, DIMENSIONS]."""
        padding = SHIPPED[self.kind][0] * 10
        lead = "<bos>Question: " if self.kind == "colpali" else "Query: "
        return self._vectors(f"{lead}{text}{padding}\n", {})

    def page(self, picture: Image.Image) -> torch.Tensor:
        """Returns the vectors of a page, float32 [num_tokens, DIMENSIONS]."""
        inputs = dict(self.pictures(picture, return_tensors="pt"))
        if self.kind == "colpali":
            text, count = "<image><bos>Describe the image.\n", (SIDE // 4) ** 2
        else:
            text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
            text += "<|im_end|><|endoftext|>"
            count = int(inputs["image_grid_thw"].prod()) // 4
        placeholder = PLACEHOLDER[self.kind]
        return self._vectors(text.replace(placeholder, placeholder * count), inputs)

    def _vectors(self, text: str, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.tensor([self.tokenizer(text, add_special_tokens=False).input_ids])
        if self.kind == "colpali":
            inputs["token_type_ids"] = torch.zeros_like(ids)  # as its processor returns them: all see each other
        elif inputs:
            # The class of transformers 5.24 leaves positions by row and column out, with which the model was trained.
            types = (ids == self.model.config.vlm_config.image_token_id).int()
            positions, _ = self.model.vlm.get_rope_index(ids, types, inputs["image_grid_thw"])
            inputs |= {"position_ids": positions, "pixel_values": inputs["pixel_values"][None]}
        with torch.inference_mode():
            found = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
        vectors: torch.Tensor = found.embeddings[0].float()
        return vectors


def tokenizer_of(kind: str) -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(["Question: Query: Describe the image.\n user the total invoice"] * 5, trainer)
    made.add_special_tokens([AddedToken(name, normalized=False) for name in SHIPPED[kind]])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token=SHIPPED[kind][0])


def write(kind: str, folder: Path) -> Retriever:
    """Writes the model's folder in the format of transformers."""
    tokenizer = tokenizer_of(kind)
    text = {**SHAPE, "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    placeholder = tokenizer.convert_tokens_to_ids(PLACEHOLDER[kind])
    if kind == "colpali":
        inner: Any = transformers.PaliGemmaConfig(
            vision_config={"model_type": "siglip_vision_model", **TOWER, "patch_size": 4, "image_size": SIDE,
                           "vision_use_head": False, "projection_dim": SHAPE["hidden_size"]},
            text_config={"model_type": "gemma", **text, "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0},
            image_token_index=placeholder, projection_dim=SHAPE["hidden_size"],
        )  # fmt: skip
        pictures: Any = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
        model: Any = transformers.ColPaliForRetrieval(
            transformers.ColPaliConfig(vlm_config=inner, embedding_dim=DIMENSIONS)
        )
    else:
        inner = transformers.Qwen2VLConfig(
            vision_config={**PATCH, "embed_dim": 32, "hidden_size": SHAPE["hidden_size"], "depth": 2},
            text_config={**text, **IN_PARTS}, image_token_id=placeholder, tie_word_embeddings=False,
        )  # fmt: skip
        pictures = Qwen2VLImageProcessorPil(**PIXELS)
        model = transformers.ColQwen2ForRetrieval(
            transformers.ColQwen2Config(vlm_config=inner, embedding_dim=DIMENSIONS)
        )
    model.eval().set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter[0].numel() ** -0.5, 0.0)
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pictures.save_pretrained(folder)
    return Retriever(kind, model, tokenizer, pictures)


def in_the_authors_format(source: Path, target: Path, kind: str) -> None:
    """Copies a folder as the authors of the models publish it: config.json of the model inside, other names."""
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (target / name).write_text((source / name).read_text())
    config = json.loads((source / "config.json").read_text())
    named = {"architectures": [{"colpali": "ColPali", "colqwen2": "ColQwen2"}[kind]], "dtype": "float32"}
    inner = {**config["vlm_config"], **named, "embedding_dim": DIMENSIONS}
    (target / "config.json").write_text(json.dumps(inner))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        plain = name.replace("embedding_proj_layer", "custom_text_proj").removeprefix("vlm.")
        if kind == "colpali":
            plain = plain.replace("language_model.", "model.language_model.", 1)
        else:
            plain = plain.replace("language_model.", "model.", 1)
        tensors[plain] = tensor
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def noise(height: int, width: int) -> Image.Image:
    rng = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
