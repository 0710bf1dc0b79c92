"""Constraints are compiled at the door, against bytes instead of the model's tokens: what no worker could use is
refused before anything is tokenized. Takes well under a millisecond for what people write, and a thread of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from shared import structured_output
from shared.errors import InvalidArgument
from shared.pb.common.v1 import sampling_pb2
from shared.structured_output.literals import Specials

REMEMBERED = 1024  # constraints that were found good or bad
NUM_BYTES = 256
SILENT = 0

Verdict = InvalidArgument | None


class Bytes:
    """The smallest vocabulary for any text, as llguidance wants to see a tokenizer: the model's added tokens with their
    ids, no other of the model's tokens, and behind them all bytes."""

    bos_token_id = None

    def __init__(self, added: Mapping[str, int], vocab_size: int) -> None:
        self.tokens = [b""] * vocab_size + [bytes([byte]) for byte in range(NUM_BYTES)] + [b"<end>"]
        for name, token_id in added.items():
            self.tokens[token_id] = name.encode()
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [*added.values(), self.eos_token_id]
        self._first = vocab_size

    def __call__(self, text: str | bytes) -> Sequence[int]:
        return [self._first + byte for byte in (text.encode() if isinstance(text, str) else text)]


class GrammarDoor:
    """Remembers its verdicts: clients send the same form again and again."""

    def __init__(self, specials: Specials, vocab_size: int) -> None:
        self._specials = specials
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-door")
        self._tokenizer = LLTokenizer(TokenizerWrapper(Bytes(specials.ids, vocab_size)))
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
            self._compile(structured_output.lark(constraint, self._specials))
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
