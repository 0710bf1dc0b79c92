"""Loads settings and refuses unknown ones.

defaults < YAML file (section named after the service) < QUIRE_<SERVICE>_<FIELD> variables < flags
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger
from quire.shared.security.secret_file import SecretFile
from quire.shared.security.tls_files import NO_TLS, Tls

log = logger("settings")

AGREED = frozenset({"language_model_only"})  # settings of several services, which need the same value
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})
CONFIG_VARIABLE = "QUIRE_CONFIG"
SECRET_NAME = re.compile("KEY|SECRET|PASSWORD|TOKEN")  # names of variables whose values must not be printed
OTHER_VARIABLES = frozenset(
    {
        CONFIG_VARIABLE,
        "QUIRE_ADDRESS",
        "QUIRE_ADMIN_ADDRESS",
        "QUIRE_ADMIN_KEY_FILE",
        "QUIRE_API_KEY",
        "QUIRE_PARENT_PIPE",
        "QUIRE_TLS",
        "QUIRE_URL",
    }
)


class Settings(BaseModel):
    """Settings of all services. Subclasses add fields; every field's description is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(
        "", description="stable name of this process; default: role and host name, numbered from the second process on"
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all interfaces")
    advertise: str = Field(
        "",
        description="host name under which others reach this service; default: host, or this machine's name",
    )
    tls: Tls = Field(
        NO_TLS,
        description="TLS between services and of metrics: cert=FILE,key=FILE,ca=FILE,clients=require,server_name=NAME",
    )
    cluster_secret_file: str = Field(
        "", description="file with the secret by which services of a cluster authenticate each other; empty: none"
    )
    insecure: bool = Field(
        False, description="accept services from other machines without a cluster secret or client certificates"
    )
    admin_host: str = Field("127.0.0.1", description="address that the admin service listens on")
    admin_port: int = Field(0, ge=0, le=65535, description="port of the admin service; 0: any free one")
    admin_key_file: str = Field(
        "", description="file with the key for admin calls; empty: a generated key that only this user's commands find"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log line printed")
    log_format: Literal["text", "json"] = Field("text", description="format of log lines")
    otlp_traces_endpoint: str = Field(
        "",
        description="http://HOST:PORT of an OpenTelemetry collector (OTLP over gRPC) that frontends and schedulers "
        "send traces to; empty: none",
    )
    otlp_traces_ratio: float = Field(
        1.0, ge=0, le=1, description="share of requests that are traced, unless the client has decided"
    )
    drain_timeout_s: float = Field(
        30.0, gt=0, description="maximum time that SIGTERM waits for work to finish, seconds"
    )

    @property
    def service(self) -> str:
        return type(self).__name__.removesuffix("Settings").lower()

    @property
    def main_module(self) -> str:
        """Name of the module with serve(settings, shutdown), the service's composition root."""
        return f"quire.services.{self.service}.main"

    @property
    def name(self) -> str:
        return self.id or f"{self.service}-{socket.gethostname()}"

    @property
    def title(self) -> str:
        """Role and id of the service."""
        return f"{self.service} {self.name}"

    def cluster_secret(self) -> SecretFile | None:
        """Returns the cluster secret; None without one. Raises InvalidArgument for an unusable file."""
        return SecretFile(self.cluster_secret_file, "cluster_secret_file") if self.cluster_secret_file else None

    def reachable(self, port: int) -> str:
        """Returns HOST:PORT under which other machines reach a port."""
        everywhere = self.host in {"0.0.0.0", "::"}
        return f"{self.advertise or (socket.gethostname() if everywhere else self.host)}:{port}"


S = TypeVar("S", bound=Settings)
M = TypeVar("M", bound=BaseModel)


def load(
    model: type[S],
    known: Mapping[str, type[Settings]],
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
) -> S:
    """Returns the settings of the service that `model` belongs to, from file, environment and flags in ascending
    precedence. `known`: the models of all services; `flags`: without None values, may name the file as `config`.
    Raises InvalidArgument."""
    service = next(name for name, candidate in known.items() if candidate is model)
    flags = dict(flags)
    given = configured(known, flags.pop("config", ""), environ)
    return build(model, {**given[service], **_current_names(model, flags, service)}, service)


def configured(
    known: Mapping[str, type[Settings]], path: str = "", environ: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """Returns by service the values from the YAML file and the environment, unchecked. `path`: the file; empty:
    QUIRE_CONFIG. Raises InvalidArgument for unknown names."""
    environ = os.environ if environ is None else environ
    path = path or environ.get(CONFIG_VARIABLE, "")
    of_file = _from_file(Path(path), known) if path else {}
    of_environment = _from_environment(environ, known)
    return {service: {**of_file.get(service, {}), **of_environment[service]} for service in known}


def build(model: type[M], values: Mapping[str, Any], service: str) -> M:
    """Creates the settings. Raises InvalidArgument for the first wrong value, naming service, field and value;
    secrets are not shown."""
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":  # its input contains all given values, including secrets
            raise InvalidArgument(f"{service}.{field}: is required and not set", field=field) from None
        message = "unknown setting" if first["type"] == "extra_forbidden" else first["msg"]
        known = model.model_fields.get(field)
        value = "..." if known is not None and is_secret(known) else repr(first["input"])
        raise InvalidArgument(f"{service}.{field}: {message} (value: {value})", field=field) from None


def _from_file(path: Path, known: Mapping[str, type[Settings]]) -> dict[str, dict[str, Any]]:
    """Returns the values of a YAML file by service, with deprecated names replaced. Raises InvalidArgument if it
    cannot be read, or has an unknown section or setting."""
    try:
        document = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise InvalidArgument(f"config: cannot read {str(path)!r}: {error.strerror}", field="config") from None
    except yaml.YAMLError as error:
        raise InvalidArgument(f"config: {path} is not YAML: {error}", field="config") from None
    if not isinstance(document, dict):
        raise InvalidArgument(f"config: {path} must map service names to settings", field="config")
    for service, section in document.items():
        if service not in known:
            raise InvalidArgument(
                f"config: {path}: unknown section {service!r}; known sections: {', '.join(known)}", field=str(service)
            )
        for key in section or {}:
            if key not in known[service].model_fields and key not in deprecated_names(known[service]):
                near = did_you_mean(str(key), known[service].model_fields)
                raise InvalidArgument(f"config: {path}: unknown setting {service}.{key}{near}", field=str(key))
    return {service: _current_names(known[service], section or {}, service) for service, section in document.items()}


def _from_environment(environ: Mapping[str, str], known: Mapping[str, type[Settings]]) -> dict[str, dict[str, Any]]:
    """Returns the values of QUIRE_<SERVICE>_<FIELD> by service; any other QUIRE_ variable is an error."""
    names = {
        f"QUIRE_{service}_{field}".upper(): (service, field)
        for service, model in known.items()
        for field in (*model.model_fields, *deprecated_names(model))
    }
    found: dict[str, dict[str, Any]] = {service: {} for service in known}
    given: dict[str, dict[str, str]] = {service: {} for service in known}
    for variable, text in environ.items():
        if not variable.startswith("QUIRE_") or variable in OTHER_VARIABLES:
            continue
        if variable not in names:
            shown = "..." if SECRET_NAME.search(variable) else repr(text)
            near = did_you_mean(variable, names)
            raise InvalidArgument(f"unknown environment variable {variable}={shown}{near}", field=variable)
        service, name = names[variable]
        given[service][name] = text
    for service, texts in given.items():
        for field, text in _current_names(known[service], texts, "environment").items():
            found[service][field] = _parse(text, known[service].model_fields[field].annotation)
    return found


def deprecated_names(model: type[Settings]) -> dict[str, str]:
    """Returns the current name of each setting's earlier names, as its field lists them."""
    return {old: name for name, field in model.model_fields.items() for old in earlier_names(field)}


def earlier_names(field: FieldInfo) -> tuple[str, ...]:
    """Returns the names that a setting had before, which are accepted with a warning for one minor version."""
    extra = field.json_schema_extra
    return cast("tuple[str, ...]", extra.get("deprecated_names", ())) if isinstance(extra, dict) else ()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean X?" for the known name that is most like `name`; empty if none is."""
    near = next(iter(difflib.get_close_matches(name, known, 1, 0.8)), "")
    return f"; did you mean {near}?" if near else ""


def _current_names(model: type[Settings], given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Replaces deprecated names of settings with the current ones, and warns of each."""
    renamed, found = deprecated_names(model), dict(given)
    for old in renamed.keys() & given.keys():
        log.warning("deprecated setting", source=source, name=old, use=renamed[old])
        found.setdefault(renamed[old], found.pop(old))
    return found


def is_secret(field: FieldInfo) -> bool:
    """Whether a setting's value must not be visible to others, on a command line or in an error."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("secret"))


def is_mapping(annotation: Any) -> bool:
    """Whether a setting's value has named parts: a mapping, or a group of settings."""
    is_group = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return is_group or getattr(annotation, "__origin__", None) is dict


def _parse(text: str, annotation: Any) -> Any:
    """Splits lists at commas and mappings into NAME=VALUE pairs; pydantic parses everything else from text."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    origin = getattr(annotation, "__origin__", None)
    if is_mapping(annotation):
        return {name: value for name, _, value in (part.partition("=") for part in parts)}
    return parts if origin in (list, tuple) else text
