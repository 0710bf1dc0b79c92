"""A service's container as described by an image, compose or Kubernetes, with settings parsed by the real loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.cli import services
from quire.cli.main import COMMANDS
from quire.flags.parser import CommandParser
from quire.shared.settings import SERVICES, Settings, load

CONFIG_PATH = "/etc/quire/quire.yaml"
PLACEHOLDERS = {"status.podIP": "10.0.0.7", "limits.cpu": "4"}  # what Kubernetes puts in
METRICS_FIELD = {"frontend": "http_port", "scheduler": "metrics_port", "worker": "metrics_port"}


@dataclass(frozen=True)
class Service:
    """How a service is started. `config`: text of the file at CONFIG_PATH."""

    arguments: Sequence[str]  # of the command `quire`
    environment: Mapping[str, str]
    config: str
    stop_after_s: float = float("inf")

    @property
    def role(self) -> str:
        return self.arguments[0]

    def settings(self, scratch: Path) -> Settings:
        """Returns the settings, parsed by the service's own code; unknown commands, flags, variables and keys raise."""
        assert self.role in COMMANDS
        assert self.environment["QUIRE_CONFIG"] == CONFIG_PATH
        (scratch / "quire.yaml").write_text(self.config)
        parser = CommandParser(f"quire {self.role}", allow_abbrev=False, exit_on_error=False)
        services.configure(parser)
        flags = vars(parser.parse_args(list(self.arguments[1:])))
        environment = {**self.environment, "QUIRE_CONFIG": str(scratch / "quire.yaml")}
        return load(SERVICES[self.role], SERVICES, flags, environment)


def ports(settings: Settings) -> set[int]:
    return {getattr(settings, "grpc_port"), metrics_port(settings)}  # noqa: B009


def metrics_port(settings: Settings) -> int:
    port: int = getattr(settings, METRICS_FIELD[settings.service])
    return port


def check(settings: Settings, stop_after_s: float) -> None:
    """Checks what every container needs: reachable from others, and enough time to drain."""
    assert settings.host == "0.0.0.0"
    assert all(ports(settings)), "others must know the ports"
    drains = 2 if settings.service == "worker" else 1  # for the scheduler to move the work, then for the last step
    assert stop_after_s >= drains * settings.drain_timeout_s + 10
