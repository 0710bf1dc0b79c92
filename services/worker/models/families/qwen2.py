"""Qwen2 and Qwen2.5 (Qwen2ForCausalLM): biased query, key and value projections; later layers may have a window."""

from __future__ import annotations

from dataclasses import replace

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.families.llama import LlamaForCausalLM

WINDOWED = {"full_attention": False, "sliding_attention": True}


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2: biases of queries, keys and values; windows in some layers."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        attention = AttentionConfig(qkv_bias=True)
        return replace(read_decoder(config), sliding_windows=read_windows(config), attention=attention)


def read_windows(config: ConfigFile) -> tuple[int, ...]:
    """Returns each layer's window in tokens, 0 for none: by layer_types (transformers 5), else in all layers from
    max_window_layers on.

    All are 0 unless use_sliding_window is set. Raises InvalidArgument for unknown types or a wrong number of them.
    """
    num_layers = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window") or not config.has("sliding_window"):
        return (0,) * num_layers
    window = config.integer("sliding_window")
    first = config.integer("max_window_layers", 28)
    implied = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    types = config.get("layer_types", implied)
    if len(types) != num_layers or not set(types) <= set(WINDOWED):
        raise refusal("layer_types", types, f"one of {', '.join(WINDOWED)} is needed for each of {num_layers} layers")
    return tuple(window if WINDOWED[kind] else 0 for kind in types)
