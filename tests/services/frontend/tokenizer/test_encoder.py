"""Tests of long texts: pieces give the ids of the whole, shorter texts come first, and abandoned work ends."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from quire import bundled
from quire.services.frontend.bounds.smallest_first import SmallestFirstLimiter
from quire.services.frontend.tokenizer import encoder
from quire.services.frontend.tokenizer.encoder import Encoder, TextSizes, Tokenized
from quire.services.frontend.tokenizer.text_splitter import TextSplitter
from quire.services.frontend.tokenizer.tokenizer import Tokenizer as Tokenizers
from quire.shared.errors import InvalidArgument
from tests.priorities import behind, thread_priorities
from tests.services.frontend.tiny_folder import CORPUS, SPECIALS, byte_level_tokenizer, metaspace_tokenizer
from tests.waiting import loop_turns

CL100K = "|".join([
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
TINY = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SCRAPS = (
    *" \n\t\r'’.,!?()[]<>/-_\"\\", "  ", "\r\n", "\n\n ", "don't", "DON'T", "'s", "I'LL", "word", "Word", "WORD",
    "über", "e\u0301", "a\u0338", "\u0338", "<", "12", "3456",
    "你好", "世界，", "。", "привет", "ёж", "שלום", "مرحبا", "हिन्दी",
    "한국어", "カタカナ", "ǅ", "ª", "½", "Ⅷ", "🙂", "👨‍👩‍👧", "\u00a0", "\u3000", "\u200b",
    "<|im_end|>", "<tool call>", "<tool", "call>",
)  # fmt: skip


def split_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def tokenizer(split: pre_tokenizers.PreTokenizer, *, nfc: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = split
    if nfc:
        made.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([*CORPUS, "".join(SCRAPS)], trainer)
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    made.add_tokens([AddedToken("<tool call>", special=False)])
    start = ("<|im_start|>", made.token_to_id("<|im_start|>"))
    made.post_processor = processors.TemplateProcessing(single="<|im_start|> $A <|im_start|>", special_tokens=[start])
    return made


KINDS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "cl100k": split_by(CL100K),
    "qwen": split_by(CL100K.replace(r"\p{N}{1,3}", r"\p{N}")),
    "o200k": split_by(O200K),
    "deepseek": split_by(*DEEPSEEK),
    "tiny": split_by(TINY),
}


SMALL = TextSizes(inline=8, piece=20)


@pytest.mark.parametrize("nfc", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_ids_of_pieces_equal_those_of_the_full_text(kind: str, nfc: bool) -> None:
    whole = tokenizer(KINDS[kind], nfc=nfc)
    chance = random.Random(kind)
    pieces = Encoder(whole, 2, sizes=SMALL)
    num_pieces = 0
    for _ in range(150):
        text = "".join(chance.choices(SCRAPS, k=chance.randrange(1, 120)))
        num_pieces += len([*TextSplitter(whole).pieces(text, 20, sys.maxsize)])
        for framed in (True, False):
            want = whole.encode(text, add_special_tokens=framed).ids
            assert await pieces.encode(text, add_special_tokens=framed) == want, repr(text)
            assert pieces.encode_inline(text, add_special_tokens=framed) == want
    pieces.close()
    assert num_pieces > 700, "the texts were hardly cut"


def test_texts_are_cut_only_between_words() -> None:
    """Checks all splits, not only those that pieces of some size happen to use."""
    chance = random.Random(1)
    for kind, split in KINDS.items():
        whole = tokenizer(split, nfc=True)
        for _ in range(100):
            text = "".join(chance.choices(SCRAPS, k=30))
            pieces = [*TextSplitter(whole).pieces(text, 1, sys.maxsize)]
            assert "".join(pieces) == text
            ids = [i for piece in pieces for i in whole.encode(piece, add_special_tokens=False).ids]
            assert ids == whole.encode(text, add_special_tokens=False).ids, (kind, text)


@pytest.mark.parametrize(
    "split",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        split_by(r"\p{L}+ \p{L}+|" + TINY),
        split_by(r"[a-z ]+"),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Whitespace(),
    ],
)
def test_texts_are_not_split_for_unknown_pre_tokenizers(split: pre_tokenizers.PreTokenizer) -> None:
    assert not TextSplitter(tokenizer(split, nfc=False)).is_supported


async def test_unsplit_texts_are_tokenized() -> None:
    whole = metaspace_tokenizer()
    text = "hello world and all the others " * 9
    assert await Encoder(whole, 1, sizes=SMALL).encode(text, add_special_tokens=True) == whole.encode(text).ids


class NotedTokenizer:
    """Byte-level tokenizer that notes the texts it encodes."""

    def __init__(self) -> None:
        self._tokenizer, self.read, self.begun = byte_level_tokenizer(), list[str](), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
        self.begun.set()
        self.read.extend(texts)
        return self._tokenizer.encode_batch_fast(texts, **options)


async def test_a_text_is_read_only_as_far_as_it_can_be_used() -> None:
    noted = NotedTokenizer()
    pieces = Encoder(noted, 1)
    noted.read.clear()
    ids = await pieces.encode("hello world " * 100_000, add_special_tokens=False, stop_after=500)
    assert len(ids) > 500
    assert len(noted.read) == 1


@pytest.mark.parametrize("stop_after", [500, 4096])
@pytest.mark.parametrize("text", ["hello world " * 5_000, "x1 " * 20_000, "word, 5! " * 100_000])
async def test_little_more_is_encoded_than_fits_in_the_context(text: str, stop_after: int) -> None:
    noted = NotedTokenizer()
    pieces = Encoder(noted, 1)
    noted.read.clear()
    ids = await pieces.encode(text, add_special_tokens=False, stop_after=stop_after)
    assert ids == noted.encode(text).ids[: len(ids)], "pieces of any size give the ids of the whole"
    num_needed = len(noted.decode(ids[: stop_after + 1])) if len(ids) > stop_after else len(text)
    assert sum(map(len, noted.read)) <= 2 * max(num_needed, encoder.USUAL_CHARACTERS_PER_TOKEN * stop_after)


async def test_pieces_are_smaller_while_other_texts_wait() -> None:
    noted = NotedTokenizer()
    shared = Encoder(noted, 1)
    texts = [f"hello {number} world " * 2_000 for number in range(6)]
    noted.read.clear()
    together = await asyncio.gather(*(shared.encode(text, add_special_tokens=False) for text in texts))
    lengths = [*map(len, noted.read)]  # only the first text, and what remains of the last one, may be read alone
    assert together == [noted.encode(text).ids for text in texts]
    assert sum(length > encoder.SHARED_PIECE_CHARACTERS + 20 for length in lengths) <= 2
    noted.read.clear()
    assert await shared.encode(texts[0], add_special_tokens=False) == together[0]
    assert len(noted.read) == 1, "a text alone is not cut"


async def test_too_long_words_are_refused_by_length() -> None:
    with pytest.raises(InvalidArgument, match=f"more than {encoder.LONGEST_WORD} characters in a row") as refused:
        await Encoder(byte_level_tokenizer(), 1).encode("a" * 300_000, add_special_tokens=False)
    assert refused.value.field == "prompt"


async def test_work_ends_when_its_call_is_cancelled() -> None:
    noted = NotedTokenizer()
    pieces = Encoder(noted, 1)
    noted.begun.clear()
    task = asyncio.create_task(pieces.encode("hello world " * 1_000_000, add_special_tokens=False))
    await asyncio.to_thread(noted.begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    num_read = len(noted.read)
    assert await pieces.encode("x" * 2000, add_special_tokens=False), "the next one has the thread"
    assert len(noted.read) <= num_read + 2


async def test_the_shortest_text_is_encoded_first() -> None:
    turns, order = SmallestFirstLimiter(1), []

    async def work(amount: int) -> None:
        async with turns.slot(amount):
            order.append(amount)
            await loop_turns()

    async with asyncio.TaskGroup() as tasks:
        for amount in (50, 40, 30, 10, 20):
            tasks.create_task(work(amount))
    assert order == [50, 10, 20, 30, 40]


async def test_turns_survive_cancelled_tasks() -> None:
    turns = SmallestFirstLimiter(1)

    async def hold() -> None:
        async with turns.slot(1):
            await asyncio.Event().wait()

    chance = random.Random(2)
    tasks = [asyncio.create_task(hold()) for _ in range(50)]
    chance.shuffle(tasks)
    for task in tasks:
        await loop_turns()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(60), turns.slot(1):
        assert turns.places == 0
    assert turns.places == 1


async def test_tokenizing_a_long_text_does_not_block_the_event_loop() -> None:
    """Counts turns of the event loop, of which there are none while another thread holds the GIL."""
    whole = Encoder(metaspace_tokenizer(), 1)
    task = asyncio.create_task(whole.encode("hello world, " * 80_000, add_special_tokens=False))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await task) > 240_000
    assert turns > 15


async def test_threads_that_tokenize_leave_the_processors_to_streams() -> None:
    encoder = Encoder(byte_level_tokenizer(), threads=0)
    try:
        await encoder.encode("word " * 20_000, add_special_tokens=False)
        await encoder.in_thread(len, "text", 4)
        priorities = thread_priorities("tokenize")
        own = priorities.pop("MainThread")
        assert len(priorities) >= 2
        assert set(priorities.values()) == {behind(own)}
        assert len(thread_priorities("tokenize_")) - 1 <= max(1, len(os.sched_getaffinity(0)) // 2)
    finally:
        encoder.close()


async def test_a_shorter_text_precedes_many_texts() -> None:
    encoder = Encoder(byte_level_tokenizer(), threads=1)
    texts = [f"word {number} " * 100 for number in range(400)]
    try:
        alone = [encoder.encode_inline(text, add_special_tokens=False) for text in texts]
        many = asyncio.ensure_future(encoder.encode_all(texts))
        await loop_turns()
        await encoder.encode("some words " * 200, add_special_tokens=False)
        assert not many.done()
        assert [ids.tolist() for ids in await many] == alone
        assert await encoder.encode_all([]) == []
    finally:
        encoder.close()


async def test_short_conversations_do_not_wait_for_long_ones() -> None:
    encoder, order = Encoder(byte_level_tokenizer(), threads=1), list[int]()
    try:
        amounts = (9, 5, 7, 1)
        await asyncio.gather(*(encoder.in_thread(order.append, amount, amount) for amount in amounts))
        assert order == [9, 1, 5, 7]
    finally:
        encoder.close()


async def test_many_ids_are_decoded_to_the_same_text_without_blocking_the_loop() -> None:
    decoding = Tokenizers(bundled.FOLDER, 0)
    try:
        ids = [number % 2000 for number in range(30_000)]
        for skips in (False, True):
            waiting = asyncio.ensure_future(decoding.decode_long(ids, skip_special_tokens=skips))
            await loop_turns()
            assert not waiting.done()
            assert await waiting == decoding.decode(ids, skip_special_tokens=skips)
            few = ids[:50]
            one = await decoding.decode_long(few, skip_special_tokens=skips)
            assert one == decoding.decode(few, skip_special_tokens=skips)
    finally:
        decoding.close()


def pairing_tokenizer() -> Tokenizer:
    made = byte_level_tokenizer()
    start, end = (made.token_to_id(text) for text in SPECIALS[1:])
    made.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[1]} $A {SPECIALS[2]}",
        pair=f"{SPECIALS[1]} $A {SPECIALS[2]} $B:1 {SPECIALS[2]}:1",
        special_tokens=[(SPECIALS[1], start), (SPECIALS[2], end)],
    )
    return made


@pytest.mark.parametrize("make", [byte_level_tokenizer, pairing_tokenizer])
@pytest.mark.parametrize("lengths", [(3, 5), (900, 900), (40_000, 5), (5, 70_000), (50_000, 50_000)])
async def test_two_long_texts_are_joined_as_the_tokenizer_joins_them(
    make: Callable[[], Tokenizer], lengths: tuple[int, int]
) -> None:
    """Checks that long pairs are encoded in pieces: whole they would take a hundred times their size."""
    tokenizer = make()
    joined = Encoder(tokenizer, 1, SPECIALS)
    first, second = ((" ".join(CORPUS) * (length // 100 + 1))[:length] for length in lengths)
    encoding = tokenizer.encode_batch_fast([(first, second)])[0]
    whole = Tokenized(encoding.ids, encoding.type_ids.index(1) if 1 in encoding.type_ids else 0)
    assert await joined.encode_pair(first, second, plain=False) == whole
    assert await joined.encode_pair(first, second, plain=True) == whole
    cut = await joined.encode_pair(first, second, plain=False, stop_after=10)
    assert len(cut.token_ids) <= len(whole.token_ids)
    assert len(cut.token_ids) > min(10, len(whole.token_ids) - 1)
    joined.close()


async def test_control_tokens_in_a_pair_stay_text_if_requested() -> None:
    tokenizer = pairing_tokenizer()
    joined, end = Encoder(tokenizer, 1, SPECIALS), tokenizer.token_to_id(SPECIALS[2])
    spelled = await joined.encode_pair("a", f"b {SPECIALS[2]} c", plain=False)
    plain = await joined.encode_pair("a", f"b {SPECIALS[2]} c", plain=True)
    assert (spelled.token_ids.count(end), plain.token_ids.count(end)) == (3, 2)
    joined.close()
