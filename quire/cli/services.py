"""`quire frontend`, `quire scheduler`, `quire worker`: runs one service in this process."""

from __future__ import annotations

import argparse
import functools
import importlib

from quire import interrupts
from quire.flags.groups import GROUPS
from quire.flags.parser import CommandParser
from quire.flags.setting_flags import add_settings
from quire.shared.models import model_hub
from quire.shared.process import lifecycle
from quire.shared.process.unique_name import with_unique_name
from quire.shared.settings import SERVICES, FrontendSettings, Settings, WorkerSettings, load


def configure(parser: CommandParser) -> None:
    """Adds all settings of the service that the command names as flags, in groups."""
    role = parser.prog.split()[-1]
    parser.add_argument(
        "--config", default=argparse.SUPPRESS, metavar="FILE", help="YAML file with a section per service"
    )
    add_settings(parser, SERVICES[role])
    parser.group_flags(GROUPS)


def _located(settings: Settings) -> Settings:
    """Replaces a model's name on a hub by its local folder; requests keep using the name."""
    if not isinstance(settings, FrontendSettings | WorkerSettings):
        return settings
    weights = isinstance(settings, WorkerSettings) and settings.load_format != "dummy" and settings.engine == "device"
    folder = model_hub.find(settings.model, settings.revision, weights=weights)
    name = settings.served_model_name or model_hub.served_name(settings.model, folder)
    return settings.model_copy(update={"model": str(folder), "served_model_name": name})


def run(arguments: argparse.Namespace) -> int:
    """Loads the settings and serves until a signal; as a command, it ends the process with the service's status."""
    flags = vars(arguments)
    role = flags.pop("command")
    settings = _located(load(SERVICES[role], SERVICES, flags))
    serve = importlib.import_module(settings.main_module).serve
    with with_unique_name(settings) as settings:
        status = lifecycle.run(functools.partial(serve, settings))
    if interrupts.IS_COMMAND:
        lifecycle.exit_process(status)
    return status
