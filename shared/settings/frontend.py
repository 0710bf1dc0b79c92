"""Settings of a frontend."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from quire.shared.media.modalities import MODALITIES
from quire.shared.security.tls_files import NO_TLS, Tls
from quire.shared.settings.base import Settings
from quire.shared.settings.connection_limits import ConnectionLimits
from quire.shared.settings.request_limits import RequestLimits
from quire.shared.settings.stream_limits import StreamLimits


class FrontendSettings(Settings):
    """Settings of the frontend, which tokenizes requests and streams text back to clients."""

    model: str = Field(..., description="Hugging Face folder with tokenizer.json, GGUF file, or ORG/NAME on a hub")
    revision: str = Field("", description="branch, tag or commit of a model on a hub")
    served_model_name: str = Field("", description="name that requests use; default: the folder's name")
    served_model_aliases: tuple[str, ...] = Field((), description="further names of the model that requests may use")
    grpc_port: int = Field(50051, ge=0, le=65535, description="port of the gRPC services; 0: any free one")
    http_port: int = Field(
        8000, ge=0, le=65535, description="port of the OpenAI API, /health and /metrics; 0: any free one"
    )
    metrics_port: int = Field(
        -1, ge=-1, le=65535, description="port of a second /metrics, without keys; 0: any free one; -1: none"
    )
    metrics_host: str = Field("127.0.0.1", description="address that metrics_port listens on")
    client_tls: Tls = Field(
        NO_TLS, description="TLS for clients, on the gRPC and the HTTP port: cert=FILE,key=FILE,ca=FILE,clients=require"
    )
    share_ports: bool = Field(
        False, description="share the ports with other frontends and the launcher, which reserves them (SO_REUSEPORT)"
    )
    schedulers: tuple[str, ...] = Field(
        ("127.0.0.1:50052",), description="HOST:PORT of schedulers; with redis, schedulers registered there are added"
    )
    redis: str = Field(
        "none", description="URL of the prefix index and registry (redis://, rediss://, unix://); or none"
    )
    redis_password_file: str = Field("", description="file with the password of Redis; empty: as in the URL")
    redis_namespace: str = Field("quire", min_length=1, description="separates clusters that share one Redis")
    max_inflight_requests: int = Field(
        1024,
        ge=1,
        description="requests in flight; more are refused (429); with keys of several tenants "
        "an eighth is reserved for tenants with few requests",
    )
    max_queued_tokens: int = Field(
        4_000_000, ge=1, description="prompt and output tokens of requests in flight; more are refused (429)"
    )
    max_prompts_per_request: int = Field(1024, ge=1, description="prompts times samples in one completions call")
    max_request_bytes: int = Field(
        16 * 2**20, ge=1, description="largest HTTP body and gRPC message; larger ones are refused (413)"
    )
    limits: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="limits for the parts of a request, NAME=VALUE,...: " + ", ".join(RequestLimits.names()),
    )
    connections: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="limits for connections, NAME=VALUE,...: " + ", ".join(ConnectionLimits.names()),
    )
    strict_request_fields: bool = Field(
        False,
        description="refuse unknown fields of a body (400); otherwise only those that look misspelt, "
        "and others are ignored and counted in quire_unknown_request_fields_total",
    )
    retry_after_ms: int = Field(1000, ge=1, description="retry hint sent with a refusal, milliseconds")
    unavailable_after_s: float = Field(
        30.0,
        ge=0,
        description="how long a request waits for a worker when there is none, seconds; "
        "up to five times as long while a scheduler reconnects repeatedly",
    )
    worker_start_s: float = Field(
        0.0,
        ge=0,
        description="the same while a scheduler is connected but has no worker, if longer: where workers are "
        "scaled to zero, more than the first one takes to start",
    )
    health_awaits_worker: bool = Field(
        False,
        description="report healthy (/health and grpc.health.v1) only after the first worker has attached, so that its "
        "adapters are listed by then; otherwise a scheduler suffices, where requests wait for a worker",
    )
    response_store_mb: int = Field(
        64,
        ge=0,
        description="memory for stored responses of /v1/responses, MiB; 0: responses are not stored",
    )
    stream_retention_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="how long a resumable stream runs without a reader, and is kept after its end, seconds; "
        "0: disabled",
    )
    stream_limits: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="limits for resumable streams, NAME=VALUE,...: " + ", ".join(StreamLimits.names()),
    )
    batch_folder: str = Field(
        "",
        description="folder for /v1/files and /v1/batches, shared by all frontends of a cluster; empty: disabled",
    )
    batch_concurrency: int = Field(32, ge=1, description="concurrent requests of batches per frontend")
    batch_file_mb: int = Field(200, ge=1, description="largest file of /v1/files, MiB")
    batch_store_mb: int = Field(4096, ge=1, description="all files of /v1/files together, MiB")
    api_key: str = Field("", description="API key for all clients; empty: none", json_schema_extra={"secret": True})
    api_keys: str = Field(
        "", description="file with API keys of tenants, or redis: the hash NAMESPACE:api_keys there; empty: none"
    )
    open_paths: tuple[Literal["/metrics", "/load", "/version"], ...] = Field(
        (), description="paths besides /health that need no API key: /metrics, /load, /version"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="origins that browsers may send requests from (CORS); *: all; empty: none"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="accepted names in the Host header, besides localhost and its own "
        "address; *: any. Empty: any name, except for a server on loopback without API keys",
    )
    root_path: str = Field(
        "",
        pattern=r"^((/[A-Za-z0-9._~-]+)+)?$",
        description="path prefix that a proxy adds to the HTTP port, such as /llm; requests without it work, too",
    )
    stream_interval: int = Field(1, ge=1, description="tokens per message of a stream; requests may ask for more")
    sse_keepalive_s: float = Field(
        15.0,
        ge=0,
        description="idle time of an HTTP stream after which a keep-alive is sent, seconds; 0: never",
    )
    chat_template: str = Field(
        "", description="file with a Jinja chat template, or the name of one of the model's; default: the model's own"
    )
    control_tokens: Literal["none", "raw_prompts", "everywhere"] = Field(
        "raw_prompts",
        description="where text that spells a control token becomes one: none, raw_prompts (of completions and of "
        "Generate, as text), or everywhere (also in messages, whose authors can then end their turn)",
    )
    tool_call_parser: str = Field(
        "auto", description="parser for tool calls: a name, none, or auto (by the chat template)"
    )
    enable_auto_tool_choice: bool = Field(
        True, description="allow tool_choice auto: the model decides whether to call tools"
    )
    reasoning_parser: str = Field(
        "auto", description="parser for reasoning sections: a name, none, or auto (by the chat template)"
    )
    tokenizer_threads: int = Field(
        0, ge=0, description="threads for tokenizing long prompts; 0: half the number of processors, at most 2"
    )

    language_model_only: bool = Field(
        False, description="take text only, also if the model has an encoder of media, which is not loaded then"
    )
    limit_mm_per_prompt: dict[str, NonNegativeInt] = Field(
        default_factory=dict,
        description="most items of each modality in one prompt, image=N, video=N, audio=N; default: 256 each",
    )
    allowed_local_media_path: str = Field(
        "", description="folder whose files requests may name by file: URLs, as pictures, videos or sound; empty: none"
    )
    allowed_media_domains: tuple[str, ...] = Field(
        (),
        description="host names from which media may be fetched over http(s); *: any with public addresses only; "
        "empty: none",
    )
    allowed_media_networks: tuple[str, ...] = Field(
        (), description="networks (CIDR) with private addresses from which media may be fetched all the same"
    )
    mm_processor_cache_gb: float = Field(
        1.0, ge=0, description="memory for processed media that later requests may use again, GiB"
    )
    max_media_gb: float = Field(
        4.0, gt=0, description="memory for processed media of requests in flight, GiB; more are refused (429)"
    )
    media_processes: int = Field(
        0, ge=0, description="processes that decode media; 0: half the number of processors, at most 4"
    )
    media_host: str = Field(
        "",
        description="address that the service for workers, who fetch pixels there, listens on; default: host, or only "
        "this machine if there is neither a cluster secret nor tls with clients=require",
    )
    media_port: int = Field(0, ge=0, le=65535, description="port of that service; 0: any free one")

    @field_validator("allowed_media_networks")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        """Checks that the networks are written in CIDR form; raises ValueError."""
        for network in networks:
            ipaddress.ip_network(network)
        return networks

    @field_validator("limit_mm_per_prompt")
    @classmethod
    def _known_modalities(cls, limits: dict[str, int]) -> dict[str, int]:
        """Checks that the modalities exist; raises ValueError."""
        for name in limits:
            if name not in MODALITIES:
                raise ValueError(f"unknown modality {name!r}; known: {', '.join(MODALITIES)}")
        return limits

    @field_validator("limits")
    @classmethod
    def _known(cls, limits: dict[str, int]) -> dict[str, int]:
        """Checks that the names of request limits exist; raises ValueError."""
        for name in limits:
            if name not in RequestLimits.names():
                raise ValueError(f"unknown limit {name!r}; known limits: {', '.join(RequestLimits.names())}")
        return limits

    @field_validator("connections")
    @classmethod
    def _known_connections(cls, limits: dict[str, int]) -> dict[str, int]:
        """Checks that the names of connection limits exist; raises ValueError."""
        for name in limits:
            if name not in ConnectionLimits.names():
                raise ValueError(f"unknown limit {name!r}; known limits: {', '.join(ConnectionLimits.names())}")
        return limits

    @field_validator("stream_limits")
    @classmethod
    def _known_stream_limits(cls, limits: dict[str, int]) -> dict[str, int]:
        """Checks that the names of stream limits exist; raises ValueError."""
        for name in limits:
            if name not in StreamLimits.names():
                raise ValueError(f"unknown limit {name!r}; known limits: {', '.join(StreamLimits.names())}")
        return limits

    @field_validator("root_path")
    @classmethod
    def _beside_the_api(cls, path: str) -> str:
        if path == "/v1":
            raise ValueError("/v1 is part of the API itself; a root path is the prefix before it")
        return path

    @property
    def connection_limits(self) -> ConnectionLimits:
        return ConnectionLimits(**self.connections)

    @property
    def parsed_stream_limits(self) -> StreamLimits:
        return StreamLimits(**self.stream_limits)

    @property
    def request_limits(self) -> RequestLimits:
        return RequestLimits(**self.limits)
