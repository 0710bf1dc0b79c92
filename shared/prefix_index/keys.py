"""Names of the keys. Those that are asked together carry one hash tag, so that Redis Cluster keeps them together."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.pb.common.v1 import model_pb2

MEMBER_BYTES = 8  # of a block's hash: enough to steer by, at a third of the memory of the whole


@dataclass(frozen=True, slots=True)
class RegistryKeys:
    """Schedulers that work together: those of one namespace."""

    namespace: str

    @property
    def schedulers(self) -> str:
        """Set of ids; each has a `scheduler` key while it lives."""
        return f"{{{self.namespace}}}:schedulers"

    def scheduler(self, scheduler_id: str) -> str:
        """JSON: address, epoch, number of workers, whether it drains. Expires with its lease."""
        return f"{{{self.namespace}}}:scheduler:{scheduler_id}"


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """Of one model and block layout: hashes of another would mean nothing here."""

    tag: str

    @classmethod
    def of(cls, namespace: str, model: model_pb2.ModelIdentity, layout: model_pb2.BlockLayout) -> BlockKeys:
        return cls(f"{{{namespace}:{model.name}:{model.fingerprint[:12]}:{layout.block_size}}}")

    @property
    def workers(self) -> str:
        """Set of ids; each has a `worker` key while it lives."""
        return f"{self.tag}:workers"

    def worker(self, worker_id: str) -> str:
        """JSON: epoch and scheduler. Expires with its lease."""
        return f"{self.tag}:worker:{worker_id}"

    def blocks(self, worker_id: str, epoch: int) -> str:
        """Set of the first MEMBER_BYTES of the hashes of the blocks a worker holds, in one epoch. One key, so that it
        goes as a whole: by UNLINK, or with its lease."""
        return f"{self.tag}:blocks:{worker_id}:{epoch}"


def member(block_hash: bytes) -> bytes:
    return block_hash[:MEMBER_BYTES]
