"""Qwen2-Audio through a whole cluster: processor, template and tokenizer answer as those of transformers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from quire.cluster import Cluster, ClusterOptions
from tests.e2e.page import output_of
from tests.services.frontend.media.hearing import BEGIN, END, NUMBERED, PLACEHOLDER
from tests.services.frontend.tiny_folder import byte_level_tokenizer
from tests.services.worker.checkpoints import SHAPE
from tests.services.worker.media.sound import TOWER
from tests.shared.media.audio.files import coded_wav, noise, wav

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 8
RATE = 16_000
Clip = np.ndarray


class Hearing:
    """A cluster that serves Qwen2-Audio, with the same model and processor of transformers."""

    def __init__(self, cluster: Cluster, model: Any, processor: transformers.Qwen2AudioProcessor) -> None:
        self._model, self._processor = model, processor
        self.http = httpx.Client(base_url=f"http://{cluster.http_address}", timeout=120)

    def ask(self, *parts: str | Clip, **body: Any) -> list[int]:
        """Returns the tokens of the answer to a user's message of texts and clips."""
        content = [{"type": "text", "text": part} if isinstance(part, str) else _part(part) for part in parts]
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS, "top_k": 1}
        answer = self.http.post("/v1/chat/completions", json={**asked, "return_token_ids": True, **body})
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def expected(self, *parts: str | Clip) -> list[int]:
        """Returns the tokens of transformers' answer."""
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "audio"} for part in parts]
        clips = [part for part in parts if not isinstance(part, str)]
        text = self._processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        sound = {"audio": clips, "sampling_rate": RATE} if clips else {}
        inputs = self._processor(text=[text], return_tensors="pt", **sound)
        with torch.inference_mode():
            found = self._model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        return found[0, inputs["input_ids"].size(1) :].tolist()


def _part(clip: Clip) -> dict[str, Any]:
    file = coded_wav(3, 32, clip.astype("<f4").tobytes(), RATE)
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}


def make_qwen2_audio(folder: Path) -> tuple[Any, transformers.Qwen2AudioProcessor]:
    """Saves a random checkpoint with its tokenizer and processor; returns model and processor of transformers."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": [PLACEHOLDER, BEGIN, END]})
    tokenizer.chat_template = NUMBERED
    text = {"model_type": "qwen2", **SHAPE, "hidden_size": 96, "vocab_size": len(tokenizer)}
    config = transformers.Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", **TOWER},
        text_config={**text, "max_position_embeddings": 2048},
        audio_token_index=tokenizer.convert_tokens_to_ids(PLACEHOLDER),
    )
    torch.manual_seed(5)
    model = transformers.Qwen2AudioForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter[0].numel() ** -0.5, 0.0)
        parameter.data = offset + scale * torch.randn(parameter.shape)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=TOWER["num_mel_bins"], chunk_length=1)
    extractor.save_pretrained(folder)
    return model, transformers.Qwen2AudioProcessor(extractor, tokenizer)


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hearing]:
    folder = tmp_path_factory.mktemp("models") / "hearing"
    model, processor = make_qwen2_audio(folder)
    worker = {"threads": 1, "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 400}
    options = ClusterOptions(model=str(folder), workers=1, http_port=0, grpc_port=0, settings={"worker": worker})
    with Cluster(options) as running:
        found = Hearing(running, model, processor)
        yield found
        found.http.close()


def test_answers_are_those_of_transformers(hearing: Hearing) -> None:
    first, second, third = noise(7_000), noise(16_000, seed=1), noise(1_200, seed=2)
    for parts in [
        (first, "What is it?"),
        ("user is ", first, "\n\nand ", second, third, "\nhere"),
        ("user is ", first, "\n\nand ", third, "\nhere"),
        ("What " * 90, first, "is " * 70, second, "it?"),
        ("only the user",),
    ]:
        assert hearing.ask(*parts) == hearing.expected(*parts)


def test_a_clip_that_is_too_long_is_refused_by_its_length(hearing: Hearing) -> None:
    body = {"messages": [{"role": "user", "content": [_part(noise(RATE + 1))]}], "max_tokens": 1}
    answer = hearing.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "lasts longer than 1 s" in answer.json()["error"]["message"]


def test_the_command_of_the_page_is_answered(hearing: Hearing, tmp_path: Path) -> None:
    (tmp_path / "clip.wav").write_bytes(wav(noise(7_000), RATE))
    answer = json.loads(output_of("/v1/chat/completions", str(hearing.http.base_url).rstrip("/"), tmp_path))
    assert answer["usage"]["completion_tokens"] == 100
