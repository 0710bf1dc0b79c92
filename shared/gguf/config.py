"""Converts a GGUF file's metadata to the config.json that transformers would have written."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from quire.shared.gguf.header import Header, TensorPlace, Values
from quire.shared.gguf.tensors import floats

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
DTYPES = {"F32": "float32", "F16": "float16"}
WIDENED = "bfloat16"  # dtype of dequantized blocks unless --dtype says otherwise
ROPE_FACTORS = "rope_freqs.weight"
LAYER = re.compile(r"blk\.(\d+)\.")

# Keys after the architecture's name that are read. Any other key could change the computation and is refused.
READ = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {  # keys that are not read, with the values that have no effect
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1.0,),
    "attention.scale": (0.0,),  # llama.cpp's value for 1 / sqrt(head_dim)
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "use_parallel_residual": (False,),
    # The order of rows in which every converter has written these files.
    "tensor_data_layout": ("Meta AI original pth", "reference"),
    "pooling_type": (0, 3),  # none, or the last token, which is the default for decoders
}


def config_of(header: Header) -> dict[str, Any]:
    """Returns config.json as a dict. Raises InvalidArgument for values that are missing, unknown or inconsistent
    with the tensors."""
    return _Config(header).build()


class _Config:
    """Builds the configuration of one file. Every size is compared with the tensors, so that a small malicious file
    cannot request much memory."""

    def __init__(self, header: Header) -> None:
        self._header, self._values = header, Values(header)
        self._name = self._values.text("general.architecture")
        if self._name not in ARCHITECTURES:
            there_are = ", ".join(ARCHITECTURES)
            raise header.refusal(f"general.architecture is {self._name[:80]!r}; supported: {there_are}")
        self._refuse_unknown_keys()

    def build(self) -> dict[str, Any]:
        """Returns config.json as a dict. Raises InvalidArgument for a value that is missing, unsupported or
        inconsistent with the tensors."""
        architecture, model_type = ARCHITECTURES[self._name]
        window = self._integer("attention.sliding_window", 0)
        if window and self._name == "llama":
            architecture, model_type = "MistralForCausalLM", "mistral"
        elif window:
            key = f"{self._name}.attention.sliding_window"
            raise self._header.refusal(f"{key} is {window}: the file does not state for which layers")
        vocab_size, hidden_size = self._tensor("token_embd.weight", 2).shape
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": vocab_size,
            **self._sizes(hidden_size),
            "max_position_embeddings": self._integer("context_length"),
            "rms_norm_eps": self._values.number(f"{self._name}.attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "hidden_act": "silu",
            **self._biases(),
            "tie_word_embeddings": "output.weight" not in self._header.tensors,
            "sliding_window": window or None,
            "use_sliding_window": False,
            **self._ends(),
            "dtype": self._dtype(),
        }

    def _sizes(self, hidden_size: int) -> dict[str, int]:
        """Returns the sizes of the model, each checked against the shapes of the tensors. Raises InvalidArgument if
        they differ."""
        heads = self._integer("attention.head_count")
        kv_heads = self._integer("attention.head_count_kv", heads)
        if heads < 1 or kv_heads < 1:
            raise self._header.refusal(f"{self._name}.attention.head_count is {heads}, of keys {kv_heads}")
        head_dim = self._integer("attention.key_length", hidden_size // heads)
        feed, layers = self._integer("feed_forward_length"), self._integer("block_count")
        layer_ids = {int(found[1]) for found in map(LAYER.match, self._header.tensors) if found}
        for key, said, found in (
            ("embedding_length", self._integer("embedding_length"), hidden_size),
            ("block_count", layers, len(layer_ids)),
            ("feed_forward_length", feed, self._tensor("blk.0.ffn_gate.weight", 2).shape[0]),
            ("attention.head_count", heads * head_dim, self._tensor("blk.0.attn_q.weight", 2).shape[0]),
            ("attention.head_count_kv", kv_heads * head_dim, self._tensor("blk.0.attn_k.weight", 2).shape[0]),
            ("attention.value_length", self._integer("attention.value_length", head_dim), head_dim),
            ("rope.dimension_count", self._integer("rope.dimension_count", head_dim), head_dim),
        ):
            if said != found:
                raise self._header.refusal(
                    f"{self._name}.{key} implies {said}, but the rest of the file implies {found}"
                )
        return {
            "hidden_size": hidden_size,
            "intermediate_size": feed,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
        }

    def _biases(self) -> dict[str, bool]:
        """Returns whether the attention and the MLP have biases, by the tensors in the file; False for the attention
        of qwen2, whose architecture always has the same ones."""
        return {
            "attention_bias": self._name != "qwen2" and "blk.0.attn_q.bias" in self._header.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._header.tensors,
        }

    def _rope(self) -> dict[str, Any]:
        """Returns the RoPE parameters in the form of transformers; Llama 3's precomputed factors if the file has
        them. Raises InvalidArgument for an unknown scaling type."""
        theta = self._values.number(f"{self._name}.rope.freq_base", 10_000.0)
        kind = self._values.text(f"{self._name}.rope.scaling.type", "none")
        if ROPE_FACTORS in self._header.tensors:
            return self._factors(theta, kind)
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        if kind not in ("linear", "yarn"):
            raise self._header.refusal(
                f"{self._name}.rope.scaling.type is {kind[:80]!r}; supported: none, linear, yarn"
            )
        scaling = {
            "rope_type": kind,
            "rope_theta": theta,
            "factor": self._values.number(f"{self._name}.rope.scaling.factor"),
        }
        if kind == "yarn":
            original = self._integer("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _factors(self, theta: float, kind: str) -> dict[str, Any]:
        """Returns the RoPE parameters of Llama 3.1 and later, whose per-frequency factors are stored precomputed, as
        longrope with equal factors for short and long texts. `kind`: scaling type that the file names."""
        if kind not in ("none", "llama3"):
            raise self._header.refusal(f"it has {ROPE_FACTORS} and {self._name}.rope.scaling.type {kind[:80]!r}")
        factors = floats(self._header, self._tensor(ROPE_FACTORS, 1))
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }

    def _ends(self) -> dict[str, int | None]:
        """Returns the BOS and EOS token ids; None where the file names none."""
        ids = {"bos_token_id": "tokenizer.ggml.bos_token_id", "eos_token_id": "tokenizer.ggml.eos_token_id"}
        return {name: self._values.integer(key) if key in self._values else None for name, key in ids.items()}

    def _dtype(self) -> str:
        """Returns the dtype of most matrix elements; that of the widened values if most are quantized."""
        counts: Counter[str] = Counter()
        for place in self._header.tensors.values():
            if len(place.shape) > 1:
                counts[place.kind.name] += place.num_bytes // place.kind.block_bytes * place.kind.block_size
        return DTYPES.get(counts.most_common(1)[0][0], WIDENED)

    def _refuse_unknown_keys(self) -> None:
        """Raises InvalidArgument for a metadata key of this architecture that is not read and whose value is not
        neutral."""
        for key, value in self._header.metadata.items():
            prefix, _, name = key.partition(".")
            if prefix == self._name and name not in READ and value not in NEUTRAL.get(name, ()):
                raise self._header.refusal(f"{key} is {repr(value)[:80]}: this feature is not supported")

    def _integer(self, name: str, default: int | None = None) -> int:
        return self._values.integer(f"{self._name}.{name}", default)

    def _tensor(self, name: str, dims: int) -> TensorPlace:
        """Returns the location of a tensor. Raises InvalidArgument if the file lacks it or it does not have `dims`
        dimensions."""
        place = self._header.tensors.get(name)
        if place is None:
            raise self._header.refusal(f"it lacks the tensor {name}")
        if len(place.shape) != dims:
            raise self._header.refusal(f"tensor {name} has shape {list(place.shape)}")
        return place
