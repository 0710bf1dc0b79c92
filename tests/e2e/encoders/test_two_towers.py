"""CLIP and SigLIP over every API: texts and pictures have the vectors of transformers, in one space."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from quire import LLM
from quire.cluster import Cluster, ClusterOptions
from tests.e2e.encoders.retrieval_folders import noise
from tests.services.worker.models.vision.test_two_towers import MODELS, PICTURE, SIDE, TEXT
from tests.services.worker.models.vision.towers import random_model

pytestmark = pytest.mark.timeout(300)

TEXTS = ["A photo of a Cat", "two dogs, and one", "x"]
PICTURES = [noise(40, 30), noise(28, 28), noise(20, 90)]
START, END, PAD = "<start>", "<end>", "<pad>"


class TwoTowers(NamedTuple):
    """A cluster that serves a model, and the model and processors of transformers."""

    name: str
    model: Any
    tokenizer: transformers.PreTrainedTokenizerFast
    pictures: Any
    cluster: Cluster
    http: httpx.Client

    def wanted(self, one: str | Image.Image) -> torch.Tensor:
        """Returns the normalized vector of transformers."""
        with torch.inference_mode():
            if isinstance(one, str):
                padding = {"padding": "max_length", "max_length": 24} if self.name == "siglip" else {}
                text = one.lower() if self.name == "siglip" else one
                inputs = {"input_ids": self.tokenizer(text, return_tensors="pt", **padding).input_ids}
                found = self.model.get_text_features(**inputs, return_dict=True)
            else:
                found = self.model.get_image_features(**self.pictures(one, return_tensors="pt"), return_dict=True)
        return functional.normalize(found.pooler_output[0].float(), dim=0)

    def vector(self, **body: Any) -> torch.Tensor:
        answer = self.http.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        return torch.tensor(answer.json()["data"][0]["embedding"])


def tokenizer_of(name: str) -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    if name == "clip":
        made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(["photo"], trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet))
    made.add_special_tokens([AddedToken(token, normalized=False) for token in (START, END, PAD)])
    frame = f"{START} $A {END}" if name == "clip" else f"$A {END}"
    ends = [(token, made.token_to_id(token)) for token in (START, END)]
    made.post_processor = processors.TemplateProcessing(single=frame, special_tokens=ends)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=PAD)


@pytest.fixture(scope="module", params=["clip", "siglip"])
def towers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoTowers]:
    name, folder = request.param, tmp_path_factory.mktemp("models") / request.param
    kind, config, text, picture, more = MODELS[name]
    tokenizer = tokenizer_of(name)
    ends = {"eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    values = getattr(transformers, config)(
        text_config={**TEXT, **text, **ends}, vision_config={**PICTURE, **picture}, **more
    )
    model = random_model(kind, values)
    if name == "clip":
        crop = {"height": SIDE, "width": SIDE}
        pictures: Any = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=crop)
    else:
        pictures = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    for part in (model, tokenizer, pictures):
        part.save_pretrained(folder)
    settings = {"worker": {"threads": 1, "dtype": "float32", "max_num_seqs": 4}}
    options = ClusterOptions(model=str(folder), workers=1, http_port=0, grpc_port=0, settings=settings)
    with Cluster(options) as cluster, httpx.Client(base_url=f"http://{cluster.http_address}", timeout=120) as http:
        yield TwoTowers(name, model, tokenizer, pictures, cluster, http)


def url(picture: Image.Image) -> str:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def shown(picture: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(picture)}}


def messages(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_vectors_over_http(towers: TwoTowers) -> None:
    """Pictures come as `messages`, as vLLM takes them (vllm#27566, vllm-ascend#4997). Texts of SigLIP are padded,
    however many there are (ncoevoet/facet#145, mteb#1424), and lower-cased (google-research/big_vision#187)."""
    for text in TEXTS:
        torch.testing.assert_close(towers.vector(input=text), towers.wanted(text), atol=2e-4, rtol=2e-3)
    conversation = messages({"type": "text", "text": TEXTS[0]})
    torch.testing.assert_close(towers.vector(messages=conversation), towers.wanted(TEXTS[0]), atol=2e-4, rtol=2e-3)
    for picture in PICTURES:
        found = towers.vector(messages=messages(shown(picture)))
        torch.testing.assert_close(found, towers.wanted(picture), atol=2e-4, rtol=2e-3)
    with openai.OpenAI(base_url=f"http://{towers.cluster.http_address}/v1", api_key="none", max_retries=0) as client:
        both = client.embeddings.create(model="", input=TEXTS)
    for text, found in zip(TEXTS, both.data, strict=True):
        assert np.allclose(found.embedding, towers.wanted(text), atol=2e-4)


def test_vectors_in_python(towers: TwoTowers) -> None:
    with LLM(address=towers.cluster.grpc_address) as llm:
        prompts = [TEXTS[0], *({"prompt": "", "multi_modal_data": {"image": picture}} for picture in PICTURES)]
        found = llm.embed(prompts)
        (cut,) = llm.embed(prompts[1], dimensions=8)
    for one, vector in zip([TEXTS[0], *PICTURES], found, strict=True):
        assert np.allclose(vector, towers.wanted(one), atol=2e-4)
    assert np.allclose(cut, functional.normalize(towers.wanted(PICTURES[0])[:8], dim=0), atol=5e-4)


def test_texts_are_compared_with_pictures(towers: TwoTowers) -> None:
    wanted = [float(towers.wanted(TEXTS[0]) @ towers.wanted(picture)) for picture in PICTURES]
    documents = [{"content": [shown(picture)]} for picture in PICTURES]
    scores = towers.http.post("/score", json={"queries": TEXTS[0], "documents": documents}).json()["data"]
    assert [one["score"] for one in scores] == pytest.approx(wanted, abs=5e-4)
    body = {"queries": {"image": url(PICTURES[0])}, "documents": [*TEXTS, {"text": TEXTS[0]}]}
    scores = towers.http.post("/score", json=body).json()["data"]
    of_texts = [float(towers.wanted(PICTURES[0]) @ towers.wanted(text)) for text in (*TEXTS, TEXTS[0])]
    assert [one["score"] for one in scores] == pytest.approx(of_texts, abs=5e-4)
    with LLM(address=towers.cluster.grpc_address) as llm:
        assert llm.score(TEXTS[0], documents) == pytest.approx(wanted, abs=5e-4)
    asked = {"model": "", "images": [url(picture) for picture in PICTURES]}
    answer = towers.http.post("/v2/embed", json=asked).json()["embeddings"]["float"]
    assert np.allclose(answer[2], towers.wanted(PICTURES[2]), atol=2e-4)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": messages(shown(PICTURES[0]), shown(PICTURES[1]))}, "messages: the input has 2 pictures"),
        ({"messages": messages(shown(PICTURES[0]), {"type": "text", "text": "a"})}, "a picture and a text"),
        ({"messages": messages(shown(PICTURES[0])), "mm_processor_kwargs": {"size": 3}}, "has no such option"),
        ({"input": "word " * 30}, "maximum context length is 24 tokens"),
        ({"input": "word", "dimensions": 500}, "500 is more than the model's"),
    ],
)
def test_what_the_towers_do_not_read_is_refused(towers: TwoTowers, body: dict[str, Any], said: str) -> None:
    answer = towers.http.post("/v1/embeddings", json=body)
    assert (answer.status_code, said in answer.text) == (400, True), answer.text


def test_long_texts_are_cut_on_request(towers: TwoTowers) -> None:
    """The end token stays (transformers#24773: the vector is that of the end token)."""
    found = towers.vector(input="word " * 30, truncate_prompt_tokens=-1)
    text = ("word " * 30).strip()
    ids = towers.tokenizer(text, truncation=True, max_length=24, return_tensors="pt").input_ids
    with torch.inference_mode():
        wanted = towers.model.get_text_features(input_ids=ids, return_dict=True).pooler_output[0]
    torch.testing.assert_close(found, functional.normalize(wanted, dim=0), atol=2e-4, rtol=2e-3)


def test_generation_is_refused(towers: TwoTowers) -> None:
    answer = towers.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 400
    assert "is an encoder and generates no text" in answer.text
    assert towers.http.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]
