from __future__ import annotations

import pytest

from tests.kv_groups import models
from tests.kv_groups.models import Make
from tests.services.worker.checkpoints import Checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a factory of checkpoints by name in tests/kv_groups/models.py or by family, created once per module."""
    found: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in found:
            found[name] = models.make(name, tmp_path_factory.mktemp(name))
        return found[name]

    return get
