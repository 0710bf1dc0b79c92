"""Model folder whose configuration is that of a LLaVA: a SigLIP tower of 28 x 28 pixels before a small text model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken

from tests.services.frontend.tiny_folder import byte_level_tokenizer, write_folder

PLACEHOLDER = "<image>"
SIDE, PATCH = 28, 7
NUM_EMBEDDINGS = (SIDE // PATCH) ** 2
PARTS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_seeing_folder(folder: Path, chat_template: Any = PARTS, **preprocessor: Any) -> Path:
    """Writes tokenizer, configuration and preprocessor_config.json of the model; it has no weights."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(PLACEHOLDER, special=True)])
    write_folder(
        folder,
        tokenizer=tokenizer,
        chat_template=chat_template,
        architectures=["LlavaForConditionalGeneration"],
        model_type="llava",
        image_token_index=tokenizer.token_to_id(PLACEHOLDER),
        text_config={
            "model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096,
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
        },
        vision_config={"model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": PATCH},
    )  # fmt: skip
    values = {"size": {"height": SIDE, "width": SIDE}, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({**values, **preprocessor}))
    return folder


def png(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def plain(colour: tuple[int, int, int], side: int = SIDE) -> bytes:
    """Returns a PNG file of one colour."""
    return png(Image.new("RGB", (side, side), colour))
