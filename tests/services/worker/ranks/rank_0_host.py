"""Host of rank 0, of two: python -m tests.services.worker.ranks.rank_0_host FOLDER SECRET_FILE TLS"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from quire.services.worker.building.rank_processes import start
from quire.services.worker.ranks.replica_ranks import ReplicaRanks
from tests.services.worker.ranks.test_pipeline import SLOTS, by_turns, prefill
from tests.services.worker.ranks.test_sharding import RankedRig
from tests.services.worker.rig import Rig


def main(folder: Path, secret: str, tls: dict[str, str]) -> None:
    where: dict[str, Any] = {
        "nnodes": 2,
        "master_addr": "10.77.0.1",
        "master_port": 29500,
        "cluster_secret_file": secret,
    }
    where["tls"] = tls
    worker = Rig.settings(folder, pipeline_parallel_size=2, **where)
    group = ReplicaRanks(2, functools.partial(start.build_part, worker), 2, start.open_nodes(worker))
    try:
        rig = RankedRig(folder, group, pipeline_parallel_size=2, **where)
        group.wait_ready()
        prefill(rig)
        by_turns(rig, 8, 2)
        print([rig.tokens(slot) for slot in SLOTS])
    finally:
        group.stop(10.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], dict(part.split("=", 1) for part in sys.argv[3].split(",")))
