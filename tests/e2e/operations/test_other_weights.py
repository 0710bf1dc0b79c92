"""A worker that joins a cluster with other weights under the same config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire import Client, SamplingParams
from quire.cluster.options import ServiceSpec
from tests.e2e.conftest import running_cluster
from tests.e2e.operations.test_weights import SETTINGS, folder_of, shake
from tests.programs import answered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

REFUSED = "the scheduler refuses this worker: weights: worker other has "
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
COUNTING = "Once upon a time there was a boy who counted: one, two, three, four,"


async def test_worker_with_other_weights_is_refused_without_affecting_others(tmp_path: Path) -> None:
    shaken = folder_of(tmp_path / "shaken", shake(1))
    with running_cluster(worker=SETTINGS) as cluster, Client(cluster.grpc_address) as client:
        (first,) = client.generate(COUNTING, GREEDY)
        spec = cluster.process("worker-0").spec
        assert isinstance(spec, ServiceSpec)
        own = {"id": "other", "model": shaken, "grpc_port": 0, "metrics_port": 0}
        status, _, said = await answered(*replace(spec, id="other", flags={**spec.flags, **own}).command())
        assert status != 0
        assert REFUSED in said
        assert "under the same config.json" in said
        (again,) = client.generate(COUNTING, GREEDY)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
