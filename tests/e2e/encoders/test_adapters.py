"""Classes, scores and vectors through adapters, from Python: those of the merged model in transformers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, AsyncLLM, LoRARequest, SamplingParams
from quire.bundled import FOLDER
from quire.requests import RequestOptions
from quire.shared.errors import InvalidArgument, NotFound
from tests.e2e.conftest import running_cluster
from tests.e2e.encoders.test_classifying import DOCUMENTS, QUERY, tokenizer
from tests.services.worker import checkpoints
from tests.services.worker.lora import peft_folders

pytestmark = pytest.mark.slow
OWN = LoRARequest("own", 1, "own")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Any]]]:
    """A cluster of a model class, its address, and the models; requests load the adapter "own"."""
    folder: Path = tmp_path_factory.mktemp("classes")
    made = checkpoints.make("qwen3-tied", folder / "model", classifies=True, vocab_size=4096, num_labels=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, made.folder)
    merged = peft_folders.save(
        made, folder / "own", seed=2, wanted=lambda name: not name.endswith("score"), target_modules=["q_proj"]
    )
    worker = {"num_blocks": 200, "dtype": "float32", "threads": 1, "lora_folders": [str(folder)]}
    with running_cluster(model=str(made.folder), worker=worker) as cluster:
        yield cluster.grpc_address, {"": made.model, "own": merged.model}


def expected(model: Any, *texts: str) -> float:
    with torch.inference_mode():
        return float(model(torch.tensor([tokenizer()(*texts).input_ids])).logits[0].sigmoid())


def test_each_input_goes_through_its_adapter(served: tuple[str, dict[str, Any]]) -> None:
    address, models = served
    wanted = {name: [expected(model, QUERY, document) for document in DOCUMENTS] for name, model in models.items()}
    assert max(abs(a - b) for a, b in zip(*wanted.values(), strict=True)) > 0.01, "the adapter changes nothing"
    with LLM(address=address) as llm:
        assert llm.score(QUERY, DOCUMENTS, lora_request=OWN) == pytest.approx(wanted["own"], abs=1e-4)
        assert llm.score(QUERY, DOCUMENTS) == pytest.approx(wanted[""], abs=1e-4)
        best = llm.rerank(QUERY, DOCUMENTS, top_n=1, lora_request=OWN)[0]
        assert best.score == pytest.approx(max(wanted["own"]), abs=1e-4)
        found = llm.classify([DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[0]], lora_request=[OWN, None, None])
        texts = [("own", DOCUMENTS[0]), ("", DOCUMENTS[1]), ("", DOCUMENTS[0])]
        assert [one.probs[0] for one in found] == pytest.approx(
            [expected(models[name], text) for name, text in texts], abs=1e-4
        )
        mixed = llm.embed([QUERY, QUERY], lora_request=[None, OWN])
        alone = llm.client.embed(QUERY), llm.client.embed(QUERY, RequestOptions(model="own"))
        assert mixed == [alone[0][0], alone[1][0]]
        assert mixed[0] != mixed[1]
        assert llm.encode(QUERY, lora_request=OWN, pooler="all") == llm.client.encode(
            QUERY, RequestOptions(model="own"), pooler="all"
        )
        with pytest.raises(InvalidArgument, match="lora_request: must have one entry for each of 2 prompts, got 1"):
            llm.embed([QUERY, QUERY], lora_request=[OWN])
        with pytest.raises(InvalidArgument, match="lora_request: this call takes one LoRARequest"):
            llm.score(QUERY, DOCUMENTS, lora_request=[OWN])  # type: ignore[arg-type]
        with pytest.raises(NotFound, match="The model `nobody` does not exist"):
            llm.classify(QUERY, lora_request=LoRARequest("nobody"))


async def test_asyncio_has_the_same(served: tuple[str, dict[str, Any]]) -> None:
    """Several concurrent requests name an adapter that is not loaded; it is loaded once."""
    address, models = served
    async with AsyncLLM(address=address) as llm:
        if "own" in {model.name for model in await asyncio.to_thread(llm._blocking.models)}:
            await llm.unload_lora_adapter("own")
        scores, classes, vectors, base = await asyncio.gather(
            llm.score(QUERY, DOCUMENTS[:1], lora_request=OWN),
            llm.classify(DOCUMENTS[0], lora_request=OWN),
            llm.embed(QUERY, lora_request=OWN),
            llm.embed(QUERY),
        )
        assert scores == pytest.approx([expected(models["own"], QUERY, DOCUMENTS[0])], abs=1e-4)
        assert classes[0].probs == pytest.approx([expected(models["own"], DOCUMENTS[0])], abs=1e-4)
        assert vectors != base
        (best,) = await llm.rerank(QUERY, DOCUMENTS[:1], lora_request=OWN)
        assert best.score == pytest.approx(scores[0], abs=1e-4)
        assert (await llm.encode(QUERY, lora_request=OWN))[0][0] == vectors[0]
        assert await llm.unload_lora_adapter("own") == 0
        with pytest.raises(NotFound):
            await llm.embed(QUERY, lora_request=LoRARequest("own"))
        assert await llm.load_lora_adapter("own", "own") == 1
        with pytest.raises(InvalidArgument, match=r"lora_request: 'own' differs from options\.model, 'x'"):
            await llm.embed(QUERY, RequestOptions(model="x"), lora_request=OWN)
