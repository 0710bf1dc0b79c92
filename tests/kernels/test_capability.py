"""Values by GPU capability: a GPU without its own row uses that of the newest older one."""

from __future__ import annotations

import pytest

from quire.kernels.capability import SM80, SM90, SM100, ByCapability, Capability, gpu_capability

SM75, SM86, SM89, SM103, SM120 = (7, 5), (8, 6), (8, 9), (10, 3), (12, 0)


@pytest.mark.parametrize(
    ("capability", "row"),
    [(SM80, "a"), (SM86, "a"), (SM89, "a"), (SM90, "h"), (SM100, "b"), (SM103, "b"), (SM120, "b"), (SM75, "a")],
)
def test_a_gpu_has_the_row_of_the_newest_generation_that_is_not_newer(capability: Capability, row: str) -> None:
    assert ByCapability({SM100: "b", SM80: "a", SM90: "h"}).of(capability) == row


def test_the_only_row_serves_older_gpus_as_well() -> None:
    assert ByCapability({SM90: 1}).of(SM80) == 1


def test_the_row_of_this_gpu_is_looked_up_once() -> None:
    rows = {SM80: [0], gpu_capability(): [1]}
    table = ByCapability(rows)
    assert table.here is rows[gpu_capability()]
    table.rows.clear()
    assert table.here == [1]
