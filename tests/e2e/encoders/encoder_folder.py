"""A small random encoder as a folder that a cluster serves: weights, a WordPiece tokenizer, no chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.services.worker import encoders

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "two", "and", "sum", "the", "of", "four", "hello", "world")
LATE_WORDS = ("[MASK]", "[unused0]", "[unused1]")  # of models that compare texts token by token
CLS, SEP = WORDS.index("[CLS]"), WORDS.index("[SEP]")


def tokenizer(*more: str) -> Tokenizer:
    """As BERT's; letters beside a few words, so that no text is unknown. `more`: special tokens."""
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
    """Returns the model of transformers."""
    _, model = encoders.make(family, ending, folder, **changes)
    tokenizer(*special).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return model
