"""Settings of a scheduler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from quire.shared.settings.base import Settings


class SchedulerSettings(Settings):
    """Settings of the scheduler, which decides which sequences run next, with how many tokens, in which KV blocks,
    on which worker."""

    grpc_port: int = Field(50052, ge=0, le=65535, description="port for frontends and workers; 0: any free one")
    share_ports: bool = Field(
        False, description="share the gRPC port with the launcher, which reserves it (SO_REUSEPORT)"
    )
    metrics_port: int = Field(9102, ge=0, le=65535, description="port of /metrics; 0: any free one")
    scheduling_policy: str = Field(
        "fcfs",
        description="order of waiting sequences: fcfs (arrival), priority, fair (between tenants, by tokens), or the "
        "name of an installed package's",
    )
    priority_aging_s: float = Field(
        0.0, ge=0, description="waiting time that raises a sequence's priority by one level, seconds; 0: never"
    )
    tenant_weights: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="shares of tenants under the fair policy, NAME=WEIGHT,...; 1 if not named"
    )
    redis: str = Field(
        "none", description="URL of the prefix index and registry (redis://, rediss://, unix://); or none"
    )
    redis_password_file: str = Field("", description="file with the password of Redis; empty: as in the URL")
    redis_namespace: str = Field("quire", min_length=1, description="keeps clusters that share one Redis apart")
    placement: Literal["prefix", "least_loaded", "round_robin"] = Field(
        "prefix",
        description="how a sequence's worker is chosen: prefix: fewest tokens to compute given cached prefixes",
    )
    max_worker_losses: int = Field(
        3,
        ge=1,
        description="number of lost workers after which a sequence that ran on them is ended instead of retried",
    )
    enable_prefix_caching: bool = Field(True, description="reuse the KV of common prefixes")
    prefix_grain: int = Field(
        16, ge=0, description="minimum common tokens for which a partial block is copied; 0: only whole blocks"
    )
    kv_offloading_policy: Literal["lru", "arc"] = Field(
        "lru", description="eviction policy of host memory and disk; arc: prompts used only once do not evict others"
    )
    kv_offloading_store_threshold: int = Field(
        0, ge=0, description="number of prompts that must use a block before it is offloaded; 0 and 1: offload all"
    )
    kv_handover: Literal["auto", "always", "never"] = Field(
        "auto", description="fetch prefixes from another worker that holds them; auto: if faster than computing them"
    )
    prefill_threshold: int = Field(
        256, ge=1, description="minimum prompt tokens to compute for which a prefill worker is used"
    )
    max_num_batched_tokens: int = Field(0, ge=0, description="token budget of a step; 0: the worker's own limit")
    max_num_seqs: int = Field(0, ge=0, description="sequences running at a time on a worker; 0: the worker's own limit")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="most tokens of one prompt in a step while others run; 0: the whole budget"
    )
    max_stream_gap_ms: float = Field(
        0.0,
        ge=0,
        description="longest gap between tokens of running streams while prompts are computed in the same steps, "
        "milliseconds; prompts get as many tokens of a step as that permits; 0: no limit",
    )
    watermark: float = Field(
        0.01, ge=0, lt=1, description="share of KV blocks kept free at admission, so that running sequences can grow"
    )
    max_steps_in_flight: int = Field(
        0, ge=0, le=4, description="plans in flight per worker; 0: derived from step times"
    )
    step_deadline_s: float = Field(30.0, gt=0, description="step time after which a worker is considered lost, seconds")
    heartbeat_interval_ms: int = Field(1000, ge=50, description="interval of heartbeats on idle sessions, milliseconds")
    stat_loggers: tuple[str, ...] = Field(
        ("log",), description="loggers of worker statistics: log (a line), or names from installed packages"
    )
    stats_interval_s: float = Field(10.0, gt=0, description="stat logger interval, seconds")
    max_waiting: int = Field(16384, ge=1, description="maximum number of waiting sequences; more are refused")
