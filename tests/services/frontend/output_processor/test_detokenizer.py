"""Tests that pieces of text add up to the full decode, and that no piece ends within a character."""

from __future__ import annotations

import random

import pytest

from quire.services.frontend.output_processor.detokenizer import new_detokenizer
from quire.services.frontend.output_processor.sample_text import new_text
from quire.services.frontend.request.request import Sampling
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from tests.services.frontend.tiny_folder import CORPUS, END, START

TEXTS = [
    *CORPUS,
    "  leading and   inner spaces  ",
    "🙂🙃🙂 mixed with words 🙂",
    "e\u0301 combining, \u200d joiner, \ufffd itself",
    f"{START}user\nhello{END}<tool call>done",
]


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = new_detokenizer(tokenizer, skip_special_tokens=skip)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_encoded_text_add_up_to_it(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode_inline(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("skip", [True, False])
def test_random_tokens_add_up_to_the_full_decode(tokenizer: Tokenizer, skip: bool) -> None:
    """Checks that sequences, most of them invalid UTF-8, have the same replacement characters in the same places."""
    rng = random.Random(7)
    size = tokenizer.vocab_size
    for _ in range(2000):
        ids = [rng.randrange(size) for _ in range(rng.randrange(1, 40))]
        assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_random_bytes_of_characters_add_up(tokenizer: Tokenizer) -> None:
    """Drops some of the single-byte tokens of valid text, so that characters break in every way."""
    rng = random.Random(11)
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    for _ in range(2000):
        raw = "".join(rng.choice("aé你🙂∑") for _ in range(12)).encode()
        kept = [bytes([byte]) for byte in raw if rng.random() > 0.15]
        ids = [byte_ids[byte] for byte in kept]
        assert "".join(pieces(tokenizer, ids)) == b"".join(kept).decode(errors="replace")


def test_no_piece_of_valid_text_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_inline("你好🙂é" * 5, add_special_tokens=False)
    assert all("\ufffd" not in piece for piece in pieces(tokenizer, ids))


def test_unfinished_character_appears_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_inline("🙃", add_special_tokens=False)[:-1]
    assert pieces(tokenizer, ids) == [*("" for _ in ids), "\ufffd"]


def test_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [10_000_000, 5]) == ["", *pieces(tokenizer, [5])]


@pytest.mark.parametrize("text", [line for line in CORPUS if line.isascii()] + ["héllo wörld", "a 你好 b", " x  y "])
def test_decoders_that_drop_the_first_space_keep_the_others(metaspace: Tokenizer, text: str) -> None:
    assert not metaspace.byte_level
    ids = metaspace.encode_inline(text, add_special_tokens=False)
    assert "".join(pieces(metaspace, ids)) == metaspace.decode(ids, skip_special_tokens=True)


def test_random_tokens_of_metaspace_decoders_add_up(metaspace: Tokenizer) -> None:
    rng = random.Random(3)
    whole = [i for i in range(metaspace.vocab_size) if not metaspace.token_name(i).startswith("<")]
    for _ in range(500):
        ids = [rng.choice(whole) for _ in range(rng.randrange(1, 30))]
        assert "".join(pieces(metaspace, ids)) == metaspace.decode(ids, skip_special_tokens=True), ids


def test_invalid_bytes_are_not_held_back_for_ever(metaspace: Tokenizer) -> None:
    bad = next(i for i in range(metaspace.vocab_size) if metaspace.token_name(i) == "<0xFF>")
    texts = pieces(metaspace, [bad] * 12)
    assert len("".join(texts)) == 12
    assert any(texts[:5])


# prompt, its continuation: lmdeploy#1743, llama.cpp PR 7524, transformers PR 21955 (the leading space was lost)
CONTINUED = [
    ("hello world", " to everyone"),
    ("the quick", " brown"),
    ("hello wor", "ld and"),
    ("hello\n", "  two three"),
    ("one two", "  "),
    ("hello 🙂", " world"),
]


@pytest.mark.parametrize(("prompt", "answer"), CONTINUED)
@pytest.mark.parametrize("final_only", [False, True])
def test_an_answer_keeps_the_space_between_it_and_the_prompt(
    metaspace: Tokenizer, prompt: str, answer: str, final_only: bool
) -> None:
    prompt_ids = metaspace.encode_inline(prompt, add_special_tokens=False)
    whole = [
        *prompt_ids,
        *metaspace.encode_inline("a" + answer, add_special_tokens=False)[1:],
    ]
    expected = metaspace.decode(whole, skip_special_tokens=True)[len(prompt) :]
    for stop in ((), ("never",)):
        text = new_text(Sampling(stop=stop), metaspace, final_only=final_only, prompt_end=prompt_ids)
        found = "".join(text.push([token], False).text for token in whole[len(prompt_ids) :]) + text.flush().text
        assert found == expected


def test_a_stop_string_with_a_space_matches_at_the_first_token(metaspace: Tokenizer) -> None:
    prompt = metaspace.encode_inline("hello", add_special_tokens=False)
    the = metaspace.encode_inline("the", add_special_tokens=False)
    text = new_text(Sampling(stop=(" the",)), metaspace, final_only=False, prompt_end=prompt)
    assert [text.push([token], False).stop for token in the][-1] == " the"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character_loses_none_of_the_answer(metaspace: Tokenizer, cut: int) -> None:
    torn = metaspace.encode_inline("hello 🙂", add_special_tokens=False)[:-cut]
    answer = metaspace.encode_inline("world", add_special_tokens=False)
    detokenizer = new_detokenizer(metaspace, prompt_end=torn, skip_special_tokens=True)
    assert "".join([*map(detokenizer.push, answer), detokenizer.flush()]).strip() == "world"


def test_byte_tokens_of_sentencepiece_keep_their_bytes(metaspace: Tokenizer) -> None:
    """Checks ollama#13497, vllm#27300: log-probabilities showed U+FFFD for each byte token."""
    for text in ("🙂", "é", "你", "hello world"):
        ids = metaspace.encode_inline(text, add_special_tokens=False)
        assert b"".join(map(metaspace.token_bytes, ids)) == b" " + text.encode()
