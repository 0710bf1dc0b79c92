"""Settings of a scheduler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from quire.shared.settings.base import Settings


class SchedulerSettings(Settings):
    """Who runs next, with how many tokens, in which KV blocks, on which worker."""

    grpc_port: int = Field(50052, ge=0, le=65535, description="port that frontends and workers dial; 0: any free one")
    share_ports: bool = Field(False, description="let the launcher, which holds the gRPC port, share it (SO_REUSEPORT)")
    metrics_port: int = Field(9102, ge=0, le=65535, description="port of /metrics; 0: any free one")
    scheduling_policy: str = Field(
        "fcfs",
        description="order of waiting sequences: fcfs (arrival), priority, fair (between tenants, by tokens), or the "
        "name of an installed package's",
    )
    priority_aging_s: float = Field(
        0.0, ge=0, description="waited so long, a sequence is one level of priority more urgent, seconds; 0: never"
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
        description="which worker a sequence goes to: least left to compute with its cached prefix, or simpler",
    )
    max_worker_losses: int = Field(
        3, ge=1, description="a sequence that was on so many workers when they were lost is ended, not tried again"
    )
    enable_prefix_caching: bool = Field(True, description="reuse the KV of equal prefixes")
    prefix_grain: int = Field(
        16, ge=0, description="tokens of a block from which on it is copied for an equal prefix; 0: only whole blocks"
    )
    kv_offloading_policy: Literal["lru", "arc"] = Field(
        "lru", description="what host memory and disk lose first; arc: prompts that never return push out no others"
    )
    kv_offloading_store_threshold: int = Field(
        0, ge=0, description="blocks are kept below the device once so many prompts had them; 0 and 1: all blocks are"
    )
    kv_handover: Literal["auto", "always", "never"] = Field(
        "auto", description="prefixes that another worker holds are fetched from it; auto: if that beats computing them"
    )
    prefill_threshold: int = Field(
        256, ge=1, description="prompt tokens to be computed from which on a worker with the role prefill gets them"
    )
    max_num_batched_tokens: int = Field(0, ge=0, description="token budget of a step; 0: the worker's own limit")
    max_num_seqs: int = Field(0, ge=0, description="sequences running at a time on a worker; 0: the worker's own limit")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="most tokens of one prompt in a step while others run; 0: the whole budget"
    )
    max_stream_gap_ms: float = Field(
        0.0,
        ge=0,
        description="longest gap that running streams should have while prompts are computed beside them, which then "
        "get as many tokens of a step as that allows, milliseconds; 0: as many as a step has",
    )
    watermark: float = Field(
        0.01, ge=0, lt=1, description="share of the blocks kept free at admission, so that running sequences can grow"
    )
    max_steps_in_flight: int = Field(
        0, ge=0, le=4, description="plans under way at a time on a worker; 0: by how long steps take"
    )
    step_deadline_s: float = Field(30.0, gt=0, description="a worker that takes longer for a step is given up, seconds")
    heartbeat_interval_ms: int = Field(
        1000, ge=50, description="how often idle sessions say they are alive, milliseconds"
    )
    stat_loggers: tuple[str, ...] = Field(
        ("log",), description="what is told of every worker's throughput: log (a line), names of installed packages'"
    )
    stats_interval_s: float = Field(10.0, gt=0, description="how often stat loggers are told, seconds")
    max_waiting: int = Field(16384, ge=1, description="sequences waiting; more are refused")
