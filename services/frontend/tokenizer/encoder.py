"""Encoding of texts to ids: short ones inline, longer ones in threads without the GIL, long ones in pieces.

Between two pieces, shorter waiting texts come first, so that they do not wait for a long one, and the thread waits for
the event loop, which then has the processor; pieces are smaller while other texts wait. There the work also stops,
when the client has disconnected or the text has more tokens than can be used.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenizers import Encoding
from tokenizers import Tokenizer as HfTokenizer

from quire.services.frontend.bounds.bodies.heavy_work import leave_turns
from quire.services.frontend.bounds.smallest_first import SmallestFirstLimiter
from quire.services.frontend.tokenizer.control_tokens import TextSection
from quire.services.frontend.tokenizer.plain_tokenizer import plain_tokenizer
from quire.services.frontend.tokenizer.text_splitter import TextSplitter
from quire.shared.errors import InvalidArgument
from quire.shared.process.priority import lower_priority

# Up to this size, tokenizing takes less time than handing it to a thread costs other streams
# (tests/services/frontend/load/throughput.py prints it).
INLINE_CHARACTERS = 1024
PER_SECTION_COST_CHARACTERS = 64  # cost of each section besides its text
PIECE_CHARACTERS = 32 * 1024  # 5 ms, and 3 MB meanwhile: a tokenizer takes about 100 bytes per character
SHARED_PIECE_CHARACTERS = (
    4 * 1024
)  # while texts wait: each piece may delay the loop once on a processor that they share
USUAL_CHARACTERS_PER_TOKEN = 4  # of ordinary text; only for the size of a piece after which reading may stop
LONGEST_WORD = 128 * 1024  # characters without a split point, which only the whole vocabulary could split: 20 ms, 13 MB
PANIC = "PanicException"  # of pyo3, which does not export the class


@dataclass(frozen=True, slots=True)
class TextSizes:
    """Maximum numbers of characters of a text that is tokenized inline, as one piece, and as one while others wait."""

    inline: int = INLINE_CHARACTERS
    piece: int = PIECE_CHARACTERS
    shared_piece: int = SHARED_PIECE_CHARACTERS


SIZES = TextSizes()


Argument = TypeVar("Argument")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Prompt as tokens."""

    token_ids: Sequence[int]
    # index of the second text's first token; 0: there is one text, or the tokenizer does not distinguish two
    second_text_from: int = 0
    num_seen: int = 0  # number of leading tokens that other tokens attend to; 0: all
    media: Sequence[int] = ()  # indexes of the prompt's pictures, in the order of their placeholders
    pooled_tokens: tuple[int, ...] = ()  # tokens with a vector each; empty: all that the pooler names


def _encoded(tokenizer: HfTokenizer, texts: list[Any], *, add_special_tokens: bool) -> list[Encoding]:
    """Encodes texts; raises InvalidArgument where the library panics.

    A model's regular expression that backtracks too often on a text panics, and a panic is not an Exception.
    """
    try:
        encodings: list[Encoding] = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        text = f"prompt: the model's tokenizer fails on this text: {str(error)[:200]}"
        raise InvalidArgument(text, field="prompt") from None
    return encodings


