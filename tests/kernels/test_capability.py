"""Values by GPU capability: a GPU without a row of its own has that of the newest one before it."""

from __future__ import annotations

import pytest

from quire.kernels import capability as module
from quire.kernels.capability import SM80, SM90, SM100, ByCapability, Capability

SM75, SM86, SM89, SM103, SM120 = (7, 5), (8, 6), (8, 9), (10, 3), (12, 0)


@pytest.mark.parametrize(
    ("capability", "row"),
    [(SM80, "a"), (SM86, "a"), (SM89, "a"), (SM90, "h"), (SM100, "b"), (SM103, "b"), (SM120, "b"), (SM75, "a")],
)
def test_a_gpu_has_the_row_of_the_newest_generation_that_is_not_newer(capability: Capability, row: str) -> None:
    assert ByCapability({SM100: "b", SM80: "a", SM90: "h"}).of(capability) == row


def test_the_only_row_serves_older_gpus_as_well() -> None:
    assert ByCapability({SM90: 1}).of(SM80) == 1


def test_the_row_of_this_gpu_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Capability] = []
    monkeypatch.setattr(module, "gpu_capability", lambda: asked.append(SM100) or SM100)
    table = ByCapability({SM90: 1, SM100: 2})
    assert [table.here, table.here] == [2, 2]
    assert asked == [SM100]
