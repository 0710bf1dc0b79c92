"""Maps checkpoint tensor names, which depend on the saving library, to a model's names."""

from __future__ import annotations

from collections.abc import Collection

# Tensors of old checkpoints that can be derived from the configuration.
DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".weight_shape", ".weight_format", ".g_idx")

# Scales of queries, keys, values and probabilities for attention in FP8, under the names of several converters. Keys
# and values are cached with a scale of 1.
KV_SCALE_SUFFIXES = (
    *(".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".prob_output_scale"),
    *(".k_proj.output_scale", ".v_proj.output_scale", ".kv_cache_scaling_factor"),
)

# Alternative names used by some converters.
OTHER_NAMES = {
    ".weight_scale_inv": ".weight_scale",
    ".activation_scale": ".input_scale",
    ".gamma": ".weight",  # norm weights in the first BERT models
    ".beta": ".bias",
}

BASES = (
    "model.",
    "transformer.",
    "model.decoder.",
    "bert.",
    "roberta.",
)  # prefixes of the decoder or encoder below the head

# Prefixes of vision and audio parts, and of the text part, in multimodal models.
BESIDE_TEXT = tuple(
    base + name
    for base in ("", "model.")
    for name in (
        *("vision_tower.", "vision_model.", "visual.", "audio_tower."),
        *("multi_modal_projector.", "connector.", "image_newline", "vision_encoder.", "vision_projection."),
        *("embed_tokens_extend.", "embedding_proj_layer.", "custom_text_proj."),
        *("encoder.input_linear.", "encoder.layers.", "encoder.out.", "encoder.out_mid.", "projector."),
    )
)
TEXT_PREFIXES = {
    "language_model.": "",
    "model.language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
# Prefixes of towers in files of transformers 4 and 5, and the prefix that the towers have here.
VISION_PREFIXES = {
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.visual.": "visual.",
    "model.audio_tower.": "audio_tower.",
    "vision_tower.vision_model.": "vision_tower.",
    "model.vision_model.": "vision_model.",
    "model.vision_encoder.": "vision_encoder.",
    "model.vision_projection.": "vision_projection.",
    "model.connector.": "connector.",
    "model.image_newline": "image_newline",
}
# Prefixes of torch.compile, data-parallel training, PEFT, and the model inside of a retrieval model of pages.
WRAPPERS = ("_orig_mod.", "module.", "base_model.model.", "vlm.")
HEAD, EMBEDDING = "lm_head.weight", ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def model_name(written: str, known: Collection[str]) -> str:
    """Maps the name of a checkpoint tensor, as written, to the model's; unknown names are returned normalized.

    `known`: the model's names. Checkpoints of GPT-2 and many embedding models have only the decoder, so names lack its
    prefix; multimodal models have it among other parts; trained models are often saved with a wrapper's prefix.
    """
    name = _usual(written)
    while wrapper := next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), ""):
        name = name.removeprefix(wrapper)
    for prefix, instead in {**TEXT_PREFIXES, **VISION_PREFIXES}.items():
        if name.startswith(prefix):
            name = instead + name.removeprefix(prefix)
    return name if name in known else next((base + name for base in BASES if base + name in known), name)


def _usual(name: str) -> str:
    """Replaces the last part of a name if some converters write another one (OTHER_NAMES)."""
    stem, dot, last = name.rpartition(".")
    return stem + OTHER_NAMES.get(dot + last, dot + last)
