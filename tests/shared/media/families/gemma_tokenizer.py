"""Tokenizer that is built like Gemma's: one token for each number of line feeds, and tokens around pictures."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = {"begin_of_picture": "<start_of_image>", "soft": "<image_soft_token>", "end": "<end_of_image>"}


def gemma_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    made.decoder = decoders.Replace("\u2581", " ")
    lines = [
        f"{word}{chr(10) * count}" for count in range(1, 9) for word in ("user", "What is it?", "Here is the image")
    ]
    trainer = trainers.BpeTrainer(vocab_size=200, initial_alphabet=list("abcdefghijklmnopqrstuvwxyzHWI.?\u2581\n"))
    made.train_from_iterator(lines * 20, trainer)
    made.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL.values()])
    begin, soft, end = SPECIAL.values()
    names = {"boi_token": begin, "image_token": soft, "eoi_token": end}
    found = PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=names)
    assert [len(found("\n" * count).input_ids) for count in (1, 2, 3, 4, 5)] == [1] * 5
    return found
