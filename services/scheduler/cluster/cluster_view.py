"""Cluster status for frontends, and gauges for metrics."""

from __future__ import annotations

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.shared.metrics.scheduler import ClusterGauges
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.pb.worker.v1 import worker_pb2


def view_of(cluster: WorkerCluster, scheduling_policy: str) -> pb.ClusterView:
    """Returns the cluster status that is sent to frontends: agreed properties, load, and what workers that accept
    sequences have in common."""
    accepting = [r for r in cluster.replicas.values() if r.takes_sequences]
    waiting_tokens = sum(sequence.num_tokens for sequence in cluster.assignments.unassigned)
    blocks = [r.core.kv.use for r in accepting]
    num_blocks = sum(use.total for use in blocks)
    adapters = cluster.adapters.offered if accepting else {}
    terms, weights = cluster.terms, cluster.target_state.weights
    return pb.ClusterView(
        model=terms.model if terms.layout is not None else None,
        layout=terms.layout,
        max_model_len=max((r.core.limits.max_model_len for r in accepting), default=0),
        num_workers=len(accepting),
        num_waiting=cluster.num_waiting,
        num_running=cluster.num_running,
        num_waiting_tokens=waiting_tokens + sum(r.core.num_waiting_tokens for r in accepting),
        draining=cluster.draining,
        scheduling_policy=scheduling_policy,
        max_logprobs=min((r.hello.sampling.max_logprobs for r in accepting), default=0),
        logits_processors=_common([r.hello for r in accepting]),
        structured_output_backends=terms.grammar_libraries,
        weights=weights if weights.update else None,
        media_modalities=sorted({name for r in cluster.replicas.values() for name in r.hello.encoder.modalities}),
        adapters=adapters,
        adapter_digests=b"".join(adapters.values()),
        kv_cache_usage=round(sum(use.used for use in blocks) / num_blocks, 3) if num_blocks else 0.0,
    )


def gauges_of(cluster: WorkerCluster) -> ClusterGauges:
    """Returns the figures for the metrics page; counts unowned blocks, which walks all block tables."""
    layout, replicas = cluster.terms.layout, cluster.replicas.values()
    return ClusterGauges(
        deferred=len(cluster.assignments.unassigned) + sum(r.core.grammars.num_blocked for r in replicas),
        paused=cluster.is_paused,
        unowned_blocks=sum(replica.core.kv.num_unowned() for replica in replicas),
        block_size=layout.block_size if layout is not None else 0,
        num_kv_groups=max((replica.core.kv.num_groups for replica in replicas), default=1),
        max_model_len=max((replica.core.limits.max_model_len for replica in replicas), default=0),
        encode_workers=len(cluster.encoders.workers),
        encoding_items=cluster.encoders.num_encoding,
        fetching_items=cluster.encoders.num_fetching,
    )


def _common(hellos: list[worker_pb2.WorkerHello]) -> list[str]:
    """Returns the logits processors that all workers have."""
    return sorted(set.intersection(*(set(hello.sampling.logits_processors) for hello in hellos))) if hellos else []
