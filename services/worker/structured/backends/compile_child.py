"""Subprocess of subprocess_backend.py: compiles constraints one after the other, within limits of memory and
CPU time.

It is initialised with a library's name and the vocabulary, receives constraints, and answers with COMPILED and the
serialized grammar, or with FAILED and the reason.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.services.worker.structured.backends import libraries
from quire.services.worker.structured.backends.vocabulary import ModelVocabulary
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.process.child import serve_requests

OUT_OF_TIME = signal.SIGPROF  # terminates the process: nothing else can interrupt the library
COMPILED, FAILED = b"\1", b"\0"


@dataclass(frozen=True, slots=True)
class SubprocessLimits:
    """Limits of one compilation in a subprocess."""

    seconds: float = 8.0  # of CPU time
    memory_bytes: int = 1 << 30  # in addition to the library's own memory


DEFAULT_LIMITS = SubprocessLimits()


def init_message(
    name: str, folder: Path, vocab_size: int, eos_token_ids: list[int], limits: SubprocessLimits = DEFAULT_LIMITS
) -> bytes:
    """Serializes the arguments and limits that open_compiler() is started with in the subprocess."""
    return json.dumps([name, str(folder), vocab_size, eos_token_ids, limits.seconds, limits.memory_bytes]).encode()


def open_compiler(init_message: bytes) -> Callable[[bytes], bytes]:
    """Loads the library and limits this process's memory; returns a function that compiles a serialized constraint and
    answers COMPILED or FAILED. A compilation that exceeds its CPU time terminates the process by a signal."""
    name, folder, vocab_size, eos_token_ids, seconds, memory_bytes = json.loads(init_message)
    library = libraries.library_class(name)(ModelVocabulary.read(Path(folder), vocab_size, eos_token_ids))
    limit = _memory_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def answer(message: bytes) -> bytes:
        """Compiles one serialized constraint under the CPU time limit; any error becomes a FAILED answer."""
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return COMPILED + library.compile(sampling_pb2.StructuredOutput.FromString(message))
        except MemoryError:
            return FAILED + f"it takes more than {memory_bytes >> 20} MiB".encode()
        except Exception as error:
            return FAILED + (str(error) or type(error).__name__).encode()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    return answer


def _memory_bytes() -> int:
    """Returns the size of the data segment as RLIMIT_DATA counts it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) << 10


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve_requests(open_compiler)
