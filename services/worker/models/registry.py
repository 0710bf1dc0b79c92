"""Architectures by the name that config.json gives them."""

from __future__ import annotations

import importlib
from typing import Any

from services.worker.models.config_file import ConfigFile
from services.worker.models.decoder_config import DecoderConfig
from shared.errors import InvalidArgument

# Architecture -> module with read(ConfigFile) -> DecoderConfig; imported when needed.
ARCHITECTURES = {
    "LlamaForCausalLM": "services.worker.models.llama",
    "MistralForCausalLM": "services.worker.models.mistral",
    "Qwen2ForCausalLM": "services.worker.models.qwen2",
    "Qwen3ForCausalLM": "services.worker.models.qwen3",
}


def read_model_config(values: dict[str, Any]) -> DecoderConfig:
    """`values`: config.json. Raises InvalidArgument for what cannot be run as it is meant."""
    config = ConfigFile(values)
    names = config.get("architectures", [])
    known = next((name for name in names if name in ARCHITECTURES), None)
    if known is None:
        raise InvalidArgument(
            f"config.json: architectures is {names!r}; there are {', '.join(ARCHITECTURES)}", field="model"
        )
    module = importlib.import_module(ARCHITECTURES[known])
    decoder: DecoderConfig = module.read(config)
    return decoder
