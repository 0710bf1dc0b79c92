"""Settings of a frontend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from quire.shared.security.tls_files import NO_TLS, Tls
from quire.shared.settings.base import Settings
from quire.shared.settings.connection_limits import ConnectionLimits
from quire.shared.settings.request_limits import RequestLimits
from quire.shared.settings.stream_limits import StreamLimits


class FrontendSettings(Settings):
    """Text in, text out."""

    model: str = Field(..., description="Hugging Face folder with tokenizer.json, GGUF file, or ORG/NAME on a hub")
    revision: str = Field("", description="branch, tag or commit of a model that is called by its name on a hub")
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
        False, description="share the ports with other frontends and with the launcher, which holds them (SO_REUSEPORT)"
    )
    schedulers: tuple[str, ...] = Field(
        ("127.0.0.1:50052",), description="HOST:PORT of schedulers; with redis, those found there are dialled as well"
    )
    redis: str = Field(
        "none", description="URL of the prefix index and registry (redis://, rediss://, unix://); or none"
    )
    redis_password_file: str = Field("", description="file with the password of Redis; empty: as in the URL")
    redis_namespace: str = Field("quire", min_length=1, description="keeps clusters that share one Redis apart")
    max_inflight_requests: int = Field(
        1024,
        ge=1,
        description="requests being worked on; more are refused (429); with keys of several tenants "
        "an eighth is kept for tenants that have few",
    )
    max_queued_tokens: int = Field(
        4_000_000, ge=1, description="prompt and output tokens promised to requests in flight; more are refused (429)"
    )
    max_prompts_per_request: int = Field(1024, ge=1, description="prompts in one completions call, samples counted")
    max_request_bytes: int = Field(
        16 * 2**20, ge=1, description="largest body of an HTTP call and message of a gRPC call; more is refused (413)"
    )
    limits: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="bounds on the parts of a request other than the defaults, NAME=VALUE,...: "
        + ", ".join(RequestLimits.names()),
    )
    connections: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="bounds on connections other than the defaults, NAME=VALUE,...: "
        + ", ".join(ConnectionLimits.names()),
    )
    strict_request_fields: bool = Field(
        False,
        description="refuse every field of a body that is not known (400); otherwise only those that look misspelt, "
        "and the rest is ignored and counted in quire_unknown_request_fields_total",
    )
    retry_after_ms: int = Field(1000, ge=1, description="retry hint given with a refusal, milliseconds")
    unavailable_after_s: float = Field(
        30.0,
        ge=0,
        description="how long a request waits for a worker when there is none, seconds; "
        "up to five times as long while a scheduler comes back again and again",
    )
    worker_start_s: float = Field(
        0.0,
        ge=0,
        description="the same while a scheduler is there and has no worker, where that is longer: where workers are "
        "scaled to none, more than the first one takes to start",
    )
    health_awaits_worker: bool = Field(
        False,
        description="answer /health and grpc.health.v1 with serving only after the first worker has come, so that its "
        "adapters are listed by then; otherwise a scheduler is enough, where requests wait for a worker",
    )
    response_store_mb: int = Field(
        64,
        ge=0,
        description="what /v1/responses remembers for later calls, MiB; 0: nothing, and nothing can be asked for",
    )
    stream_retention_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="how long a resumable stream may go on without a reader, and is kept once it has ended, seconds; "
        "0: none is offered",
    )
    stream_limits: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="bounds on resumable streams other than the defaults, NAME=VALUE,...: "
        + ", ".join(StreamLimits.names()),
    )
    batch_folder: str = Field(
        "",
        description="folder for /v1/files and /v1/batches, which all frontends of a cluster share; empty: they are "
        "not offered",
    )
    batch_concurrency: int = Field(32, ge=1, description="calls of batches that a frontend has under way at once")
    batch_file_mb: int = Field(200, ge=1, description="largest file of /v1/files, MiB")
    batch_store_mb: int = Field(4096, ge=1, description="all files of /v1/files together, MiB")
    api_key: str = Field(
        "", description="key that clients show, for everybody; empty: none", json_schema_extra={"secret": True}
    )
    api_keys: str = Field(
        "", description="file with keys of tenants, or redis: the hash NAMESPACE:api_keys there; empty: none"
    )
    open_paths: tuple[Literal["/metrics", "/load", "/version"], ...] = Field(
        (), description="besides /health, what needs no key where there are keys: /metrics, /load, /version"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="origins whose pages browsers may let call this server; *: all; empty: none"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="names that clients may reach this server by (the Host header), besides localhost and its own "
        "address; *: any. Without it any name is taken, but for a server on loopback without API keys",
    )
    root_path: str = Field(
        "",
        pattern=r"^((/[A-Za-z0-9._~-]+)+)?$",
        description="path under which a proxy shows the HTTP port, as in /llm; the server answers with and without it",
    )
    stream_interval: int = Field(
        1, ge=1, description="tokens of a sample between messages of a stream; requests may ask for more"
    )
    sse_keepalive_s: float = Field(
        15.0,
        ge=0,
        description="silence in a stream of HTTP after which a keep-alive is sent, seconds; 0: none is sent",
    )
    chat_template: str = Field(
        "", description="file with a Jinja chat template, or the name of one of the model's; default: the model's own"
    )
    control_tokens: Literal["none", "raw_prompts", "everywhere"] = Field(
        "raw_prompts",
        description="where a request that spells a control token gets one: none, raw_prompts (of completions and of "
        "Generate, as text), or everywhere (in messages, too: whoever writes in them can end their turn)",
    )
    tool_call_parser: str = Field(
        "auto", description="how the model writes tool calls: a parser's name, none, or auto (by its chat template)"
    )
    enable_auto_tool_choice: bool = Field(True, description="let requests with tools leave the choice to the model")
    reasoning_parser: str = Field(
        "auto", description="how the model sets reasoning apart: a parser's name, none, or auto (by its chat template)"
    )
    tokenizer_threads: int = Field(
        0, ge=0, description="threads that tokenize long prompts; 0: half as many as there are processors, at most 2"
    )

    @field_validator("limits")
    @classmethod
    def _known(cls, limits: dict[str, int]) -> dict[str, int]:
        for name in limits:
            if name not in RequestLimits.names():
                raise ValueError(f"there is no limit {name!r}; there are {', '.join(RequestLimits.names())}")
        return limits

    @field_validator("connections")
    @classmethod
    def _known_connections(cls, limits: dict[str, int]) -> dict[str, int]:
        for name in limits:
            if name not in ConnectionLimits.names():
                raise ValueError(f"there is no bound {name!r}; there are {', '.join(ConnectionLimits.names())}")
        return limits

    @field_validator("stream_limits")
    @classmethod
    def _known_stream_limits(cls, limits: dict[str, int]) -> dict[str, int]:
        for name in limits:
            if name not in StreamLimits.names():
                raise ValueError(f"there is no bound {name!r}; there are {', '.join(StreamLimits.names())}")
        return limits

    @field_validator("root_path")
    @classmethod
    def _beside_the_api(cls, path: str) -> str:
        if path == "/v1":
            raise ValueError("/v1 is where the API itself begins; a root path is what stands in front of it")
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
