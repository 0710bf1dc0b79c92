"""Refuses settings under which a service listens to other machines without authentication."""

from __future__ import annotations

from quire.shared.errors import InvalidArgument
from quire.shared.settings.base import LOOPBACK, Settings


def check_exposure(settings: Settings) -> None:
    """Raises InvalidArgument for a host that other machines can reach, without a cluster secret or client
    certificates."""
    if settings.host in LOOPBACK or settings.cluster_secret_file or settings.tls.is_mutual or settings.insecure:
        return
    raise InvalidArgument(
        f"host: {settings.title} would accept any caller on {settings.host}. Set cluster_secret_file (the same for all "
        "services), or tls with clients=require; or insecure, on a trusted network",
        field="host",
    )
