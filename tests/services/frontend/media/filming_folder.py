"""Model folder whose configuration is that of a Qwen-VL: it takes pictures and videos; it has no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tests.services.frontend.tiny_folder import byte_level_tokenizer, write_folder

IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
PATCH, MERGE = 4, 2
SIDE = PATCH * MERGE  # of a token, in pixels
PARTS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_filming_folder(folder: Path, kind: str = "qwen2_5_vl", **preprocessor: Any) -> Path:
    """Writes tokenizer, configuration and preprocessor_config.json of a model. `kind`: its model_type."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in (IMAGE, VIDEO, START, END)])
    write_folder(
        folder,
        tokenizer=tokenizer,
        chat_template=PARTS,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        model_type=kind,
        image_token_id=tokenizer.token_to_id(IMAGE),
        video_token_id=tokenizer.token_to_id(VIDEO),
        vision_start_token_id=tokenizer.token_to_id(START),
        vision_end_token_id=tokenizer.token_to_id(END),
        text_config={
            "model_type": "qwen2", "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096,
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
        },
        vision_config={"patch_size": PATCH, "spatial_merge_size": MERGE, "tokens_per_second": 2},
    )  # fmt: skip
    values = {"patch_size": PATCH, "merge_size": MERGE, "min_pixels": SIDE**2, "max_pixels": 16 * SIDE**2}
    (folder / "preprocessor_config.json").write_text(json.dumps({**values, **preprocessor}))
    return folder
