"""Tests of pooled texts: truncated within the special tokens, prefixed by the model's prompts, not continued by
encoders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from quire.services.frontend.input_processor.pooling.pooling_traits import PoolingTextFormat, PoolingTraits
from quire.services.frontend.input_processor.prepared_prompt import PreparedPrompt
from quire.services.frontend.input_processor.processor import InputProcessor
from quire.services.frontend.request.request import (
    PairPrompt,
    Pooling,
    Prompt,
    Request,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from quire.services.frontend.scheduler_client.client import ClusterLimits
from quire.services.frontend.tokenizer.tokenizer import Tokenizer as OurTokenizer
from quire.shared.errors import InvalidArgument
from quire.shared.pb.worker.v1.worker_pb2 import SequenceParams
from tests.services.frontend.tiny_folder import write_folder

WORDS = ("[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d", "search", ":")
UNK, CLS, SEP, A, B, C, D, SEARCH, COLON = range(len(WORDS))


def word_piece() -> Tokenizer:
    """Returns a tokenizer like BERT's: lower case, special tokens around a text and between two."""
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(WORDS[:3]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Iterator[OurTokenizer]:
    """Returns the tokenizer of a folder without a chat template."""
    folder = write_folder(tmp_path, tokenizer=word_piece(), chat_template=None)
    found = OurTokenizer(folder, 1)
    yield found
    found.close()


def processor(tokenizer: OurTokenizer, **reader: object) -> InputProcessor:
    read = PoolingTraits(**{"encoder": "some-bert", "token_types": True, **reader})  # type: ignore[arg-type]
    return InputProcessor(tokenizer, len(WORDS), 8, pooling_traits=read)


def request(prompt: Prompt, *, pooling: Pooling | None = None, **fields: object) -> Request:
    asked = {"pooling": pooling or Pooling(), "truncation_side": "right", **fields}
    return Request("r", "", [prompt], Sampling(), 0.0, **asked)  # type: ignore[arg-type]


async def prepared(reading: InputProcessor, asked: Request, max_model_len: int = 8) -> PreparedPrompt:
    reading.check(asked, max_model_len)
    with reading.holding_media(asked) as media:
        (found,) = await reading.prepare(asked, ClusterLimits(max_model_len, 0, frozenset()), media)
    return found


@pytest.mark.parametrize(
    ("keep", "side", "ids"),
    [
        (None, "right", [CLS, A, B, C, D, SEP]),
        (6, "right", [CLS, A, B, C, D, SEP]),
        (4, "right", [CLS, A, B, SEP]),
        (4, "left", [CLS, C, D, SEP]),
        (3, "left", [CLS, D, SEP]),
        (2, "right", [CLS, A]),  # the special tokens leave no space for text
    ],
)
async def test_truncation_keeps_the_special_tokens(
    tokenizer: OurTokenizer, keep: int, side: str, ids: list[int]
) -> None:
    asked = request(TextPrompt("a b c d"), truncate_prompt_tokens=keep, truncation_side=side)
    assert (await prepared(processor(tokenizer), asked)).token_ids == ids


async def test_truncation_to_minus_one_fills_the_context(tokenizer: OurTokenizer) -> None:
    """Checks this also for a text that is far too long; token prompts are truncated unchanged."""
    reading = processor(tokenizer)
    long = await prepared(reading, request(TextPrompt("a b " * 100_000), truncate_prompt_tokens=-1))
    assert long.token_ids == [CLS, A, B, A, B, A, B, SEP]
    exact = await prepared(reading, request(TokenPrompt([A] * 8)))
    assert exact.token_ids == [A] * 8
    cut = await prepared(reading, request(TokenPrompt([A] * 5 + [B] * 5), truncate_prompt_tokens=-1))
    assert cut.token_ids == [A] * 5 + [B] * 3


async def test_the_end_of_a_long_text_may_be_kept(tokenizer: OurTokenizer) -> None:
    """Keeps the end however long the rest is, and also of two texts."""
    reading, cut = processor(tokenizer), {"truncate_prompt_tokens": -1, "truncation_side": "left"}
    end = await prepared(reading, request(TextPrompt("a b " * 100_000 + "c d"), **cut))
    assert end.token_ids == [CLS, A, B, A, B, C, D, SEP]
    for first, second, ids in (
        ("a b " * 100_000, "c d", [CLS, B, A, B, SEP, C, D, SEP]),
        ("a b", "c d " * 100_000, [CLS, C, D, C, D, C, D, SEP]),
    ):
        pair = await prepared(reading, request(PairPrompt(first, second), **cut))
        assert pair.token_ids == ids


@pytest.mark.parametrize(("keep", "second_from"), [(None, 5), (7, 5), (6, 4), (5, 3), (4, 2), (3, 1)])
async def test_truncation_moves_the_start_of_the_second_text(
    tokenizer: OurTokenizer, keep: int | None, second_from: int
) -> None:
    """Truncates [CLS] a b a [SEP] c [SEP], which loses its beginning after the first special token."""
    asked = request(PairPrompt("a b a", "c"), truncate_prompt_tokens=keep, truncation_side="left")
    found = await prepared(processor(tokenizer), asked)
    assert SequenceParams.FromString(found.prompt_request.params).second_text_from == second_from
    assert list(found.token_ids[second_from:]) == [C, SEP]


async def test_too_long_texts_are_refused_with_a_remedy(tokenizer: OurTokenizer) -> None:
    with pytest.raises(InvalidArgument, match=r"9 tokens\. Please reduce its length, or send truncate_prompt_tokens"):
        await prepared(processor(tokenizer), request(TextPrompt("a b a b a b a")))


@pytest.mark.parametrize(
    ("has_types", "keep", "second_from"),
    [(True, None, 4), (False, None, 0), (True, 6, 4), (True, 4, 0)],
)
async def test_workers_get_the_start_of_the_second_text(
    tokenizer: OurTokenizer, has_types: bool, keep: int | None, second_from: int
) -> None:
    asked = request(PairPrompt("a b", "c d"), truncate_prompt_tokens=keep)
    found = await prepared(processor(tokenizer, token_types=has_types), asked)
    assert (
        found.token_ids == {None: [CLS, A, B, SEP, C, D, SEP], 6: [CLS, A, B, SEP, C, SEP], 4: [CLS, A, B, SEP]}[keep]
    )
    assert SequenceParams.FromString(found.prompt_request.params).second_text_from == second_from


async def test_texts_follow_the_prompts_of_the_model(tokenizer: OurTokenizer) -> None:
    texts = PoolingTextFormat({"query": "SEARCH: ", "none": ""}, default="query", lower_case=True)
    reading = processor(tokenizer, texts=texts)
    by_default = await prepared(reading, request(TextPrompt("A")))
    assert by_default.token_ids == [CLS, SEARCH, COLON, A, SEP]
    named = await prepared(reading, request(TextPrompt("A"), pooling=Pooling(prompt_name="none")))
    assert named.token_ids == [CLS, A, SEP]
    with pytest.raises(InvalidArgument, match="no prompt 'other'; available: none, query"):
        await prepared(reading, request(TextPrompt("A"), pooling=Pooling(prompt_name="other")))


@pytest.mark.parametrize(("pooler", "skips"), [("", True), ("last", False), ("mean", True)])
async def test_the_prefix_cache_is_read_where_only_the_last_token_counts(
    tokenizer: OurTokenizer, pooler: str, skips: bool
) -> None:
    """Checks this for a model whose own pooler is a different one."""
    reading = processor(tokenizer, texts=PoolingTextFormat(pools_last_token=False))
    found = await prepared(reading, request(TextPrompt("a"), pooling=Pooling(pooler)))
    assert found.prompt_request.sampling.skip_reading_prefix_cache is skips


def test_generation_with_an_encoder_is_refused(tokenizer: OurTokenizer) -> None:
    with pytest.raises(InvalidArgument, match="The model `some-bert` is an encoder and generates no text"):
        processor(tokenizer).check(Request("r", "", [TextPrompt("a")], Sampling(), 0.0))
