"""Backend of a library whose compilation has no bounds on time and memory: it compiles in subprocesses and loads the
serialized grammars here."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Sequence
from pathlib import Path

from quire.services.worker.structured.backends import compile_child, libraries
from quire.services.worker.structured.backends.compile_child import DEFAULT_LIMITS, SubprocessLimits
from quire.services.worker.structured.backends.vocabulary import ModelVocabulary
from quire.services.worker.structured.port import Grammar, MaskFiller
from quire.shared import structured_output
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.process.child import Child, ChildEnded
from quire.shared.structured_output.checks import refuse

MAX_COMPILED_BYTES = 64 << 20


class SubprocessBackend:
    """Grammar backend that compiles in a pool of child processes, within limits of time and memory, and loads the
    result here; starts the first child when opened."""

    def __init__(
        self,
        name: str,
        folder: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: SubprocessLimits = DEFAULT_LIMITS,
    ) -> None:
        self._limits = limits
        self._name = name
        self._vocabulary = ModelVocabulary.read(folder, vocab_size, eos_token_ids)
        self._library = libraries.library_class(name)(self._vocabulary)
        self._init_message = compile_child.init_message(name, folder, vocab_size, list(eos_token_ids), limits)
        self._idle_children: queue.LifoQueue[Child] = (
            queue.LifoQueue()
        )  # grows to the number of concurrent compilations
        weakref.finalize(self, _close, self._idle_children)
        first = self._acquire_child()
        first.start()  # takes longer than compiling most grammars
        self._idle_children.put(first)

    def compile(self, constraint: pb.StructuredOutput) -> Grammar:
        """Compiles in an idle child, blocking the caller, and loads the grammar. Raises InvalidArgument if the library
        refuses the constraint, exceeds its limits, or compiles it to more than MAX_COMPILED_BYTES."""
        structured_output.check(constraint)
        compiled = self._ask(constraint.SerializeToString(deterministic=True))
        if len(compiled) > MAX_COMPILED_BYTES:
            raise refuse(
                f"{self._name} compiles it to {len(compiled) >> 20} MiB; the limit is {MAX_COMPILED_BYTES >> 20}"
            )
        return self._library.load(constraint, compiled)

    def filler(self) -> MaskFiller:
        return self._library.filler()

    def _ask(self, message: bytes) -> bytes:
        """Sends the serialized constraint to a child and returns the compiled bytes; the child goes back to the pool.
        Raises InvalidArgument if the library refuses the constraint, or compiling it exceeds the bounds on time or
        memory."""
        child = self._acquire_child()
        try:
            answer = child.ask(message)
        except ChildEnded as ended:
            too_slow = ended.status in (None, -compile_child.OUT_OF_TIME)
            bound = f"{self._limits.seconds:.0f} s" if too_slow else f"{self._limits.memory_bytes >> 20} MiB"
            raise refuse(f"{self._name} takes more than {bound} to compile it") from None
        finally:
            self._idle_children.put(child)
        if answer[:1] == compile_child.FAILED:
            raise structured_output.compile_refusal(f"{self._name}: {answer[1:].decode(errors='replace')}")
        return answer[1:]

    def _acquire_child(self) -> Child:
        """Returns an idle child, or a new one that starts when it is first asked."""
        try:
            return self._idle_children.get_nowait()
        except queue.Empty:
            return Child(compile_child.__name__, self._init_message)


def _close(children: queue.LifoQueue[Child]) -> None:
    """Ends the idle child processes, when the backend is garbage-collected or the process exits."""
    while not children.empty():
        children.get_nowait().close()
