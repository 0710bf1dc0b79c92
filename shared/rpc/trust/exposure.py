"""No service listens to other machines without knowing who calls."""

from __future__ import annotations

from quire.shared.errors import InvalidArgument
from quire.shared.settings.base import LOOPBACK, Settings


def check_exposure(settings: Settings) -> None:
    """Raises InvalidArgument for a host that others reach, without a cluster secret or certificates of callers."""
    if settings.host in LOOPBACK or settings.cluster_secret_file or settings.tls.is_mutual or settings.insecure:
        return
    raise InvalidArgument(
        f"host: {settings.title} would listen on {settings.host} to anybody. Set cluster_secret_file (the same for all "
        "services), or tls with clients=require; or insecure, where nobody else is on the network",
        field="host",
    )
