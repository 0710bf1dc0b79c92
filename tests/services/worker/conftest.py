from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers

from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Checkpoints by family name, made once."""
    made: dict[str, Checkpoint] = {}

    def get(family: str) -> Checkpoint:
        if family not in made:
            made[family] = checkpoints.make(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Models here are so small that more threads only wait for each other."""
    torch.set_num_threads(1)
