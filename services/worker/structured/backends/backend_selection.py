"""`--structured-output-backend`: a library by name, or each constraint's own: the first of those installed that can do
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from quire.services.worker.structured.backends import libraries
from quire.services.worker.structured.port import Grammar, GrammarBackend, MaskFiller, Matcher
from quire.shared import structured_output
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output import backends
from quire.shared.structured_output.backends import LLGUIDANCE, OUTLINES_CORE, XGRAMMAR

log = logger("worker.grammars")

FIELD = "structured_output_backend"
AUTO = "auto"
ALIASES = {"guidance": LLGUIDANCE, "outlines": OUTLINES_CORE}  # by vLLM
FORCE_TOKENS = frozenset((LLGUIDANCE, XGRAMMAR))


def library_names(setting: str) -> tuple[str, ...]:
    """Libraries that constraints are offered to, in order. Raises InvalidArgument for one that is not installed."""
    if setting == AUTO:
        return (LLGUIDANCE, *filter(libraries.is_installed, libraries.MODULES))
    name = ALIASES.get(setting, setting)
    if name != LLGUIDANCE and not libraries.is_installed(name):
        text = f"{FIELD}: {name} is not installed here; pip install 'quire[grammars]' brings it"
        raise InvalidArgument(text, field=FIELD)
    return (name,)


def open_backend(setting: str, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarBackend:
    """Raises QuireError."""

    def opened(name: str) -> GrammarBackend:  # only then is anything of a library imported
        from quire.services.worker.structured.backends.llguidance_backend import LLGuidanceBackend
        from quire.services.worker.structured.backends.subprocess_backend import SubprocessBackend

        if name == LLGUIDANCE:
            return LLGuidanceBackend(folder, vocab_size, eos_token_ids)
        return SubprocessBackend(name, folder, vocab_size, eos_token_ids)

    first, *others = library_names(setting)
    if setting == AUTO:
        reason = "it takes the most forms and compiles them in a millisecond"
        log.info("grammars", structured_output_backend=first, reason=reason, otherwise=others or "none is installed")
    return BackendSelector(opened, (first, *others))


class BackendSelector:
    """Opens a library when a constraint is for it."""

    def __init__(self, opened: Callable[[str], GrammarBackend], names: Sequence[str]) -> None:
        """The first of `names` is opened at once."""
        self._open = opened
        self._names = names
        self._opened = {names[0]: opened(names[0])}

    def compile(self, constraint: pb.StructuredOutput) -> Grammar:
        structured_output.check(constraint)
        name, grammar, reason = backends.choose(
            constraint, self._names, lambda name: self.backend(name).compile(constraint)
        )
        if reason:
            log.info("a grammar for another library", structured_output_backend=name, reason=reason)
        return grammar

    def filler(self) -> MaskFiller:
        return self.backend(self._names[0]).filler() if len(self._names) == 1 else MixedFiller(self.backend)

    def backend(self, name: str) -> GrammarBackend:
        if name not in self._opened:
            self._opened[name] = self._open(name)  # by two threads at a time: one of them is dropped
        return self._opened[name]


class MixedFiller:
    """For matchers of several libraries, mostly of one."""

    def __init__(self, backend: Callable[[str], GrammarBackend]) -> None:
        self._backend = backend
        self._fillers: dict[str, MaskFiller] = {}

    def accept(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[bool]:
        accepted = [False] * len(matchers)
        for library, rows in _by_library(matchers).items():
            taken = self._filler(library).accept([matchers[row] for row in rows], [token_ids[row] for row in rows])
            for row, is_right in zip(rows, taken, strict=True):
                accepted[row] = is_right
        return accepted

    def fill(self, matchers: Sequence[Matcher], places: Sequence[int], masks: I32) -> None:
        for library, rows in _by_library(matchers).items():
            self._filler(library).fill([matchers[row] for row in rows], [places[row] for row in rows], masks)

    def _filler(self, library: str) -> MaskFiller:
        if library not in self._fillers:
            self._fillers[library] = self._backend(library).filler()
        return self._fillers[library]


def _by_library(matchers: Sequence[Matcher]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row, matcher in enumerate(matchers):
        found.setdefault(matcher.library, []).append(row)
    return found
