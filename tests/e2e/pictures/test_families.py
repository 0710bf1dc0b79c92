"""Gemma 3 through a whole cluster: its processor, its template and its tokenizer answer as those of transformers."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from quire.cluster import Cluster, ClusterOptions
from tests.services.worker.checkpoints import GEMMA3, SHAPE
from tests.shared.media.families.gemma_tokenizer import SPECIAL, gemma_tokenizer
from tests.shared.media.families.prompts import noise

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 8
SIDE, NUM_SOFT = 32, 16
TEMPLATE = (
    "{% for message in messages %}{{ message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'model\n' }}{% endif %}"
)


class Gemma:
    """A cluster that serves Gemma 3, with the same model and processor of transformers."""

    def __init__(self, cluster: Cluster, model: Any, processor: transformers.Gemma3Processor) -> None:
        self._model, self._processor = model, processor
        self.http = httpx.Client(base_url=f"http://{cluster.http_address}", timeout=120)

    def ask(self, *parts: str | Image.Image, **body: Any) -> list[int]:
        """Returns the tokens of the answer to a user's message of texts and pictures."""
        content = [_part(part) for part in parts]
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS, "top_k": 1}
        answer = self.http.post("/v1/chat/completions", json={**asked, "return_token_ids": True, **body})
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def expected(self, *parts: str | Image.Image, **options: Any) -> list[int]:
        """Returns the tokens of transformers' answer."""
        text = "".join(part if isinstance(part, str) else "<start_of_image>" for part in parts)
        pictures = [part for part in parts if not isinstance(part, str)]
        inputs = self._processor(
            images=[pictures] if pictures else None, text=[f"user\n{text}\nmodel\n"], return_tensors="pt", **options
        )
        with torch.inference_mode():
            found = self._model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        return found[0, inputs["input_ids"].size(1) :].tolist()


def _part(part: str | Image.Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    stream = io.BytesIO()
    part.save(stream, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def make_gemma(folder: Path) -> tuple[Any, transformers.Gemma3Processor]:
    """Saves a random checkpoint with its tokenizer and processor; returns model and processor of transformers."""
    tokenizer = gemma_tokenizer()
    tokenizer.chat_template = TEMPLATE
    begin, soft, end = tokenizer.convert_tokens_to_ids(list(SPECIAL.values()))
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", **tower, "patch_size": 4, "image_size": SIDE},
        text_config={**SHAPE, **GEMMA3, "vocab_size": len(tokenizer), "max_position_embeddings": 4096},
        mm_tokens_per_image=NUM_SOFT,
        boi_token_index=begin,
        image_token_index=soft,
        eoi_token_index=end,
    )
    torch.manual_seed(5)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter[0].numel() ** -0.5, 0.0)
        parameter.data = offset + scale * torch.randn(parameter.shape)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pictures = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    pictures.save_pretrained(folder)
    return model, transformers.Gemma3Processor(pictures, tokenizer, image_seq_length=NUM_SOFT)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gemma]:
    folder = tmp_path_factory.mktemp("models") / "gemma"
    model, processor = make_gemma(folder)
    worker = {"threads": 1, "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 400}
    options = ClusterOptions(model=str(folder), workers=1, http_port=0, grpc_port=0, settings={"worker": worker})
    with Cluster(options) as running:
        found = Gemma(running, model, processor)
        yield found
        found.http.close()


def test_answers_are_those_of_transformers(gemma: Gemma) -> None:
    first, wide, tall = noise(40, 50), noise(20, 90), noise(77, 30)
    for parts in [
        (first, "What is it?"),
        ("user is ", first, "\n\nand ", wide, tall, "\nhere"),
        ("user is ", first, "\n\nand ", tall, "\nhere"),
        ("What " * 90, first, "is " * 70, wide, "it?"),
        ("only the user",),
    ]:
        assert gemma.ask(*parts) == gemma.expected(*parts)


def test_pan_and_scan_by_request(gemma: Gemma) -> None:
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 3}
    parts = ("What is ", noise(30, 100), "\nin the image ", noise(70, 25), "?")
    assert gemma.ask(*parts, mm_processor_kwargs=options) == gemma.expected(*parts, **options)
