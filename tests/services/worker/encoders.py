"""Small random encoders of each family, as Hugging Face folders and as the transformers models that made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 211
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

# Name -> (class prefix in transformers, configuration beyond SHAPE)
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", NO_DROPOUT),
    "bert-tanh-gelu": ("Bert", {**NO_DROPOUT, "hidden_act": "gelu_new", "type_vocab_size": 1}),
    "roberta": ("Roberta", {**NO_DROPOUT, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {**NO_DROPOUT, "pad_token_id": 2, "type_vocab_size": 1}),
    "modernbert": ("ModernBert", {"local_attention": 10, "pad_token_id": 0}),
    "modernbert-biases": (
        "ModernBert",
        {
            **{"local_attention": 10, "pad_token_id": 0, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
            **{"classifier_bias": True, "classifier_pooling": "mean"},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def make(family: str, ending: str, folder: Path, **changes: Any) -> tuple[Path, Any]:
    """Makes an encoder. `ending`: suffix of the class name, "Model" or a head."""
    prefix, values = ENCODERS[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **values, "num_labels": 3, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}{ending}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start of training: differences show
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder, model
