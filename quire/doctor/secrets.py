"""Checks files with secrets: readable, private, and with usable contents."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence

from quire.doctor.finding import Finding, ok, run_check
from quire.shared.security.secret_file import SecretFile
from quire.shared.settings import FrontendSettings, Settings

OF_SERVICES = {"cluster_secret_file": "cluster secret", "admin_key_file": "admin key"}
NONE = {
    "cluster_secret_file": "not configured; `quire up` generates one",
    "admin_key_file": "not configured; services generate their own",
}
ADVICE = "name a file of 32 characters or more that only this user can read (openssl rand -hex 32, chmod 600)"


def check(services: Sequence[Settings]) -> Iterator[Finding]:
    """Yields a finding per secret file that the services name, with the services that use it."""
    for field, subject in OF_SERVICES.items():
        named: dict[str, list[str]] = {}
        for settings in services:
            if path := getattr(settings, field):
                named.setdefault(path, []).append(settings.service)
        if not named:
            yield ok(subject, NONE[field])
        for path, owners in named.items():
            yield from run_check(subject, functools.partial(_secret, path, field, owners), ADVICE)


def _secret(path: str, field: str, owners: list[str]) -> Iterator[Finding]:
    SecretFile(path, field)
    yield ok(OF_SERVICES[field], f"{path}, of {', '.join(owners)}")


def check_api_keys(settings: FrontendSettings) -> Iterator[Finding]:
    """Yields whether API keys are required and, for a key file, whether it can be read."""
    if not settings.api_keys and not settings.api_key:
        yield ok("API keys", "not configured: every client that reaches a port may use it")
    elif settings.api_keys in ("", "redis"):
        yield ok("API keys", "in Redis" if settings.api_keys else "one, for everybody")
    else:
        advice = (
            "name a YAML file with a list `keys:` that only its owner and group may open (docs/operations/security.md)"
        )
        yield from run_check("API keys", lambda: _key_file(settings.api_keys), advice)


def _key_file(path: str) -> Iterator[Finding]:
    """Reads the key file with the frontend's code and yields the number of keys; raises as the frontend would."""
    try:
        sources = importlib.import_module("quire.services.frontend.access.sources")
    except ModuleNotFoundError:
        yield ok("API keys", f"{path}; `quire doctor` checks it where a frontend is installed")
        return
    count = len(sources.KeyFile(path, lambda: None).keys())
    yield ok("API keys", f"{count} in {path}")
