"""Model folder for frontends: a small byte-level BPE, trained here, and its JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|im_end|>"
START = "<|im_start|>"
SPECIALS = ("<|endoftext|>", START, END)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog and says hello world to everyone who listens",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen",
    "Größe, naïve café, 你好世界, привет мир, 🙂🙃 emoji, ∑∫√ math, ¿qué tal?",
    'user assistant system {"name": "value", "list": [1, 2, 3]} 0123456789 +-*/=',
)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Returns a tokenizer like SentencePiece with byte fallback: its decoder drops the first space and joins bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1, right=0),
    ])  # fmt: skip
    bytes_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *bytes_tokens], show_progress=False
    )
    tokenizer.train_from_iterator([line for line in CORPUS if line.isascii()], trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][
        :3
    ]  # bytes are ordinary tokens; only the trainer needs their names
    return Tokenizer.from_str(json.dumps(document))


def write_folder(
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    chat_template: Any = CHATML,
    generation_config: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    tokenizer = tokenizer or byte_level_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end_id = tokenizer.token_to_id(END)
    written = {
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": 4096,
            "eos_token_id": end_id,
            **config,
        },
        "tokenizer_config.json": {"eos_token": END, "pad_token": "<|endoftext|>", "chat_template": chat_template},
        "generation_config.json": {"eos_token_id": [end_id], **(generation_config or {})},
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))
    return folder
