"""The shipped model folder: small enough, complete, and a tokenizer and chat template that do what training assumed."""

from __future__ import annotations

import hashlib
import json
import struct
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

from quire.shared.models.model_identity import read_config
from tools.evals import SKILLS, Split, items, load
from tools.training.chat import END, START, prompt, segments
from tools.training.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS, FastEncoder

MODEL = Path(__file__).parents[3] / "quire" / "tiny" / "model"
TEXT_WEIGHTS = "c57469ede9429bd35bf1cb986ec9f6d0794df7de9c9ffab56c6ac7f3b2839285"  # SHA-256 of the text part's tensors

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "line\nbreaks\r\n\n and\ttabs   ",
    "naïve café, Straße, ελληνικά, русский, עברית, العربية, हिन्दी",
    "日本語 中文 한국어 🙂👩‍👩‍👧🏽 e\u0301 \u200b\x00\x7f",
    "x²³ ½ ٣٤ 12345",
    "<|im_start|>user\nhi<|im_end|><tool_call>",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def render(messages: Any, tools: Any = (), add_generation_prompt: bool = True) -> str:
    """Render the shipped template as serving does: transformers' environment, JSON in the order it came in."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string((MODEL / "chat_template.jinja").read_text())
    return template.render(messages=messages, tools=list(tools) or None, add_generation_prompt=add_generation_prompt)


def test_weights_fit_in_21_megabytes() -> None:
    assert sum(file.stat().st_size for file in MODEL.glob("*.safetensors")) < 21_000_000


def test_weights_are_bfloat16_and_have_the_shapes_of_the_config() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    with (MODEL / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    table = header["language_model.model.embed_tokens.weight"]
    assert table["shape"] == [text["vocab_size"], text["hidden_size"]]
    assert sum(name.startswith("language_model.") for name in header) == 2 + 11 * text["num_hidden_layers"]
    places = header["vision_tower.vision_model.embeddings.position_embedding.weight"]
    assert places["shape"] == [(vision["image_size"] // vision["patch_size"]) ** 2, vision["hidden_size"]]
    assert header["multi_modal_projector.linear_2.weight"]["shape"][0] == text["hidden_size"]


def test_text_weights_are_those_that_the_scores_were_measured_with() -> None:
    """Towers come and go; the text part never changes by a bit."""
    content, found = (MODEL / "model.safetensors").read_bytes(), hashlib.sha256()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    for name in sorted(name for name in header if name.startswith("language_model.")):
        begin, end = header[name]["data_offsets"]
        found.update(name.encode() + content[8 + length + begin : 8 + length + end])
    assert found.hexdigest() == TEXT_WEIGHTS


def test_the_model_stops_where_a_turn_ends(tokenizer: Tokenizer) -> None:
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.token_to_id(END), tokenizer.token_to_id("<|endoftext|>")]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    text = "".join(map(chr, range(0x10, 0x2000))) + "".join(map(chr, range(0x10000, 0x10FFFF, 997)))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_always_single_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("In 1984, 12345 + 678 = 13023; A99 at 07:45.").tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("1984123456781302399" + "0745")


def test_markup_is_one_token_each_and_stays_in_the_text(tokenizer: Tokenizer) -> None:
    for token in MARKUP_TOKENS:
        ids = tokenizer.encode(token).ids
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == token
    for token in CONTROL_TOKENS:
        assert tokenizer.decode(tokenizer.encode(token).ids, skip_special_tokens=True) == ""


def test_vocabulary_is_as_large_as_the_config_says(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == read_config(MODEL)["vocab_size"] == 4096


@pytest.mark.parametrize("name", SKILLS)
def test_training_encodes_as_the_tokenizer_does(tokenizer: Tokenizer, name: str) -> None:
    encoder = FastEncoder(tokenizer)
    for size in load(name).sizes:
        for item in islice(items(name, Split.TRAIN, size), 5):
            text = prompt(item.messages, item.tools) + item.expected
            assert encoder.encode(text) == tokenizer.encode(text).ids


@pytest.mark.parametrize("name", SKILLS)
def test_training_renders_as_the_template_does(name: str) -> None:
    for size in load(name).sizes:
        for item in islice(items(name, Split.TRAIN, size), 5):
            assert render(item.messages, item.tools) == prompt(item.messages, item.tools)


def test_prompts_are_as_long_as_their_size_class_says(tokenizer: Tokenizer) -> None:
    for size, limit in {"256": 300, "1k": 1060, "2k": 2100, "3.5k": 3600}.items():
        lengths = [
            len(tokenizer.encode(prompt(i.messages)).ids) for i in islice(items("recall", Split.HELD_BACK, size), 20)
        ]
        assert limit * 0.6 < min(lengths) <= max(lengths) < limit


def test_answers_fit_in_their_limit(tokenizer: Tokenizer) -> None:
    for name in SKILLS:
        for size in load(name).sizes:
            for item in islice(items(name, Split.HELD_BACK, size), 20):
                assert not item.ends or len(tokenizer.encode(item.expected).ids) < item.max_tokens


def test_template_writes_all_roles() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    spelled = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert render(messages, add_generation_prompt=False) == (
        f"{START}system\nBe kind.{END}\n{START}user\nHi!{END}\n{START}assistant\n{spelled}\n{spelled}{END}\n"
        f"{START}user\n<tool_response>\n2\n</tool_response>{END}\n{START}assistant\nTwo.{END}\n"
    )


def test_template_lists_tools_after_the_system_text() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "Ünï", "parameters": {}}}
    text = render([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}], [tool])
    assert text.startswith(f"{START}system\nBe kind.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(tool, ensure_ascii=False)}\n</tools>" in text
    assert text == prompt([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}], [tool])


def test_both_places_hold_the_same_template() -> None:
    stored = json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"]
    assert stored == (MODEL / "chat_template.jinja").read_text()


def test_only_answers_are_marked_as_the_models() -> None:
    parts = segments([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
    assert [text for text, is_answer in parts if is_answer] == [f"Hello{END}"]
