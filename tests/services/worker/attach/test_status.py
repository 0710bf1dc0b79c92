"""Status of a worker before it has attached."""

from __future__ import annotations

from quire.cli.status import as_dict, table
from quire.services.worker.attach.status import WorkerStatus
from quire.services.worker.models.loading.progress import Progress
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.process.lifecycle import Shutdown

GIB = 1 << 30


def test_weights_are_counted_until_it_has_attached() -> None:
    progress = Progress()
    status = WorkerStatus("w", "localhost:1", Shutdown(), progress)
    assert "GiB" not in table([status.read()])
    progress.loaded_bytes, progress.total_bytes = 3 * GIB, 4 * GIB
    starting = status.read()
    assert starting.state == admin_pb2.STATE_STARTING
    assert "starting, 3.0 of 4.0 GiB of weights" in table([starting])
    assert as_dict(starting)["weights"] == {"loaded": 3 * GIB, "total": 4 * GIB}
    status.epoch = 5
    assert "GiB" not in table([status.read()])
    assert as_dict(status.read())["weights"] is None
