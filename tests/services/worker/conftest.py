from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests import interpreter  # noqa: F401 - before quire.kernels.triton is imported
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.rig import Rig
from tests.services.worker.structured.grammar_rig import TINY

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Checkpoints by family name, each made once."""
    made: dict[str, Checkpoint] = {}

    def get(family: str) -> Checkpoint:
        if family not in made:
            made[family] = checkpoints.make(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Limits torch to one thread: with such small models more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Tokenizer of the bundled model."""
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="session")
def _tiny() -> Rig:
    return Rig(TINY, num_blocks=512, block_size=16, attention_backend="auto", record_logits=False)


@pytest.fixture
def tiny(_tiny: Rig) -> Iterator[Rig]:
    """Rig of the bundled model, without sequences."""
    yield _tiny
    if _tiny.scheduler.rows:
        _tiny.step(released=list(_tiny.scheduler.rows))
