"""The part of WorkerHello that real and simulated workers share."""

from __future__ import annotations

import os
from pathlib import Path

from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.shared.kv import block_hash
from quire.shared.models import model_identity
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.settings import WorkerSettings
from quire.shared.version import VERSION


def base_hello(settings: WorkerSettings, name: str, address: str, limits: WorkerLimits) -> pb.WorkerHello:
    """Returns a hello with identity, model, block layout and step limits, which real and simulated workers share; the
    caller adds the device's abilities. Reads the model's folder for its identity."""
    return pb.WorkerHello(
        worker_id=name,
        pid=os.getpid(),
        address=address,
        version=VERSION,
        model=model_identity.identity(Path(settings.model), settings.served_model_name),
        layout=model_pb2.BlockLayout(block_size=limits.block_size, hash_scheme=block_hash.SCHEME),
        kv_cache=pb.KVCache(num_blocks=limits.num_blocks),
        limits=pb.StepLimits(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
        ),
        sampling=pb.SamplingSupport(batch_invariant=settings.batch_invariant),
    )
