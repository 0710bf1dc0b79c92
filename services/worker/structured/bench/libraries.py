"""The libraries, as the measurements want them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from services.worker.structured.llguidance_backend import LLGuidanceBackend
from shared.columns import I32
from shared.errors import InvalidArgument
from shared.pb.common.v1 import sampling_pb2

Schema = dict[str, Any]


class Refused(Exception):
    """The library does not take the schema."""


class Library(Protocol):
    """Bound to a vocabulary."""

    name: str

    def compile(self, schema: Schema) -> Any:
        """Raises Refused."""

    def start(self, grammar: Any) -> Any:
        """A matcher."""

    def fill(self, matcher: Any, mask: I32) -> None:
        """`mask` int32 [1, num_words]."""

    def accept(self, matcher: Any, token_id: int) -> bool: ...

    def ends(self, matcher: Any) -> bool:
        """What was accepted is whole."""


class LLGuidance:
    """As the worker uses it."""

    name = "llguidance"

    def __init__(self, tokenizer: Path, vocab_size: int, eos_id: int) -> None:
        self._backend = LLGuidanceBackend(tokenizer.parent, vocab_size, [eos_id])
        self._filler = self._backend.filler()

    def compile(self, schema: Schema) -> Any:
        try:
            return self._backend.compile(sampling_pb2.StructuredOutput(json_schema=json.dumps(schema)))
        except InvalidArgument as error:
            raise Refused(error.message) from None

    def start(self, grammar: Any) -> Any:
        return grammar.start()

    def fill(self, matcher: Any, mask: I32) -> None:
        self._filler.fill([matcher], [0], mask)

    def accept(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.accept([token_id]))

    def ends(self, matcher: Any) -> bool:
        return bool(matcher.can_end)


class XGrammar:
    """With its defaults, in one thread, without its cache of whole grammars."""

    name = "xgrammar"

    def __init__(self, tokenizer: Path, vocab_size: int, eos_id: int) -> None:
        import transformers
        import xgrammar

        transformers.utils.logging.set_verbosity_error()
        self._module: Any = xgrammar
        fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
        info = xgrammar.TokenizerInfo.from_huggingface(fast, vocab_size=vocab_size, stop_token_ids=[eos_id])
        self._num_words, self._eos_id = -(-vocab_size // 32), eos_id
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Schema) -> Any:
        try:
            return self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        except RuntimeError as error:
            raise Refused(str(error)) from None

    def start(self, grammar: Any) -> Any:
        return self._module.GrammarMatcher(grammar)

    def fill(self, matcher: Any, mask: I32) -> None:
        import torch

        matcher.fill_next_token_bitmask(torch.from_numpy(mask))

    def accept(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.accept_token(token_id))

    def ends(self, matcher: Any) -> bool:
        mask = np.zeros((1, self._num_words), dtype=np.int32)
        self.fill(matcher, mask)
        return bool(int(mask[0, self._eos_id // 32]) >> self._eos_id % 32 & 1)


LIBRARIES: tuple[type[LLGuidance] | type[XGrammar], ...] = (LLGuidance, XGrammar)


def follows(library: Library, matcher: Any, token_ids: Sequence[int]) -> bool:
    """Whether the whole text fulfils the schema."""
    return all(library.accept(matcher, token_id) for token_id in token_ids) and library.ends(matcher)