class SectionEncoder:
    """Encoder of sections with one tokenizer."""

    def __init__(self, tokenizer: HfTokenizer, opener: str = "") -> None:
        """Wraps a tokenizer and its splitter.

        `opener`: one token to put before a text that is not the first.
        """
        self.tokenizer = tokenizer
        self.opener = opener
        self.splitter = TextSplitter(tokenizer)

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encodes one text to ids in the calling thread and releases the GIL meanwhile."""
        # A batch, because the GIL is released for it, and the fast variant, because the characters' positions are not
        # needed.
        ids: list[int] = _encoded(self.tokenizer, [text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def pair(self, texts: tuple[str, str]) -> Tokenized:
        """Encodes a pair with special tokens; the result records where the second text begins (0 if the tokenizer
        does not mark it)."""
        encoding = _encoded(self.tokenizer, [texts], add_special_tokens=True)[0]
        return Tokenized(encoding.ids, encoding.type_ids.index(1) if 1 in encoding.type_ids else 0)


class Encoder:
    """Encoder of a model's texts. Owns the threads; belongs to one event loop."""

    def __init__(
        self, tokenizer: HfTokenizer, threads: int, control_tokens: Sequence[str] = (), sizes: TextSizes = SIZES
    ) -> None:
        """Creates the thread pools and measures the tokenizer's frame.

        `threads`: 0 for a number that depends on the processors; `control_tokens`: tokens that plain sections may
        spell.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a batch of one, on the calling thread
        self._tokenizer, self.sizes = tokenizer, sizes
        self.text_encoder = SectionEncoder(tokenizer)
        self._plain = (
            SectionEncoder(*plain_tokenizer(tokenizer, control_tokens)) if control_tokens else self.text_encoder
        )
        threads = threads or min(2, max(1, len(os.sched_getaffinity(0)) // 2))  # streams need the others
        self._pool = ThreadPoolExecutor(threads, "tokenize", lower_priority)
        self._whole = ThreadPoolExecutor(1, "tokenize-whole", lower_priority)  # texts that cannot be split
        self._turns, self._turns_of_whole = SmallestFirstLimiter(threads), SmallestFirstLimiter(1)
        self._before, self._after = self._frame()
        self._pair_frame = self._find_pair_frame()

    def _frame(self) -> tuple[list[int], list[int]]:
        """Returns the special tokens that the tokenizer puts before and after any text."""
        inner, framed = (
            self.encode_inline("a", add_special_tokens=False),
            self.encode_inline("a", add_special_tokens=True),
        )
        at = next((i for i in range(len(framed)) if framed[i : i + len(inner)] == inner), 0)
        return framed[:at], framed[at + len(inner) :]

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """Tokens before and after any text to which special tokens are added."""
        return self._before, self._after

    @property
    def _piece_size(self) -> int:
        """Maximum number of characters that are encoded without a pause: fewer while other texts wait."""
        return min(self.sizes.piece, self.sizes.shared_piece) if self._turns.has_waiting else self.sizes.piece

    def encode_inline(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes a short text on the calling thread."""
        return self.text_encoder.ids(text, add_special_tokens)

    async def encode(self, text: str, *, add_special_tokens: bool, stop_after: int | None = None) -> list[int]:
        """Encodes a text, in pieces if it is long.

        `stop_after`: the ids of a long text may be cut off once there are more than this.
        """
        if len(text) <= self._piece_size or not self.text_encoder.splitter.is_supported:
            return await self._whole_text(self.text_encoder, text, add_special_tokens=add_special_tokens)
        ids = await self._in_pieces(self.text_encoder, text, stop_after)
        return self._framed(ids) if add_special_tokens else ids

    async def encode_pair(self, first: str, second: str, *, plain: bool, stop_after: int | None = None) -> Tokenized:
        """Encodes two texts as the tokenizer joins them.

        `plain`: control tokens that they spell are text. `stop_after`: the ids of a long text may be cut off once there
        are more than this.
        """
        length, frame = len(first) + len(second), self._pair_frame
        if not plain and length <= self.sizes.inline:
            return self.text_encoder.pair((first, second))
        if not plain and (length <= self.sizes.piece or not self.text_encoder.splitter.is_supported or frame is None):
            return await self.in_thread(self.text_encoder.pair, (first, second), length)
        if frame is None:
            text = "control_tokens: none: the tokens that this tokenizer puts between two texts cannot be determined"
            raise InvalidArgument(text, field="control_tokens")
        before, between, after, second_size = frame
        ids = await self._section(TextSection(first, plain), False, stop_after)
        others = await self._section(
            TextSection(second, plain), False, None if stop_after is None else max(0, stop_after - len(ids))
        )
        begin = len(before) + len(ids) + len(between)
        return Tokenized([*before, *ids, *between, *others, *after], 0 if second_size is None else begin - second_size)

    def _find_pair_frame(self) -> tuple[list[int], list[int], list[int], int | None] | None:
        """Returns the tokens before, between and after two texts, and how many of those between belong to the second.

        The number is None where the tokenizer does not distinguish the texts; the result is None where the frame cannot
        be determined.
        """
        inner, pair = self.encode_inline("a", add_special_tokens=False), self.text_encoder.pair(("a", "a"))
        framed = list(pair.token_ids)
        size = len(inner)
        starts = [i for i in range(len(framed) - size + 1) if framed[i : i + size] == inner]
        if size == 0 or len(starts) != 2:
            return None
        first, second = starts
        second_size = second - pair.second_text_from if pair.second_text_from else None
        return framed[:first], framed[first + size : second], framed[second + size :], second_size

    async def encode_sections(
        self, sections: Sequence[TextSection], *, add_special_tokens: bool, stop_after: int | None = None
    ) -> list[int]:
        """Encodes the sections of one text, each with the tokenizer that it needs."""
        ids: list[int] = []
        at_once = 0
        for number, section in enumerate(sections):
            at_once += len(section.text) + PER_SECTION_COST_CHARACTERS
            if at_once > self.sizes.inline:  # a conversation may have thousands of short sections
                await leave_turns()
                at_once = 0
            ids += await self._section(section, number > 0, None if stop_after is None else stop_after - len(ids))
            if stop_after is not None and len(ids) > stop_after:
                break
        return self._framed(ids) if add_special_tokens else ids

    async def _section(self, section: TextSection, follows: bool, stop_after: int | None) -> list[int]:
        """Encodes one section: whole if it is short or cannot be split, otherwise in pieces, at least until
        `stop_after` ids. If it `follows` another section, an opener keeps the tokenizer from treating it as a
        beginning, and its id is dropped."""
        reader = self._plain if section.plain else self.text_encoder
        has_opener = bool(reader.opener) and follows
        text = reader.opener + section.text if has_opener else section.text
        if len(text) <= self._piece_size or not reader.splitter.is_supported:
            ids = await self._whole_text(reader, text, add_special_tokens=False)
        else:
            ids = await self._in_pieces(reader, text, stop_after)
        return ids[1:] if has_opener else ids

    def _framed(self, ids: list[int]) -> list[int]:
        return [*self._before, *ids, *self._after]

    async def _whole_text(self, reader: SectionEncoder, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes a text at once: inline if it is short, in its turn in a thread if it is longer, and in a slot for
        unsplittable long texts."""
        if len(text) <= self.sizes.inline:
            return reader.ids(text, add_special_tokens)
        if len(text) <= self.sizes.piece:
            return await self._in_turn(reader, text, len(text), add_special_tokens=add_special_tokens)
        async with self._turns_of_whole.slot(len(text)):
            return await self._run(self._whole, reader, text, add_special_tokens)

    async def _in_pieces(self, reader: SectionEncoder, text: str, stop_after: int | None) -> list[int]:
        """Encodes a long text piece by piece, in turns with other texts, and stops after more than `stop_after` ids.
        Raises InvalidArgument if it cannot be split within LONGEST_WORD characters."""
        ids = array("i")  # Python's int objects take nine times the memory

        def size() -> int:
            """Returns the size of the next piece, smaller if the ids that can be used will probably end within it."""
            if stop_after is None:
                return self._piece_size
            usable = (stop_after + 1 - len(ids)) * USUAL_CHARACTERS_PER_TOKEN
            return min(self._piece_size, max(usable, self.sizes.inline))

        try:
            for piece in reader.splitter.pieces(text, size, LONGEST_WORD):
                ids.extend(await self._in_turn(reader, piece, len(text), add_special_tokens=False))
                if stop_after is not None and len(ids) > stop_after:
                    break
        except ValueError:
            message = (
                f"prompt: more than {LONGEST_WORD} characters in a row without a blank, a digit or a punctuation mark."
            )
            raise InvalidArgument(message, field="prompt") from None
        return ids.tolist()

    async def _in_turn(self, reader: SectionEncoder, piece: str, length: int, *, add_special_tokens: bool) -> list[int]:
        """Encodes a piece in a thread once its turn comes; pieces of shorter texts (`length` in characters) come
        first."""
        async with self._turns.slot(length):
            return await self._run(self._pool, reader, piece, add_special_tokens)

    async def _run(
        self, pool: ThreadPoolExecutor, reader: SectionEncoder, text: str, add_special_tokens: bool
    ) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(pool, reader.ids, text, add_special_tokens)

    async def encode_all(self, texts: Sequence[str]) -> list[array[int]]:
        """Encodes texts separately, without the tokens that the tokenizer puts around a text."""
        characters = sum(map(len, texts))
        if characters <= self.sizes.inline:
            return self._encode_all(texts)
        loop = asyncio.get_running_loop()
        encoded: list[array[int]] = []
        for portion in _portions(texts, self.sizes.piece):
            async with self._turns.slot(characters):
                encoded += await loop.run_in_executor(self._pool, self._encode_all, portion)
        return encoded

    def _encode_all(self, texts: Sequence[str]) -> list[array[int]]:
        """Encodes the texts as one batch, without special tokens, to compact arrays."""
        # Python's int objects take nine times the memory, and all results are kept until the last one.
        return [
            array("i", encoding.ids) for encoding in _encoded(self._tokenizer, list(texts), add_special_tokens=False)
        ]

    async def in_thread(self, work: Callable[[Argument], Result], argument: Argument, amount: int) -> Result:
        """Runs other work on long texts in the thread for whole texts; the smallest `amount` goes first."""
        async with self._turns_of_whole.slot(amount):
            return await asyncio.get_running_loop().run_in_executor(self._whole, work, argument)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._whole.shutdown(wait=False, cancel_futures=True)


def _portions(texts: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    """Yields runs of texts with at most `most` characters together; a longer text is a portion of its own."""
    start = characters = 0
    for end, text in enumerate(texts):
        if characters + len(text) > most and end > start:
            yield texts[start:end]
            start, characters = end, 0
        characters += len(text)
    yield texts[start:]
