"""A whole cluster on this machine: real, separate processes, watched and restarted."""

from quire.cluster.cluster import Cluster, StartAborted
from quire.cluster.options import ClusterOptions

__all__ = ["Cluster", "ClusterOptions", "StartAborted"]
