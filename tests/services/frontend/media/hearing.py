"""Model folder whose configuration is that of a Qwen2-Audio with a small encoder before a small text model."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tests.services.frontend.tiny_folder import byte_level_tokenizer, write_folder

PLACEHOLDER = "<|AUDIO|>"
BEGIN, END = "<|audio_bos|>", "<|audio_eos|>"
BINS, SECONDS = 20, 2
# Structure of the template that transformers gives to Qwen2-Audio.
NUMBERED = (
    "{% set audio_count = namespace(value=0) %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if 'audio' in content or 'audio_url' in content or content['type'] == 'audio' %}"
    "{% set audio_count.value = audio_count.value + 1 %}"
    "{{ 'Audio ' ~ audio_count.value ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' }}"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_hearing_folder(folder: Path, chat_template: Any = NUMBERED, **preprocessor: Any) -> Path:
    """Writes tokenizer, configuration and preprocessor_config.json of the model; it has no weights."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (PLACEHOLDER, BEGIN, END)])
    write_folder(
        folder,
        tokenizer=tokenizer,
        chat_template=chat_template,
        architectures=["Qwen2AudioForConditionalGeneration"],
        model_type="qwen2_audio",
        audio_token_index=tokenizer.token_to_id(PLACEHOLDER),
        text_config={
            "model_type": "qwen2", "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096,
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
            "intermediate_size": 32,
        },
        audio_config={
            "model_type": "qwen2_audio_encoder", "num_mel_bins": BINS, "max_source_positions": 50 * SECONDS,
            "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
        },
    )  # fmt: skip
    values = {"feature_size": BINS, "chunk_length": SECONDS, **preprocessor}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return folder


def input_audio(content: bytes, form: str = "wav", **fields: Any) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}, **fields}


def audio_url(content: bytes, **fields: Any) -> dict[str, Any]:
    url = f"data:audio/wav;base64,{base64.b64encode(content).decode()}"
    return {"type": "audio_url", "audio_url": {"url": url}, **fields}
