from __future__ import annotations

from tests.e2e.conftest import client, cluster

__all__ = ["client", "cluster"]
