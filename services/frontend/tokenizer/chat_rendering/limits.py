"""Limits of memory and processor time for a chat template, in the process that runs it."""

from __future__ import annotations

from quire.shared.errors import InvalidArgument

MEMORY_BYTES = 512 << 20  # beyond what the process uses when it starts
TEXT_CHARACTERS = 1 << 26  # maximum size of a rendered conversation
STATM = Path("/proc/self/statm")


class CpuTimeExceeded(Exception):
    """Signal that the template has used up its processor time."""


def bound_memory() -> None:
    """Makes allocations beyond the limit raise MemoryError in this process, and disables core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not STATM.exists():
        return
    used = int(STATM.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


@contextlib.contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raises CpuTimeExceeded in the body after `seconds` of processor time; main thread only.

    A process that is busy within one operation and cannot handle the signal is ended by the system a second or two
    later (SIGXCPU).
    """
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(_used_s() + seconds) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _used_s() -> float:
    times = os.times()
    return times.user + times.system


def _stop(*_: object) -> None:
    raise CpuTimeExceeded


def cpu_time_error(label: str, seconds: float) -> InvalidArgument:
    return InvalidArgument(
        f"messages: the chat template {label} takes more than {seconds:g} s; send a shorter conversation, or start the"
        " server with another --chat-template",
        field="messages",
    )


def memory_error(label: str) -> InvalidArgument:
    return InvalidArgument(
        f"messages: the chat template {label} needs more than {MEMORY_BYTES >> 20} MiB; send a shorter conversation, or"
        " start the server with another --chat-template",
        field="messages",
    )
