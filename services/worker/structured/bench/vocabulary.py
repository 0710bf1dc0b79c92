"""Vocabularies for benchmarks: the bundled model's, and one of the size of large models'."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|end|>"
NUM_CHARACTERS = 60_000_000  # of Python source, which contains words, indentation, digits and text of many languages


def train(size: int, path: Path) -> None:
    """Trains a byte-level BPE vocabulary of `size` tokens on the source of the installed packages; takes a minute."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.save(str(path))


def _texts() -> Iterator[str]:
    """Yields the installed packages' Python sources in a fixed random order, up to NUM_CHARACTERS in all."""
    files = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    random.Random(0).shuffle(files)
    total = 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        total += len(text)
        if total > NUM_CHARACTERS:
            return
        yield text
