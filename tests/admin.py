"""Calls the admin service of a local service with its key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc.aio

from quire.shared.pb.admin.v1 import admin_pb2_grpc
from quire.shared.rpc import admin_credentials
from quire.shared.rpc.admin_credentials import AdminCredentials


class Admin:
    """Generated stub that sends the key with every call."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._stub = admin_pb2_grpc.AdminServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {key}"),)

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self._stub, name), metadata=self._metadata)


@asynccontextmanager
async def calling(found: AdminCredentials) -> AsyncIterator[Admin]:
    async with grpc.aio.insecure_channel(found.address) as channel:
        yield Admin(channel, found.key)


def admin_of(role: str, grpc_address: str) -> AdminCredentials:
    """Returns the credentials as a command of this user finds them."""
    found = admin_credentials.find(grpc_address, role)
    assert found is not None, f"no {role} at {grpc_address} has left its pass"
    return found
