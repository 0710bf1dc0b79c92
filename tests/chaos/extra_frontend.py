"""An additional frontend of a cluster, which a test may kill."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from quire.cluster import Cluster


class ExtraFrontend(NamedTuple):
    """Addresses and process of an additional frontend."""

    grpc: str
    http: str
    process: int


@asynccontextmanager
async def extra_frontend(cluster: Cluster, name: str = "other", **settings: object) -> AsyncIterator[ExtraFrontend]:
    """Runs an additional frontend of the cluster with separate ports and settings."""
    spec = cluster.process("frontend-0").spec
    shared = ("redis", "redis_password_file", "cluster_secret_file")
    flags = {name: spec.flags[name] for name in shared if name in spec.flags}
    named = {"id": name, "http-port": "0", "grpc-port": "0", **flags, **settings}
    command = [sys.executable, "-m", "quire", "frontend"]
    for flag, value in named.items():
        command += [f"--{flag.replace('_', '-')}", str(value)]
    command += ["--model", str(cluster.options.model_folder), "--served-model-name", cluster.options.model_name]
    command += ["--schedulers", cluster.process("scheduler-0").addresses["grpc"]]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    try:
        assert process.stdout is not None
        words = (await process.stdout.readline()).decode().split()
        addresses = dict(word.split("=", 1) for word in words[2:])
        yield ExtraFrontend(addresses["grpc"], addresses["http"], process.pid)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
