"""Metrics of transcriptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from quire.shared.metrics.histogram import Histogram

FACTOR_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class SoundStatus(NamedTuple):
    """State of a frontend's transcriptions."""

    held_bytes: int  # memory of those in progress
    waiting: int  # that wait for memory
    sessions: int  # of /v1/realtime


class SoundMetrics:
    """Metrics of a frontend whose model transcribes."""

    def __init__(self, registry: CollectorRegistry, status: Callable[[], SoundStatus]) -> None:
        """Registers the metrics. `status`: reads the gauges."""
        self.audio_seconds = self._counter(
            registry, "quire_frontend_audio_seconds", "Length of the sound that was transcribed"
        )
        self.silence_seconds = self._counter(
            registry, "quire_frontend_audio_silence_seconds", "Part of it in which nothing is said"
        )
        self.fallbacks = self._counter(
            registry,
            "quire_frontend_transcription_fallbacks",
            "Segments whose text was doubtful and is that of a higher temperature",
        )
        self.real_time_factor = Histogram(
            "quire_frontend_transcription_real_time_factor",
            "Time of a transcription, divided by the length of its sound",
            buckets=FACTOR_BUCKETS,
            registry=registry,
        )
        for name, text, read in (
            ("transcription_bytes", "Memory of transcriptions in progress", lambda: status().held_bytes),
            ("transcriptions_waiting", "Transcriptions that wait for memory", lambda: status().waiting),
            ("realtime_sessions", "Sessions of /v1/realtime that are open", lambda: status().sessions),
        ):
            Gauge(f"quire_frontend_{name}", text, registry=registry).set_function(read)

    @staticmethod
    def _counter(registry: CollectorRegistry, name: str, text: str) -> Counter:
        return Counter(name, text, registry=registry)

    def observe(
        self, sound_s: float, spent_s: float, spoken: Sequence[tuple[float, float]], num_fallbacks: int
    ) -> None:
        """Records a transcription of `sound_s` that took `spent_s`. `spoken`: start and end of its segments."""
        self.audio_seconds.inc(sound_s)
        self.silence_seconds.inc(max(0.0, sound_s - sum(end - start for start, end in spoken)))
        self.fallbacks.inc(num_fallbacks)
        if sound_s > 0:
            self.real_time_factor.observe(spent_s / sound_s)
