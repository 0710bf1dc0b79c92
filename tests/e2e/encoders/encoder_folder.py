"""A small random encoder as a folder to serve: weights, a WordPiece tokenizer, no chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.services.worker import encoders

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "two", "and", "sum", "the", "of", "four", "hello", "world")
LATE_WORDS = ("[MASK]", "[unused0]", "[unused1]")  # of models that compare texts token by token
CLS, SEP = WORDS.index("[CLS]"), WORDS.index("[SEP]")


def tokenizer(*more: str) -> Tokenizer:
    """Writes a tokenizer like BERT's, with all letters besides a few words, so that no text is unknown. `more`: special
    tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    pieces = [*WORDS, *letters, *(f"##{letter}" for letter in letters)]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens([*WORDS[:4], *more])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return made


def write(folder: Path, family: str, ending: str, *special: str, **changes: Any) -> Any:
    """Writes the encoder; returns the transformers model."""
    _, model = encoders.make(family, ending, folder, **changes)
    tokenizer(*special).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return model


def write_colbert(
    folder: Path, size: int, query_length: int, document_length: int, **changes: Any
) -> tuple[Any, torch.Tensor]:
    """Writes a ColBERT checkpoint as its authors publish it: projection among the model's tensors, names in
    artifact.metadata. Returns the transformers model and the projection [size, hidden_size]."""
    model = write(folder, "bert", "Model", *LATE_WORDS, **changes)
    projection = torch.randn(size, model.config.hidden_size)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": projection}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    metadata = {"dim": size, "query_maxlen": query_length, "doc_maxlen": document_length, "similarity": "cosine"}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    return model, projection
