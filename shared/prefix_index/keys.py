"""Names of the Redis keys. Keys that one command reads share a hash tag, so that Redis Cluster stores them on one
node."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.pb.common.v1 import model_pb2

MEMBER_BYTES = 8  # prefix of a block's hash: precise enough for a hint, at a third of the memory


@dataclass(frozen=True, slots=True)
class RegistryKeys:
    """Keys of the schedulers of one namespace."""

    namespace: str

    @property
    def schedulers(self) -> str:
        """Set of scheduler ids; a live one also has a `scheduler` key."""
        return f"{{{self.namespace}}}:schedulers"

    def scheduler(self, scheduler_id: str) -> str:
        """Key of a scheduler's entry, JSON: address, epoch, number of workers, draining. Expires with its lease."""
        return f"{{{self.namespace}}}:scheduler:{scheduler_id}"


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """Keys for one model and block layout, because hashes of another one are meaningless here."""

    tag: str

    @classmethod
    def of(cls, namespace: str, model: model_pb2.ModelIdentity, layout: model_pb2.BlockLayout) -> BlockKeys:
        return cls(f"{{{namespace}:{model.name}:{model.fingerprint[:12]}:{layout.block_size}}}")

    @property
    def workers(self) -> str:
        """Set of worker ids; a live one also has a `worker` key."""
        return f"{self.tag}:workers"

    def worker(self, worker_id: str) -> str:
        """Key of a worker's entry, JSON: epoch and scheduler. Expires with its lease."""
        return f"{self.tag}:worker:{worker_id}"

    def blocks(self, worker_id: str, epoch: int) -> str:
        """Key of the set of block hashes, MEMBER_BYTES each, that a worker holds in one epoch. A single key, so that
        it is removed at once: by UNLINK, or with its lease."""
        return f"{self.tag}:blocks:{worker_id}:{epoch}"


def member(block_hash: bytes) -> bytes:
    return block_hash[:MEMBER_BYTES]
