"""Constraints are compiled at the door, against bytes instead of the model's tokens: what no worker could use is
refused before anything is tokenized. Takes well under a millisecond for what people write, and a thread of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from shared import structured_output
from shared.errors import InvalidArgument
from shared.pb.common.v1 import sampling_pb2

REMEMBERED = 1024  # constraints that were found good or bad
NUM_BYTES = 256
SILENT = 0

Verdict = InvalidArgument | None


class Bytes:
    """The smallest vocabulary for any text, as llguidance wants to see a tokenizer."""

    eos_token_id = NUM_BYTES
    bos_token_id = None
    special_token_ids = (NUM_BYTES,)
    tokens = (*(bytes([byte]) for byte in range(NUM_BYTES)), b"<end>")

    def __call__(self, text: str | bytes) -> Sequence[int]:
        return list(text.encode() if isinstance(text, str) else text)


class GrammarDoor:
    """Remembers its verdicts: clients send the same form again and again."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-door")
        self._tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
        self._limits = LLParserLimits(verbose_errors=False)

    async def check(self, constraint: sampling_pb2.StructuredOutput) -> None:
        """Raises InvalidArgument."""
        key = hashlib.sha256(constraint.SerializeToString(deterministic=True)).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        else:
            loop = asyncio.get_running_loop()
            self._verdicts[key] = await loop.run_in_executor(self._thread, self._judge, constraint)
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        verdict = self._verdicts[key]
        if verdict is not None:
            raise InvalidArgument(verdict.message, field=verdict.field)

    def _judge(self, constraint: sampling_pb2.StructuredOutput) -> Verdict:
        try:
            structured_output.check(constraint)
            self._compile(structured_output.lark(constraint))
        except InvalidArgument as error:
            return error
        return None

    def _compile(self, lark: str) -> None:
        grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=SILENT, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise structured_output.unusable(matcher.get_error())
