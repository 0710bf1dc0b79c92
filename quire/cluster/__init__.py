"""A whole cluster on this machine: real, separate processes, watched and restarted."""

from quire.cluster.cluster import Cluster, GivenUp
from quire.cluster.options import ClusterOptions

__all__ = ["Cluster", "ClusterOptions", "GivenUp"]
