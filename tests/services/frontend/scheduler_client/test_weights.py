"""Frontends forward the newest weights identity to schedulers that missed the update."""

from __future__ import annotations

from pathlib import Path

from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1 import model_pb2
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, echo, scheduler
from tests.waiting import eventually

PATIENCE_S = 60.0


async def test_the_newest_weights_are_sent_to_the_others_once(folder: Path) -> None:
    newest = model_pb2.WeightsIdentity(update=7, version="seven", path="step-7")
    first = ScriptedScheduler(echo, weights=newest)
    second = ScriptedScheduler(echo, weights=model_pb2.WeightsIdentity(update=5, version="five"))
    third = ScriptedScheduler(echo)
    async with (
        scheduler(first),
        scheduler(second),
        scheduler(third),
        running(folder, first.address, second.address, third.address) as frontend,
    ):
        await frontend.until_sessions(3)
        await eventually(lambda: newest in second.weights_told and newest in third.weights_told)
        first.set_view(num_waiting=3)  # once more
        await frontend.until_view(lambda view: view.weights.update < 7 or view.num_waiting == 3)
        assert (first.weights_told, second.weights_told) == ([], [newest])
        updates = [weights.update for weights in third.weights_told]
        assert updates in ([7], [5, 7]), "in the order in which sessions were opened, without duplicates"


async def test_an_update_is_newer_than_one_from_a_clock_that_was_days_ahead(folder: Path) -> None:
    ahead = 1 << 60
    script = ScriptedScheduler(echo, weights=model_pb2.WeightsIdentity(update=ahead, version="of tomorrow"))
    async with scheduler(script), running(folder, script.address) as frontend:
        await frontend.until_sessions(1)
        for number in (1, 2):
            told = admin_pb2.UpdateWeightsRequest(path="x", weight_version=f"now {number}")
            assert (await frontend.admin.UpdateWeights(told)).weight_version == f"now {number}"
            await frontend.until_view(lambda view, number=number: view.weights.update == ahead + number)
    assert script.updates == [ahead + 1, ahead + 2]
