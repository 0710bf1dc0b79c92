"""Encoder models (which only read text), by the architecture in config.json."""

from __future__ import annotations

from typing import Any

FAMILIES = ("Bert", "ModernBert", "Roberta", "XLMRoberta")
ENDINGS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")  # language-model heads are ignored
TWO_TOWERS = {"CLIPModel": "CLIP", "SiglipModel": "Siglip"}  # models with an encoder of texts and one of pictures
OTHER_NAMES = {"HF_ColBERT": "Bert", "ColPaliForRetrieval": "ColPali", **TWO_TOWERS}
TWO_TYPES = "bert"  # model_type whose config.json may omit type_vocab_size, which is then 2


def family_of(config: dict[str, Any]) -> str | None:
    """Returns one of FAMILIES, or None for a model that is not an encoder. `config`: config.json."""
    for name in map(str, config.get("architectures") or ()):
        if name in OTHER_NAMES:
            return OTHER_NAMES[name]
        family = next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), "")
        if family in FAMILIES:
            return family
    return None


def has_two_towers(config: dict[str, Any]) -> bool:
    """Whether texts and pictures have towers of their own, whose vectors are compared."""
    return any(str(name) in TWO_TOWERS for name in config.get("architectures") or ())


def architectures() -> tuple[str, ...]:
    """Returns the names of the architectures of encoders that messages list."""
    named = (f"{family}{ending}" for family in FAMILIES for ending in ("Model", "ForSequenceClassification"))
    return (*named, *OTHER_NAMES)


def has_segment_types(config: dict[str, Any]) -> bool:
    """Whether tokens of a second text get another token type."""
    least = 2 if config.get("model_type") == TWO_TYPES else 1
    return family_of(config) is not None and int(config.get("type_vocab_size") or least) > 1
