"""Intervals and time limits of a frontend's background work, none of which an operator needs to set."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.services.frontend.access.sources import RELOAD_S
from quire.services.frontend.directory.directory import INTERVAL_S
from quire.services.frontend.directory.prefix_lookup import DEFAULT_TIMING as LOOKUP_TIMING
from quire.services.frontend.directory.prefix_lookup import LookupTiming
from quire.services.frontend.grpc_edge.services.file_service import STALLED_S
from quire.services.frontend.offline.runner import POLL_S
from quire.services.frontend.scheduler_client.connection import DEFAULT_TIMING as CONNECTION_TIMING
from quire.services.frontend.scheduler_client.connection import ConnectionTiming
from quire.shared.process.liveness import LOOK_S


@dataclass(frozen=True, slots=True)
class FrontendTiming:
    """Times in seconds."""

    connections: ConnectionTiming = CONNECTION_TIMING
    connection_attempt_s: float = 60.0  # until the process counts as dead; an attempt takes at most 10 s
    liveness_check_s: float = LOOK_S
    registry_poll_s: float = INTERVAL_S
    prefix_lookup: LookupTiming = LOOKUP_TIMING
    key_reload_s: float = RELOAD_S  # of keys in Redis
    batch_poll_s: float = POLL_S
    stalled_upload_s: float = STALLED_S
    stream_clock: Callable[[], float] = time.monotonic  # of the retention of resumable streams


DEFAULT_TIMING = FrontendTiming()
