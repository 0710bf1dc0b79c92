"""What everybody who works with this scheduler must agree on: the model and the block layout.

The first service to come sets them; whoever does not match is turned away with a text that names both sides.
"""

from __future__ import annotations

from shared import block_hash, model_identity
from shared.errors import FailedPrecondition
from shared.pb.common.v1 import model_pb2
from shared.pb.worker.v1 import worker_pb2

RAW_LOGPROBS = "raw_logprobs"  # the default, and that of workers from before there was a choice


class Terms:
    """Settled once, kept while the scheduler lives, also while no worker is there."""

    def __init__(self) -> None:
        self.model: model_pb2.ModelIdentity | None = None
        self.layout: model_pb2.BlockLayout | None = None
        self.logprobs_mode = ""
        self.batch_invariant: bool | None = None
        self._set_by = ""

    @property
    def model_name(self) -> str:
        return self.model.name if self.model is not None else ""

    def agree_on_model(self, model: model_pb2.ModelIdentity, who: str) -> None:
        if self.model is None:
            self.model, self._set_by = model, who
            return
        problem = model_identity.mismatch(self.model, model, self._set_by, who)
        if problem:
            raise FailedPrecondition(problem, field="model")

    def agree_on_layout(self, hello: worker_pb2.WorkerHello) -> None:
        layout = hello.layout
        if layout.hash_scheme != block_hash.SCHEME:
            raise FailedPrecondition(
                f"layout.hash_scheme: the scheduler has {block_hash.SCHEME!r}, worker {hello.worker_id} has "
                f"{layout.hash_scheme!r}",
                field="layout.hash_scheme",
            )
        if self.layout is None:
            self.layout = layout
        elif layout.block_size != self.layout.block_size:
            raise FailedPrecondition(
                f"layout.block_size: the cluster has {self.layout.block_size}, worker {hello.worker_id} has "
                f"{layout.block_size}",
                field="layout.block_size",
            )

    def agree_on_logprobs(self, hello: worker_pb2.WorkerHello) -> None:
        """A sequence that moves must not go on with numbers of another meaning."""
        mode = hello.logprobs_mode or RAW_LOGPROBS
        self.logprobs_mode = self.logprobs_mode or mode
        if mode != self.logprobs_mode:
            raise FailedPrecondition(
                f"logprobs_mode: the cluster has {self.logprobs_mode}, worker {hello.worker_id} has {mode}",
                field="logprobs_mode",
            )

    def agree_on_invariance(self, hello: worker_pb2.WorkerHello) -> None:
        """What holds to the bit must hold wherever a sequence is computed."""
        if self.batch_invariant is None:
            self.batch_invariant = hello.batch_invariant
        if hello.batch_invariant != self.batch_invariant:
            raise FailedPrecondition(
                f"batch_invariant: the cluster has {_on(self.batch_invariant)}, worker {hello.worker_id} has "
                f"{_on(hello.batch_invariant)}",
                field="batch_invariant",
            )


def _on(value: bool) -> str:
    return "on" if value else "off"


def check_sizes(hello: worker_pb2.WorkerHello) -> None:
    """What a worker must have to be of any use."""
    minimum = {"num_blocks": 2, "max_num_seqs": 1, "max_num_batched_tokens": hello.max_num_seqs, "max_model_len": 2}
    for name, least in minimum.items():
        value = getattr(hello, name)
        if value < least:
            raise FailedPrecondition(
                f"{name}: worker {hello.worker_id} has {value}, needs at least {least}", field=name
            )
    if hello.layout.block_size < 1:
        raise FailedPrecondition(f"layout.block_size: worker {hello.worker_id} has 0", field="layout.block_size")
