"""Cluster that serves a small random Whisper, with the same model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import transformers

from quire.cluster import Cluster, ClusterOptions
from tests.services.frontend.tiny_folder import byte_level_tokenizer
from tests.services.worker.media.sounds import greedy, make_whisper
from tests.shared.media.audio.files import coded_wav

BINS, RATE = 20, 16_000
SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|ja|>", "<|translate|>", "<|transcribe|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
    *(f"<|{number * 0.02:.2f}|>" for number in range(51)),
]  # fmt: skip
ONCE = "0.00000001"  # temperature: as good as greedy, and tried once, since random weights are never sure


class Served:
    """A cluster that serves Whisper, with the same model of transformers."""

    def __init__(self, cluster: Cluster, model: Any, tokenizer: Any) -> None:
        self._model, self.tokenizer = model, tokenizer
        self.cluster = cluster
        self.base_url = f"http://{cluster.http_address}"
        self.http = httpx.Client(base_url=self.base_url, timeout=120)
        self._extract = transformers.WhisperFeatureExtractor(feature_size=BINS, chunk_length=1)

    def id(self, text: str) -> int:
        found: int = self.tokenizer.convert_tokens_to_ids(text)
        return found

    def send(self, file: bytes | None, path: str = "transcriptions", **fields: Any) -> httpx.Response:
        files = {"user": (None, "x")} if file is None else {"file": ("clip.wav", file)}
        return self.http.post(f"/v1/audio/{path}", files=files, data={"temperature": ONCE, **fields})

    def expected(self, clip: np.ndarray, language: str, num_tokens: int, task: str = "<|transcribe|>") -> str:
        """Returns the text of transformers."""
        prompt = [self.id(text) for text in ("<|startoftranscript|>", f"<|{language}|>", task, "<|notimestamps|>")]
        features = self._extract(clip, sampling_rate=RATE, return_tensors="np").input_features
        tokens = greedy(self._model, features, prompt, num_tokens)
        end = self.id("<|endoftext|>")
        tokens = tokens[: tokens.index(end)] if end in tokens else tokens
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text.strip()


def floats(clip: np.ndarray, rate: int = RATE) -> bytes:
    return coded_wav(3, 32, clip.astype("<f4").tobytes(), rate)


@contextmanager
def whisper_cluster(folder: Path, workers: int = 1, **settings: Any) -> Iterator[Served]:
    """Writes the model to `folder` and serves it. `settings`: of services other than workers, by service."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    size = len(tokenizer)
    ids = {"eos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"), "max_target_positions": 96}
    model = make_whisper(folder, vocab_size=size, num_mel_bins=BINS, max_source_positions=50, **ids)
    tokenizer.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=BINS, chunk_length=1).save_pretrained(folder)
    worker = {"threads": 1, "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 400}
    options = ClusterOptions(
        model=str(folder), workers=workers, http_port=0, grpc_port=0, settings={"worker": worker, **settings}
    )
    with Cluster(options) as running:
        found = Served(running, model, tokenizer)
        yield found
        found.http.close()
