"""Which models only read: encoders, by the architecture that config.json names."""

from __future__ import annotations

from typing import Any

FAMILIES = ("Bert", "ModernBert", "Roberta", "XLMRoberta")
ENDINGS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")  # a head for words is passed over
OTHER_NAMES = {"HF_ColBERT": "Bert"}
TWO_TYPES = "bert"  # the model_type whose config.json may leave out that there are two types of tokens


def family_of(config: dict[str, Any]) -> str | None:
    """One of FAMILIES; None for a model that is no encoder. `config`: config.json."""
    for name in map(str, config.get("architectures") or ()):
        if name in OTHER_NAMES:
            return OTHER_NAMES[name]
        family = next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), "")
        if family in FAMILIES:
            return family
    return None


def has_segment_types(config: dict[str, Any]) -> bool:
    """Whether tokens of a second text are of another type."""
    least = 2 if config.get("model_type") == TWO_TYPES else 1
    return family_of(config) is not None and int(config.get("type_vocab_size") or least) > 1
