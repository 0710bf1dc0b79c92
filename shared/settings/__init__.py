"""Settings of every service: one frozen model each, filled from a YAML file, then QUIRE_* variables, then flags.

They are defined together, outside of the services, because one YAML file and one environment serve all of them, and
unknown keys can be refused only if all keys are known.
"""

from quire.shared.security.tls_files import NO_TLS, Tls
from quire.shared.settings.base import Settings, load
from quire.shared.settings.frontend import FrontendSettings
from quire.shared.settings.scheduler import SchedulerSettings
from quire.shared.settings.worker import WorkerSettings

SERVICES: dict[str, type[Settings]] = {
    "frontend": FrontendSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}

__all__ = [
    "NO_TLS",
    "SERVICES",
    "FrontendSettings",
    "SchedulerSettings",
    "Settings",
    "Tls",
    "WorkerSettings",
    "load",
]
