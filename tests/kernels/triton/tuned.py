"""Replaces the tuning constants of this machine's GPU."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from quire.kernels.capability import ByCapability


def tune(monkeypatch: pytest.MonkeyPatch, module: str, **changes: object) -> None:
    """Replaces tuning constants of `module`, below quire.kernels.triton."""
    table: ByCapability[object] = importlib.import_module(f"quire.kernels.triton.{module}").TUNING
    monkeypatch.setattr(table, "here", replace(table.here, **changes))  # type: ignore[type-var]
