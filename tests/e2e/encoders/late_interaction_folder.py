"""The bundled model as a late-interaction model: with a random projection after it, in PyLate's layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.bundled_text import write_text_model

SIZE = 16  # of a token's vector


def write(folder: Path) -> Path:
    """Writes the model into a new folder."""
    write_text_model(folder)
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    (folder / "1_Dense").mkdir()
    dense = {"in_features": hidden, "out_features": SIZE, "bias": False, "activation_function": "nn.Identity"}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    projection = torch.randn(SIZE, hidden, generator=torch.Generator().manual_seed(5))
    save_file({"linear.weight": projection}, folder / "1_Dense" / "model.safetensors")
    types = {"sentence_transformers.models.Transformer": "", "pylate.models.Dense.Dense": "1_Dense"}
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in types.items()]))
    named = {"query_length": 40, "document_length": 100, "do_query_expansion": False, "skiplist_words": [","]}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(named))
    return folder
