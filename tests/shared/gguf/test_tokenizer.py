"""Converted tokenizers split and join texts as the file's metadata says."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.shared.errors import InvalidArgument
from quire.shared.gguf.folder import as_folder
from tests.shared.gguf.conftest import Write

SPACE = "\u2581"
NONE = float("-inf")
PIECES = {"a": -1.0, "b": -1.5, "c": -2.0, SPACE: -1.2, "ab": -3.0, "bc": -2.5, f"{SPACE}a": -4.0, "abc": -5.0}
PIECES |= {"aa": -3.5, f"{SPACE}ab": -6.0, "cab": -2.2, "bca": -7.0}


def opened(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def sentence_pieces(**changes: Any) -> dict[str, Any]:
    """A vocabulary as llama.cpp keeps those of SentencePiece."""
    begin = {"<unk>": 2, "<s>": 3, "</s>": 3, **{f"<0x{byte:02X}>": 6 for byte in range(10)}}
    texts = [*begin, *PIECES, "<user>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [0.0] * len(begin) + [*PIECES.values(), 0.0],
        "tokenizer.ggml.token_type": [*begin.values(), *[1] * len(PIECES), 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def best_pairs_first(text: str) -> list[str]:
    """SentencePiece's algorithm: repeatedly merges the neighbours whose piece has the highest score."""
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        pairs = enumerate(itertools.pairwise(parts))
        best, at = max([(PIECES.get(a + b, NONE), -place) for place, (a, b) in pairs], default=(NONE, 0))
        if best == NONE:
            return parts
        parts[-at : -at + 2] = ["".join(parts[-at : -at + 2])]


def test_pieces_are_joined_by_their_scores(write: Write) -> None:
    tokenizer = opened(as_folder(write(sentence_pieces())))
    rng = random.Random(4)
    for _ in range(200):
        text = "".join(rng.choices("abc ", k=rng.randint(1, 12)))
        encoded = tokenizer.encode(text, add_special_tokens=False)
        assert encoded.tokens == best_pairs_first(text), text
        assert tokenizer.decode(encoded.ids) == text


def test_pieces_have_a_beginning_bytes_and_added_tokens(write: Write) -> None:
    tokenizer = opened(as_folder(write(sentence_pieces())))
    assert tokenizer.encode("ab").tokens == ["<s>", f"{SPACE}ab"]
    assert tokenizer.encode("a\x07b", add_special_tokens=False).tokens == [f"{SPACE}a", "<0x07>", "b"]
    assert tokenizer.encode("a<user>b", add_special_tokens=False).tokens[1] == "<user>"
    plain = opened(as_folder(write(sentence_pieces(**{"tokenizer.ggml.add_bos_token": False}))))
    assert plain.encode("ab").tokens == [f"{SPACE}ab"]
    both = opened(as_folder(write(sentence_pieces(**{"tokenizer.ggml.add_eos_token": True}))))
    assert both.encode("ab").tokens == ["<s>", f"{SPACE}ab", "</s>"]
    bare = opened(as_folder(write(sentence_pieces(**{"tokenizer.ggml.add_space_prefix": False}))))
    assert bare.encode("ab", add_special_tokens=False).tokens == ["ab"]


