"""Names of tensors in checkpoints, which differ by what saved them, and by the same names in a model."""

from __future__ import annotations

from collections.abc import Collection

# Tensors that old checkpoints carry although they follow from the configuration.
DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".weight_shape", ".weight_format", ".g_idx")

# What some converters call what others have under another name.
OTHER_NAMES = {
    ".weight_scale_inv": ".weight_scale",
    ".activation_scale": ".input_scale",
    ".gamma": ".weight",  # of norms, in the first BERTs
    ".beta": ".bias",
}

BASES = ("model.", "transformer.", "model.decoder.", "bert.", "roberta.")  # what families call what is below their head

# What models that also see or hear call what is beside their text part, and what they call that.
BESIDE_TEXT = tuple(
    base + name
    for base in ("", "model.")
    for name in ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "audio_tower.")
)
TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
# How files of transformers 4 and 5 begin names of vision towers, and what the towers here call it.
VISION_PREFIXES = {
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "vision_tower.vision_model.": "vision_tower.",
}
WRAPPERS = ("_orig_mod.", "module.", "base_model.model.")  # of torch.compile, data parallel training and PEFT
HEAD, EMBEDDING = "lm_head.weight", ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def model_name(written: str, known: Collection[str]) -> str:
    """Returns what the model calls a tensor; `known`: the names that it has.

    Checkpoints of GPT-2 and of many embedding models hold the decoder alone: names begin inside of it. Those of models
    that also see hold it among others, and what was trained is often saved with what was put around it."""
    name = _usual(written)
    while wrapper := next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), ""):
        name = name.removeprefix(wrapper)
    for prefix, instead in {**TEXT_PREFIXES, **VISION_PREFIXES}.items():
        if name.startswith(prefix):
            name = instead + name.removeprefix(prefix)
    return name if name in known else next((base + name for base in BASES if base + name in known), name)


def _usual(name: str) -> str:
    stem, dot, last = name.rpartition(".")
    return stem + OTHER_NAMES.get(dot + last, dot + last)
