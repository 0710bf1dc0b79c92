"""Child process of grammar_validator.py: compiles constraints one by one and reports their errors.

It compiles against bytes instead of the model's tokens, which takes under a millisecond for constraints that people
write. It is a process because a grammar can be made to take any time and memory inside a library that cannot be
interrupted.

The first message is the vocabulary's special tokens. Questions are constraints, each after its limit of processor time;
answers are errors, empty for a valid constraint (child.py).
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from quire.services.frontend.input_processor.grammars import grammar_walk
from quire.shared import structured_output
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.process.child import LENGTH_BYTES, serve_requests
from quire.shared.structured_output import backends
from quire.shared.structured_output.backends import LLGUIDANCE
from quire.shared.structured_output.checks import is_unsupported_feature
from quire.shared.structured_output.literals import SpecialTokens

MEMORY_BYTES = 1 << 30
TIMEOUT_SIGNAL = signal.SIGPROF  # ends the process, since nothing else can interrupt the library
NUM_BYTES = 256
SILENT = 0


class ByteTokenizer:
    """Smallest vocabulary for any text, in the form that llguidance expects of a tokenizer.

    It has the model's added tokens with their ids, none of the model's other tokens, and all bytes after them.
    """

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


class GrammarChecker:
    """Compiler of constraints against the vocabulary's special tokens."""

    def __init__(self, specials: SpecialTokens, vocab_size: int) -> None:
        self._specials = specials
        self._first_byte = vocab_size
        self._tokenizer = LLTokenizer(TokenizerWrapper(ByteTokenizer(specials.ids, vocab_size)))
        self._limits = LLParserLimits(verbose_errors=False)
        self._walked = LLParserLimits(verbose_errors=False, step_max_items=grammar_walk.STEP_ITEMS)

    def verdict(self, constraint: sampling_pb2.StructuredOutput, libraries: Sequence[str]) -> str:
        """Returns the constraint's error; empty if it is valid.

        Features that only other libraries support are compiled by workers alone.
        """
        try:
            structured_output.check(constraint)
            backends.choose(constraint, libraries, lambda name: self._check_library(name, constraint))
        except InvalidArgument as error:
            return error.message
        return ""

    def _check_library(self, name: str, constraint: sampling_pb2.StructuredOutput) -> None:
        """Compiles with llguidance in place of every library; ignores features that only llguidance lacks."""
        try:
            self._compile(structured_output.lark(constraint, self._specials))
        except InvalidArgument as error:
            if name == LLGUIDANCE or not is_unsupported_feature(error.message):
                raise

    def _compile(self, lark: str) -> None:
        """Compiles a Lark grammar, accepts one token with it and walks it for dead ends. Raises InvalidArgument if
        it does not compile, exceeds the limits, or reaches a state in which nothing may follow an incomplete text."""
        grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=SILENT, limits=self._limits)
        if not matcher.is_error():
            _take_one(matcher, matcher.compute_bitmask())
        if matcher.is_error():
            raise structured_output.compile_refusal(matcher.get_error())
        start = LLMatcher(self._tokenizer, grammar, log_level=SILENT, limits=self._walked)
        dead_end = grammar_walk.find_dead_end(start, self._first_byte)
        if dead_end:
            raise structured_output.refuse(
                f"after {dead_end} no continuation is allowed, although the text is incomplete"
            )


def _take_one(matcher: LLMatcher, mask: bytes) -> None:
    """Consumes the first allowed token, since a grammar's initial part is checked only then."""
    words = np.frombuffer(mask, np.uint8)
    allowed = np.flatnonzero(words)[:1]
    if allowed.size:
        bits = int(words[allowed[0]])
        matcher.try_consume_tokens([int(allowed[0]) * 8 + (bits & -bits).bit_length() - 1])


def encode_constraint(constraint: sampling_pb2.StructuredOutput, libraries: Sequence[str]) -> bytes:
    """Encodes the names of libraries and the constraint."""
    return ",".join(libraries or [LLGUIDANCE]).encode() + b"\0" + constraint.SerializeToString(deterministic=True)


def with_cpu_limit(question: bytes, cpu_limit_s: float) -> bytes:
    """Puts the time limit in milliseconds, 4 bytes, little-endian, before a question."""
    return round(1000 * cpu_limit_s).to_bytes(LENGTH_BYTES, "little") + question


def encode_vocabulary(specials: SpecialTokens, vocab_size: int) -> bytes:
    values = {"ids": dict(specials.ids), "in_text": sorted(specials.in_text), "vocab_size": vocab_size}
    return json.dumps(values).encode()


def make_handler(init_message: bytes) -> Callable[[bytes], bytes]:
    """Builds the checker from the JSON vocabulary in `init_message` and returns the function that answers requests."""
    vocabulary = json.loads(init_message)
    checker = GrammarChecker(
        SpecialTokens(vocabulary["ids"], frozenset(vocabulary["in_text"])), vocabulary["vocab_size"]
    )

    def answer(message: bytes) -> bytes:
        """Answers one request (CPU limit in ms, libraries, NUL, serialized constraint) with its error, or empty
        bytes if it is valid. The profiling timer ends the process if the CPU limit is exceeded."""
        signal.setitimer(signal.ITIMER_PROF, int.from_bytes(message[:LENGTH_BYTES], "little") / 1000)
        libraries, _, constraint = message[LENGTH_BYTES:].partition(b"\0")
        verdict = checker.verdict(sampling_pb2.StructuredOutput.FromString(constraint), libraries.decode().split(","))
        signal.setitimer(signal.ITIMER_PROF, 0)
        return verdict.encode()

    return answer


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve_requests(make_handler)