def test_pieces_with_merges_of_their_own_are_joined_by_these(write: Write) -> None:
    """As Gemma 4's files have them: texts are not cut into words, and begin with no space."""
    merges = [f"{SPACE} a", "b c", "a b", f"{SPACE}a b", "\n \n"]
    begin = {"<unk>": 2, "<bos>": 3, "<eos>": 3, "<0x07>": 6}
    texts = [*begin, *PIECES, "\n", "\n\n", "ab", "<user>"]
    texts = [*dict.fromkeys(texts)]
    values = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [*begin.values(), *[1] * (len(texts) - len(begin) - 1), 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = opened(as_folder(write(values)))
    assert tokenizer.encode("abc ab\n\nb").tokens == ["<bos>", "a", "bc", f"{SPACE}ab", "\n\n", "b"]
    assert tokenizer.encode("a\x07<user> a", add_special_tokens=False).tokens == ["a", "<0x07>", "<user>", f"{SPACE}a"]
    for text in ("abc ab\n\nb", " a  b", "a\x07"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    with pytest.raises(InvalidArgument, match="needs or produces an unknown token"):
        as_folder(write({**values, "tokenizer.ggml.merges": ["a zz"]}))


@pytest.mark.parametrize("key", ["bos", "eos", "padding", "unknown", "seperator"])
def test_a_token_that_a_vocabulary_does_not_have_is_none(write: Write, key: str) -> None:
    """llama.cpp#7157: trainers write -1 as an unsigned number."""
    folder = as_folder(write({f"tokenizer.ggml.{key}_token_id": 2**32 - 1}))
    assert opened(folder).get_vocab_size() == 40
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert {"bos": "bos_token", "padding": "pad_token", "unknown": "unk_token"}.get(key) not in config


def test_a_token_beyond_the_vocabulary_is_refused(write: Write) -> None:
    with pytest.raises(InvalidArgument, match=r"tokenizer\.ggml\.bos_token_id is 4000, it has 40 tokens"):
        as_folder(write({"tokenizer.ggml.bos_token_id": 4000}))


LINE = "I'll pay  $1234 at 10:30,\n\nOK?"
CUTS = {
    "gpt-2": ["I", "'ll", " pay", " ", " $", "1234", " at", " 10", ":", "30", ",", "\n", "\n", "OK", "?"],
    "llama-bpe": ["I", "'ll", " pay", " ", " $", "123", "4", " at", " ", "10", ":", "30", ",\n\n", "OK", "?"],
    "qwen2": ["I", "'ll", " pay", " ", " $", *"1234", " at", " ", *"10", ":", *"30", ",\n\n", "OK", "?"],
    "smollm": ["I", "'ll", " pay", " ", " $", *"1234", " at", " ", *"10", ":", *"30", ",", "\n", "\n", "OK", "?"],
}


CUTS |= {
    "command-r": CUTS["smollm"],
    "mpt": CUTS["gpt-2"],
    "qwen35": CUTS["qwen2"],
    "falcon": [
        *("I", "'", "ll", " pay", "  ", "$", "123", "4", " at", " 10", ":", "30", ","),
        *("\n", "\n", "OK", "?"),
    ],
    "deepseek-coder": [
        *("I", "'", "ll", " pay", "  $", *"1234", " at", " ", *"10", ":", *"30", ",", "\n", "\n", "OK", "?"),
    ],
    "deepseek-llm": [
        *("I", "'", "ll", " pay", " ", " $", *"1234", " at", " ", *"10", ":", *"30", ",", "\n", "\n", "OK", "?"),
    ],
}


@pytest.mark.parametrize("pre", CUTS)
def test_texts_are_cut_into_words_by_the_name_of_the_way(write: Write, pre: str) -> None:
    tokenizer = opened(as_folder(write({"tokenizer.ggml.pre": pre})))
    found = [LINE[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(LINE)]
    assert found == CUTS[pre]


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("deepseek-llm", "a𝐀b", ["a", "𝐀", "b"]),  # mathematical letters are none of its words
        ("deepseek-llm", "Üï Ωμέ Жук", ["Üï", " Ωμέ", " Жук"]),
        ("deepseek-coder", "x 中文1,2", ["x", " ", "中文", "1", ",", "2"]),
        ("qwen35", "नमस्ते", ["नमस्ते"]),  # marks belong to their letters
        ("falcon", "1234567", ["123", "456", "7"]),
    ],
)
def test_each_way_has_words_of_its_own(write: Write, pre: str, text: str, cut: list[str]) -> None:
    tokenizer = opened(as_folder(write({"tokenizer.ggml.pre": pre})))
    assert [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == cut


def byte_pairs(**changes: Any) -> dict[str, Any]:
    texts = ["<s>", "<|stop|>", "<|turn|>", *"abc\u0120", "ab", "\u0120ab", "<think>"]
    return {
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1, 1, 4],
        "tokenizer.ggml.merges": ["a b", "\u0120 ab"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **changes,
    }


def test_pairs_are_merged_in_their_order(write: Write) -> None:
    tokenizer = opened(as_folder(write(byte_pairs())))
    assert tokenizer.encode("ab abc").tokens == ["<s>", "ab", "\u0120ab", "c"]
    assert tokenizer.decode(tokenizer.encode("ab abc").ids) == "ab abc"
    assert tokenizer.encode("ab<think>").tokens == ["<s>", "ab", "<think>"]
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == {"<s>": True, "<|stop|>": True, "<|turn|>": True, "<think>": False}


def test_ends_and_templates_come_from_the_file(write: Write) -> None:
    template = "{{ messages[0].content }}"
    told = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.chat_template": template}
    folder = as_folder(write(byte_pairs(**told)))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["chat_template"]) == ("<s>", "<|stop|>", template)
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "with tools"}
    folder = as_folder(write(byte_pairs(**told, **named)))
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == [
        {"name": "default", "template": template},
        {"name": "tool_use", "template": "with tools"},
    ]


