"""`--structured-output-backend`: a library by name, or for each constraint the first installed one that supports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from quire.services.worker.structured.backends import libraries
from quire.services.worker.structured.backends.compile_child import DEFAULT_LIMITS, SubprocessLimits
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
ALIASES = {"guidance": LLGUIDANCE, "outlines": OUTLINES_CORE}  # vLLM's names
FORCE_TOKENS = frozenset((LLGUIDANCE, XGRAMMAR))


def library_names(setting: str) -> tuple[str, ...]:
    """Returns the names of the libraries that constraints are offered to, in order: all installed ones for auto, else
    the named one. Raises InvalidArgument for one that is not installed."""
    if setting == AUTO:
        return (LLGUIDANCE, *filter(libraries.is_installed, libraries.MODULES))
    name = ALIASES.get(setting, setting)
    if name != LLGUIDANCE and not libraries.is_installed(name):
        text = f"{FIELD}: {name} is not installed; install it with pip install 'quire[grammars]'"
        raise InvalidArgument(text, field=FIELD)
    return (name,)


def open_backend(
    setting: str,
    folder: Path,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    limits: SubprocessLimits = DEFAULT_LIMITS,
) -> GrammarBackend:
    """Opens the backend of the setting over the vocabulary in `folder`: imports the first library and reads the
    tokenizer at once, the others when a constraint needs them. Raises QuireError."""

    def open_library(name: str) -> GrammarBackend:  # imports a library on first use only
        """Imports the adapter of the library `name` and opens it; all but llguidance compile in subprocesses."""
        from quire.services.worker.structured.backends.llguidance_backend import LLGuidanceBackend
        from quire.services.worker.structured.backends.subprocess_backend import SubprocessBackend

        if name == LLGUIDANCE:
            return LLGuidanceBackend(folder, vocab_size, eos_token_ids)
        return SubprocessBackend(name, folder, vocab_size, eos_token_ids, limits)

    first, *others = library_names(setting)
    if setting == AUTO:
        reason = "it supports the most constraints and compiles them in a millisecond"
        log.info("grammar backend selected", structured_output_backend=first, reason=reason, fallbacks=others or "none")
    return BackendSelector(open_library, (first, *others))


class BackendSelector:
    """Grammar backend that compiles each constraint with the first of several libraries that supports it, and opens a
    library when a constraint first needs it. Thread-safe."""

    def __init__(self, open_library: Callable[[str], GrammarBackend], names: Sequence[str]) -> None:
        """Opens the first of `names` at once."""
        self._open = open_library
        self._names = names
        self._opened = {names[0]: open_library(names[0])}

    def compile(self, constraint: pb.StructuredOutput) -> Grammar:
        """Compiles with the first library that supports the constraint, and logs if that is not the preferred one.
        Raises InvalidArgument if the constraint is invalid or none accepts it."""
        structured_output.check(constraint)
        name, grammar, reason = backends.choose(
            constraint, self._names, lambda name: self.backend(name).compile(constraint)
        )
        if reason:
            log.info("grammar compiled by a fallback backend", structured_output_backend=name, reason=reason)
        return grammar

    def filler(self) -> MaskFiller:
        """Returns a new filler: the library's own if there is only one, else one that groups matchers by library."""
        return self.backend(self._names[0]).filler() if len(self._names) == 1 else MixedFiller(self.backend)

    def backend(self, name: str) -> GrammarBackend:
        """Returns the backend of library `name`, opened on its first use."""
        if name not in self._opened:
            self._opened[name] = self._open(name)  # two threads may open it at once: one result is dropped
        return self._opened[name]


class MixedFiller:
    """Mask filler for matchers of several libraries: groups them by library and calls each library's own filler
    once."""

    def __init__(self, backend: Callable[[str], GrammarBackend]) -> None:
        self._backend = backend
        self._fillers: dict[str, MaskFiller] = {}

    def accept(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[bool]:
        """Advances each matcher by its token, library by library; returns, in the given order, which tokens were
        accepted."""
        accepted = [False] * len(matchers)
        for library, rows in _by_library(matchers).items():
            results = self._filler(library).accept([matchers[row] for row in rows], [token_ids[row] for row in rows])
            for row, is_right in zip(rows, results, strict=True):
                accepted[row] = is_right
        return accepted

    def fill(self, matchers: Sequence[Matcher], places: Sequence[int], masks: I32) -> None:
        """Fills masks[places[i]] for matchers[i], library by library."""
        for library, rows in _by_library(matchers).items():
            self._filler(library).fill([matchers[row] for row in rows], [places[row] for row in rows], masks)

    def _filler(self, library: str) -> MaskFiller:
        """Returns the library's filler, created on first use."""
        if library not in self._fillers:
            self._fillers[library] = self._backend(library).filler()
        return self._fillers[library]


def _by_library(matchers: Sequence[Matcher]) -> dict[str, list[int]]:
    """Groups the indices of `matchers` by the name of their library."""
    rows_by_library: dict[str, list[int]] = {}
    for row, matcher in enumerate(matchers):
        rows_by_library.setdefault(matcher.library, []).append(row)
    return rows_by_library
