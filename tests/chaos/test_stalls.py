"""A few rounds of `python -m tests.chaos.stalls`."""

from __future__ import annotations

import pytest

from tests.chaos.stalls import SERVICES, plan, programme, report


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_stopped_services_recover_without_losing_a_stream() -> None:
    outcomes = await programme(plan(SERVICES, (1, 7, 20), rounds=1), num_lanes=3, num_streams=4)
    print(report(outcomes))
    assert [outcome for outcome in outcomes if outcome.faults] == []
