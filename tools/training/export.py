"""Conversion between the network and a Hugging Face model folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import bundled
from tools.training.network import Network, NetworkShape
from tools.training.tokenizer import CONTROL_TOKENS

BUNDLED = bundled.FOLDER
"""The folder that Quire ships."""

END_OF_TEXT, START, END = range(3)
"""Ids of the control tokens: the tokenizer numbers them first."""

TEXT_PREFIX = "language_model."
"""Prefix of the text model's tensors in a checkpoint with a vision tower."""

# Parameters of a layer, by their names here and in Hugging Face's Qwen3.
LAYER_NAMES: dict[str, str] = {
    "input_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o_proj": "self_attn.o_proj",
    "post_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}


def _names(shape: NetworkShape) -> dict[str, str]:
    """Maps the parameter names of the network here to those of Hugging Face's Qwen3."""
    names = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
    for layer in range(shape.num_hidden_layers):
        names |= {
            f"layers.{layer}.{ours}": f"model.layers.{layer}.{theirs}.weight" for ours, theirs in LAYER_NAMES.items()
        }
    return names


def config_of(shape: NetworkShape) -> dict[str, Any]:
    """Returns the config.json of a Qwen3 model of this shape, with tied embeddings."""
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(shape),
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": END_OF_TEXT,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


GENERATION_CONFIG: dict[str, Any] = {
    "eos_token_id": [END, END_OF_TEXT],
    "pad_token_id": END_OF_TEXT,
    "do_sample": False,
}

TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 4096,
    "bos_token": None,
    "eos_token": CONTROL_TOKENS[END],
    "pad_token": CONTROL_TOKENS[END_OF_TEXT],
    "unk_token": None,
    "add_bos_token": False,
    "clean_up_tokenization_spaces": False,
}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_weights(network: Network, folder: Path) -> None:
    """Write model.safetensors in bfloat16. It replaces the old file in one step, so that no reader sees half of it."""
    tensors: dict[str, Tensor] = {}
    parameters = dict(network.named_parameters())
    for ours, theirs in _names(network.shape).items():
        tensors[theirs] = parameters[ours].detach().to("cpu", torch.bfloat16).contiguous()
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.chmod(0o644)  # save_file makes it readable by its owner alone; images run it as another user
    part.replace(folder / "model.safetensors")


def save_configs(shape: NetworkShape, folder: Path) -> None:
    """Writes everything of the model folder but weights and tokenizer."""
    template = (BUNDLED / "chat_template.jinja").read_text()
    write_json(folder / "config.json", config_of(shape))
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    # transformers 5 reads the file, engines that know older folders read the field.
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG | {"chat_template": template})
    if folder.resolve() != BUNDLED:
        shutil.copy(BUNDLED / "chat_template.jinja", folder)


def read_shape(folder: Path) -> NetworkShape:
    """Returns the sizes of the text model of a folder, which may have a vision tower as well."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    return NetworkShape(**{name: text[name] for name in asdict(NetworkShape())})


def text_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the text model's tensors by their names in a checkpoint without a vision tower."""
    stored = load_file(folder / "model.safetensors")
    if not any(name.startswith(TEXT_PREFIX) for name in stored):
        return stored
    return {name.removeprefix(TEXT_PREFIX): tensor for name, tensor in stored.items() if name.startswith(TEXT_PREFIX)}


def load_network(folder: Path, device: torch.device) -> Network:
    """The network of a model folder, its bfloat16 weights held in float32, which keeps them exactly."""
    shape = read_shape(folder)
    network = Network(shape)
    stored = text_tensors(folder)
    network.load_state_dict({ours: stored[theirs].float() for ours, theirs in _names(shape).items()})
    return network.to(device)
