"""Grammar libraries as the worker uses them, without the table of supported features."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.services.worker.structured.backends import libraries
from quire.services.worker.structured.backends.llguidance_backend import LLGuidanceBackend
from quire.services.worker.structured.backends.subprocess_backend import SubprocessBackend
from quire.services.worker.structured.port import Grammar, GrammarBackend, Matcher
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.structured_output.backends import LLGUIDANCE

Schema = dict[str, Any]
NAMES = (LLGUIDANCE, *libraries.MODULES)


class SchemaRejected(Exception):
    """Raised for a schema that the library does not support."""


class BenchLibrary:
    """Grammar library bound to a vocabulary, with the calls that the benchmark times."""

    def __init__(self, name: str, tokenizer: Path, vocab_size: int, eos_id: int) -> None:
        """Opens the library. Raises ImportError if it is not installed."""
        self.name = name
        opens = LLGuidanceBackend if name == LLGUIDANCE else lambda *of: SubprocessBackend(name, *of)
        self._backend: GrammarBackend = opens(tokenizer.parent, vocab_size, [eos_id])
        self._filler = self._backend.filler()

    def compile(self, schema: Schema) -> Grammar:
        """Compiles a JSON schema. Raises SchemaRejected if the library does not support it."""
        try:
            return self._backend.compile(sampling_pb2.StructuredOutput(json_schema=json.dumps(schema)))
        except InvalidArgument as error:
            raise SchemaRejected(error.message) from None

    def start(self, grammar: Grammar) -> Matcher:
        return grammar.new_matcher()

    def fill(self, matcher: Matcher, mask: I32) -> None:
        """Fills `mask`, int32 [1, num_words]."""
        self._filler.fill([matcher], [0], mask)

    def accept(self, matcher: Matcher, token_id: int) -> bool:
        return bool(matcher.accept([token_id]))

    def ends(self, matcher: Matcher) -> bool:
        """Tells whether the accepted text is complete."""
        return matcher.can_end


def follows(library: BenchLibrary, matcher: Matcher, token_ids: Sequence[int]) -> bool:
    """Returns whether the matcher accepts all tokens and the text is complete after them; moves the matcher."""
    return all(library.accept(matcher, token_id) for token_id in token_ids) and library.ends(matcher)