def ends(write: Write, *texts: str, kind: int = 3) -> set[str]:
    """Returns the end tokens of a file whose eos does not end a turn, and which names no other one."""
    words = byte_pairs()
    named = [*words["tokenizer.ggml.tokens"], *texts]
    words |= {"tokenizer.ggml.tokens": named}
    words["tokenizer.ggml.token_type"] = [*words["tokenizer.ggml.token_type"], *[kind] * len(texts)]
    folder = as_folder(write(words))
    found = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert all(opened(folder).get_added_tokens_decoder()[number].special for number in found)
    return {named[number] for number in found}


@pytest.mark.parametrize(
    ("texts", "more"),
    [
        (("<|im_end|>",), {"<|im_end|>"}),  # ollama#3759, vllm#4180: runs on into the next turn
        (("<|eot_id|>", "<|eom_id|>"), {"<|eot_id|>", "<|eom_id|>"}),  # llama.cpp PR 6745
        (("<end_of_turn>", "<start_of_turn>"), {"<end_of_turn>"}),  # mlx-engine PR 142
        (("<|endoftext|>", "<|im_start|>"), {"<|endoftext|>"}),
        (("<|end|>",), {"<|end|>"}),
        (("<|end|>", "<|return|>", "<|call|>"), {"<|return|>", "<|call|>"}),  # there it ends a message, no answer
        (("</s>", "[INST]"), {"</s>"}),
    ],
)
def test_ends_of_turns_are_known_by_their_text(write: Write, texts: tuple[str, ...], more: set[str]) -> None:
    assert ends(write, *texts) == {"<|stop|>", *more}


def test_an_end_of_a_turn_that_is_no_control_token_ends_as_well(write: Write) -> None:
    """Some converters mark them as plain or as added ones."""
    assert ends(write, "<|im_end|>", kind=4) == ends(write, "<|im_end|>", kind=1) == {"<|stop|>", "<|im_end|>"}
    assert ends(write, "</s>", kind=1) == {"<|stop|>"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            byte_pairs(**{"tokenizer.ggml.model": "t5"}),
            r"tokenizer\.ggml\.model is 't5'; supported: gpt2, llama and gemma4",
        ),
        (byte_pairs(**{"tokenizer.ggml.merges": None}), r"tokenizer\.ggml\.merges"),  # gg04, ollama#10930
        (byte_pairs(**{"tokenizer.ggml.pre": "other"}), r"tokenizer\.ggml\.pre is 'other'; supported: gpt-2"),
        (
            byte_pairs(**{"tokenizer.ggml.merges": ["a x"]}),
            r"tokenizer\.ggml\.merges: 'a x' needs or produces an unknown",
        ),
        (byte_pairs(**{"tokenizer.ggml.eos_token_id": 99}), r"tokenizer\.ggml\.eos_token_id is 99, it has 10 tokens"),
        (byte_pairs(**{"tokenizer.ggml.token_type": [1]}), r"tokenizer\.ggml\.tokens: 10 tokens, 1 types"),
        (byte_pairs(**{"tokenizer.ggml.tokens": ["a", "a"] * 5}), r"tokenizer\.ggml\.tokens contains a token twice"),
        ({"tokenizer.ggml.tokens": ["a"] * 41}, r"tokenizer\.ggml\.tokens: 41 tokens, 40 types, and the embedding has"),
        (sentence_pieces(**{"tokenizer.ggml.scores": [1.0]}), r"tokenizer\.ggml\.scores: 1 for \d+ tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"tokenizer\.ggml\.tokens is \[1, 2\]: a list of texts is needed"),
    ],
)
def test_what_is_no_tokenizer_is_named(write: Write, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        as_folder(write(changes))


def test_a_piece_of_any_length_costs_little(write: Write) -> None:
    """A token of a million characters is one piece that is made of no others."""
    pieces = sentence_pieces()
    pieces["tokenizer.ggml.tokens"] = [*pieces["tokenizer.ggml.tokens"][:-1], "a" * 1_000_000]
    tokenizer = opened(as_folder(write(pieces)))
    assert tokenizer.encode("aaa", add_special_tokens=False).tokens == [SPACE, "aa", "a"]
