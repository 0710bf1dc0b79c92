"""Renders a cluster's status as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.top.history import History

GREEN, YELLOW, RED, CYAN, DIM, BOLD, PLAIN = (
    "\033[32m",
    "\033[33m",
    "\033[31m",
    "\033[36m",
    "\033[2m",
    "\033[1m",
    "\033[0m",
)
STATES = {
    pb.STATE_READY: (GREEN, "ready"),
    pb.STATE_STARTING: (YELLOW, "starting"),
    pb.STATE_DRAINING: (YELLOW, "draining"),
    pb.STATE_STALLED: (RED, "stalled"),
    pb.STATE_PAUSED: (DIM, "paused"),
    pb.STATE_ASLEEP: (DIM, "asleep"),
    pb.STATE_OUTDATED: (YELLOW, "outdated"),
    pb.STATE_DOWN: (RED, "down"),
}
LONG_S, VERY_LONG_S = 10.0, 60.0  # request ages that are highlighted
NARROWEST, WIDEST = 60, 160


class Palette:
    """Terminal colours, or none for other outputs."""

    def __init__(self, *, coloured: bool) -> None:
        self._coloured = coloured

    def __call__(self, colour: str, text: str) -> str:
        return f"{colour}{text}{PLAIN}" if self._coloured else text


def lines(services: Sequence[pb.ServiceStatus], history: History, width: int, ink: Palette) -> list[str]:
    """Returns lines of at most `width` characters each, not counting colour codes."""
    width = min(max(width, NARROWEST), WIDEST)
    return [*_head(services, history, width, ink), "", *_workers(services, width, ink), "", *_calls(services, ink)]


def _head(services: Sequence[pb.ServiceStatus], history: History, width: int, ink: Palette) -> Iterator[str]:
    """Yields the lines above the workers: totals, other services' states, and the curve of the throughput."""
    schedulers = [service for service in services if service.role == pb.ROLE_SCHEDULER]
    running, waiting = sum(s.running for s in schedulers), sum(s.waiting for s in schedulers)
    rate = history.rates[-1] if history.rates else sum(s.work.tokens_per_s for s in schedulers)
    moved = sum(s.sequences_moved for s in schedulers)
    parts = [f"{rate:,.0f} tokens/s", f"{running} running", f"{waiting} waiting", f"{moved} moved"]
    yield ink(BOLD, "quire") + "  " + "   ".join(parts)
    others = [service for service in services if service.role != pb.ROLE_WORKER]
    states = (f"{service.id} {ink(*STATES.get(service.state, (DIM, '?')))}" for service in others)
    yield "  ".join(states)
    curve = history.curve(width)
    if curve:
        yield ink(CYAN, curve)


def _workers(services: Sequence[pb.ServiceStatus], width: int, ink: Palette) -> Iterator[str]:
    """Yields a header and a line per worker, with a bar of its KV blocks that fits the width."""
    workers = [service for service in services if service.role == pb.ROLE_WORKER]
    if not workers:
        yield ink(RED, "no worker is attached")
        return
    name = max(len("WORKER"), *(len(_named(worker)) for worker in workers))
    bar = max(10, width - name - 58)
    yield ink(DIM, f"{'WORKER':<{name}}  {'STATE':<8}  {'KV':<{bar}}  USED   RUN  WAIT   TOK/S  STEP AGE  HITS")
    for worker in workers:
        colour, state = STATES.get(worker.state, (DIM, "?"))
        blocks, work = worker.blocks, worker.work
        used = blocks.used / blocks.total if blocks.total else 0.0
        age = f"{worker.last_step_age_s:.1f} s" if worker.HasField("last_step_age_s") else "-"
        hits = f"{100 * work.cached_tokens / work.prompt_tokens:.0f} %" if work.prompt_tokens else "-"
        yield (
            f"{_named(worker):<{name}}  {ink(colour, f'{state:<8}')}  {_bar(blocks, bar, ink)}  {100 * used:3.0f} %  "
            f"{worker.running:4}  {worker.waiting:4}  {work.tokens_per_s:6,.0f}  {age:>8}  {hits:>4}"
        )


def _named(worker: pb.ServiceStatus) -> str:
    """Returns the id of a worker, with its role if it has one."""
    return f"{worker.id} ({worker.worker_role})" if worker.worker_role else worker.id


def _bar(blocks: pb.BlockCounts, width: int, ink: Palette) -> str:
    """Renders used, then cached, then free blocks as a bar of `width` characters; what is not zero has at least one."""
    total = blocks.total or 1
    used = min(width, round(blocks.used / total * width) or int(blocks.used > 0))
    cached = min(width - used, round(blocks.cached / total * width) or int(blocks.cached > 0))
    return ink(GREEN, "█" * used) + ink(CYAN, "▒" * cached) + ink(DIM, "·" * (width - used - cached))


def _calls(services: Sequence[pb.ServiceStatus], ink: Palette) -> Iterator[str]:
    """Yields a header and a line per call among the oldest ones, coloured by age."""
    calls = sorted((call for service in services for call in service.oldest_calls), key=lambda call: -call.age_s)
    if not calls:
        yield ink(DIM, "no request is being answered")
        return
    yield ink(DIM, f"{'OLDEST REQUESTS':<36}  {'TENANT':<12}  {'AGE':>8}  PROMPT  OUTPUT  TOK/S")
    for call in calls:
        colour = RED if call.age_s > VERY_LONG_S else YELLOW if call.age_s > LONG_S else PLAIN
        rate = call.completion_tokens / call.age_s if call.age_s else 0.0
        yield (
            f"{_printable(call.request_id, 36):<36}  {_printable(call.tenant, 12) or '-':<12}  "
            f"{ink(colour, f'{call.age_s:6.1f} s')}  {call.prompt_tokens:6}  {call.completion_tokens:6}  {rate:5.0f}"
        )


def _printable(text: str, length: int) -> str:
    """Removes control characters from client-chosen ids, which must not control the terminal."""
    plain = "".join(character if character.isprintable() else "?" for character in text)
    return plain if len(plain) <= length else f"{plain[: length - 1]}…"
