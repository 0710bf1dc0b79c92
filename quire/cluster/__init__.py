"""A cluster on this machine: separate processes, supervised and restarted."""

from quire.cluster.cluster import Cluster, StartAborted
from quire.cluster.options import ClusterOptions

__all__ = ["Cluster", "ClusterOptions", "StartAborted"]
