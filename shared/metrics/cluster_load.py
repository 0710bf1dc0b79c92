"""Load of the cluster and adapters, for gateways that choose among frontends.

These are the metrics of the model server protocol of the Gateway API's inference extension. Schedulers report the
same values for each worker under vLLM's names; frontends use different names, so that sums over all services count
nothing twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

GAUGES = {
    "num_requests_waiting": ("requests_waiting", "Requests waiting in the cluster that this frontend serves"),
    "num_requests_running": ("requests_running", "Requests running in the cluster that this frontend serves"),
    "kv_cache_usage_perc": (
        "kv_cache_usage",
        "Share of KV blocks in use in the cluster that this frontend serves, 0 to 1",
    ),
}
ADAPTERS = "vllm:lora_requests_info"
WORKERS = "quire_frontend_cluster_workers"


class ClusterLoadCollector(Collector):
    """Collects the load of the cluster. `load`: values by vLLM's names, as in GAUGES; `adapters`: names that
    requests can use; `num_workers`: workers that accept requests."""

    def __init__(
        self,
        load: Callable[[], Mapping[str, float]],
        adapters: Callable[[], Collection[str]],
        num_workers: Callable[[], int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._load = load
        self._adapters = adapters
        self._num_workers = num_workers
        self._clock = clock
        self._known: tuple[str, ...] = ()
        self._changed_s = 0.0

    def collect(self) -> Iterator[Metric]:
        """Yields the gauges of the cluster's load, and the adapters' names as labels of the time of their last
        change, which is recorded here."""
        load = self._load()
        for field, (name, text) in GAUGES.items():
            yield GaugeMetricFamily(f"quire_frontend_cluster_{name}", text, value=load[field])
        text = "Workers that accept requests in the cluster that this frontend serves"
        yield GaugeMetricFamily(WORKERS, text, value=self._num_workers())
        found = tuple(sorted(self._adapters()))
        if found != self._known:
            self._known, self._changed_s = found, self._clock()
        family = GaugeMetricFamily(
            ADAPTERS,
            "Time of the last change of the available adapters, Unix seconds; their names as labels",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        if found:  # all are loaded; none is waiting
            family.add_metric((str(len(found)), ",".join(found), ""), self._changed_s)
        yield family
