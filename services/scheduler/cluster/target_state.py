"""Target state of all workers of a cluster: weights and sleep. Workers that differ from it are outdated."""

from __future__ import annotations

from collections.abc import Iterable

from quire.services.scheduler.replicas.replica import Replica
from quire.services.scheduler.values.weights import AT_START
from quire.shared.logs import logger
from quire.shared.pb.common.v1 import model_pb2

log = logger("operations")

WEIGHTS, KV_CACHE = "weights", "kv_cache"
# Update numbers are Unix times in milliseconds, of a machine whose clock may be wrong by days; only values that leave
# no room for later updates are rejected.
MAX_UPDATE = 1 << 62
MAX_NAME_LENGTH = 4096
ALL = frozenset({WEIGHTS, KV_CACHE})


class TargetState:
    """Target weights and sleep level. Of several weights, those of the greatest update number are the target: an update
    that one worker has was decided on."""

    def __init__(self) -> None:
        self.weights = model_pb2.WeightsIdentity(version=AT_START)
        self.asleep: frozenset[str] = frozenset()
        self.sleep_level = 0
        self._is_sleep_set = False  # whether the sleep target is known, from an operator or from the first worker

    def on_worker_attached(self, replica: Replica, others: Iterable[Replica]) -> None:
        """Handles a new worker. A scheduler that has just started takes the target from it; a worker that differs from
        the target is outdated, which does not end its sequences."""
        if not self._is_sleep_set and replica.asleep:
            log.info("adopting the sleep state of a worker", worker=replica.id, level=replica.sleep_level)
        if not self._is_sleep_set:
            self.set_sleep(replica.asleep, replica.sleep_level)
        if replica.weights.update > self.weights.update:
            log.info("adopting the weights of a worker", worker=replica.id, version=replica.weights.version)
            self.weights = replica.weights
            for other in others:
                self.update_outdated(other)
        else:
            self.update_outdated(replica)

    def set_sleep(self, asleep: frozenset[str], level: int) -> None:
        """Sets what has to sleep. Workers that attach are brought to this state, also the first one after a start of
        the scheduler."""
        self.asleep, self.sleep_level = asleep, level if asleep else 0
        self._is_sleep_set = True

    def clear_sleep(self, tags: frozenset[str]) -> None:
        """Removes tags from the sleep target. After a start of the scheduler the target is unknown, and only waking
        everything sets it."""
        if self._is_sleep_set or tags == ALL:
            self.set_sleep(self.asleep - tags, self.sleep_level)

    def adopt_if_newer(self, weights: model_pb2.WeightsIdentity, replicas: Iterable[Replica]) -> None:
        """Adopts the weights of another scheduler if this one has missed their update. Ignores older or invalid
        ones."""
        sizes = len(weights.version), len(weights.path)
        if not self.weights.update < weights.update <= MAX_UPDATE or max(sizes) > MAX_NAME_LENGTH:
            return
        log.info("adopting the weights of another scheduler", version=weights.version)
        self.weights = weights
        for replica in replicas:
            self.update_outdated(replica)

    def has_right_weights(self, replica: Replica) -> bool:
        return (replica.weights.update, replica.weights.version) == (self.weights.update, self.weights.version)

    def update_outdated(self, replica: Replica) -> None:
        """Compares a worker with the target and sets its `outdated`; wakes the reconciler and logs a warning if it
        differs. Weights that sleep are compared once they are awake."""
        has_right_weights = WEIGHTS in self.asleep or self.has_right_weights(replica)
        replica.outdated = not has_right_weights or replica.asleep != self.asleep
        if replica.outdated:
            log.warning(
                "a worker differs from the target state of its cluster and gets no sequences until it is updated",
                worker=replica.id,
                version=replica.weights.version,
                wanted=self.weights.version,
                asleep=sorted(replica.asleep),
            )
            replica.became_outdated.set()
