"""Checks ports that services will listen on, and Redis."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping

from quire.cluster.endpoints import LOOPBACK
from quire.cluster.metrics_ports import DEFAULT
from quire.doctor.finding import Finding, error, ok, run_check, warning
from quire.shared import ports, prefix_index
from quire.shared.errors import FailedPrecondition
from quire.shared.settings import FrontendSettings

CLOCKS_DIFFER_S = 1.0


def check_ports(host: str, wanted: Mapping[str, int], cluster: str) -> Iterator[Finding]:
    """Yields whether each port, by the name of its setting, is free; 0 is skipped. Ports in use are an error unless
    a cluster answers at the address `cluster` ("": none does)."""
    for field, port in wanted.items():
        if not port:
            continue
        try:
            ports.check(host, port, field)
        except FailedPrecondition as refusal:
            if cluster:
                yield ok(field, f"{host}:{port} is in use, and a cluster answers at {cluster}")
            else:
                yield error(field, refusal.message.removeprefix(f"{field}: ").partition(";")[0], _other(field))
        else:
            yield ok(field, f"{host}:{port} is free")


def check_metrics_port(wanted: int | None, cluster: str) -> Iterator[Finding]:
    """Yields whether the metrics port is free; for None, the default of `quire up`, a port in use is only a warning,
    since another one is taken."""
    if wanted is not None:
        yield from check_ports(LOOPBACK, {"metrics_port": wanted}, cluster)
        return
    for finding in check_ports(LOOPBACK, {"metrics_port": DEFAULT}, cluster):
        if finding.level == "ok":
            yield finding
        else:
            advice = f"`quire up` chooses another port and prints it; Prometheus may expect {DEFAULT}"
            yield warning(finding.subject, finding.found, advice)


def _other(field: str) -> str:
    return f"end the process that listens there (ss -ltnp), or choose another port with --{field.replace('_', '-')}"


def check_redis(settings: FrontendSettings) -> Iterator[Finding]:
    """Yields whether Redis answers and its clock agrees; without a configured Redis no connection is tried."""
    if settings.redis == "none":
        yield ok("redis", "not configured; `quire up` starts its own if it needs one")
        return
    advice = "check the URL, the password file and `redis-cli ping`; requests are served without Redis, too"
    yield from run_check("redis", lambda: [asyncio.run(_ask(settings))], advice)


async def _ask(settings: FrontendSettings) -> Finding:
    """Asks Redis for its time and compares the clocks; every exception becomes a finding that hides the URL's
    password."""
    redis = prefix_index.connect(settings.redis, password_file=settings.redis_password_file, tls=settings.tls)
    try:
        seconds, microseconds = await redis.time()
    except Exception as reason:
        shown = settings.redis.rpartition("@")[2]
        return error("redis", f"{shown} does not answer: {reason}", "check the URL and the password file")
    finally:
        with contextlib.suppress(Exception):
            await redis.aclose()
    apart = abs(time.time() - (seconds + microseconds * 1e-6))
    if apart > CLOCKS_DIFFER_S:
        return warning(
            "redis", f"answers; its clock differs by {apart:.1f} s", "synchronize the clocks of both machines"
        )
    return ok("redis", "answers, and its clock agrees")
