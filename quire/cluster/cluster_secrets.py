"""The secret by which the services of a cluster authenticate each other: given, or generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.cluster.endpoints import Endpoints
from quire.shared.errors import InvalidArgument
from quire.shared.security.secret_file import SecretFile
from quire.shared.settings import SERVICES
from quire.shared.settings.base import configured

NAME = "cluster_secret_file"


def cluster_secrets(
    named: str, settings: Mapping[str, Mapping[str, Any]], endpoints: Endpoints, *, is_joining: bool
) -> dict[str, str]:
    """Returns, by service, the file with its secret: `named`, otherwise from settings, environment and YAML file; a
    service without one uses that of another, and if there is none at all, one is generated for all. Raises
    InvalidArgument for an unusable file, and when joining a cluster without one."""
    given = configured(SERVICES)
    own = {
        service: str(settings.get(service, {}).get(NAME) or named or given[service].get(NAME) or "")
        for service in SERVICES
    }
    found = [own[service] for service in ("scheduler", "frontend", "worker") if own[service]]
    for path in dict.fromkeys(found):
        SecretFile(path, NAME)
    if not found and is_joining:
        raise InvalidArgument(
            f"{NAME}: is required to join a cluster, and must name the secret of that cluster; set "
            "--cluster-secret-file FILE on both sides, or QUIRE_WORKER_CLUSTER_SECRET_FILE",
            field=NAME,
        )
    common = found[0] if found else str(endpoints.secret("cluster-secret"))
    return {service: path or common for service, path in own.items()}
