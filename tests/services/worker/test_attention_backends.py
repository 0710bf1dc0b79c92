"""Which attention backend serves which phase."""

from __future__ import annotations

import pytest

from services.worker.attention import backends
from services.worker.attention.by_phase import ByPhase
from services.worker.attention.port import AttentionMetadata, AttentionSpec

SPEC = AttentionSpec("cuda", "bfloat16", "bfloat16", 128, 16, 8, 64, has_window=False)


class Fake:
    """Accepts or refuses, and says its name for an answer."""

    def __init__(self, name: str, reason: str | None) -> None:
        self.name, self._reason = name, reason
        self.records_decodes = name == "triton"

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        return self._reason

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        return 32 if self.name == "triton" else 0

    def attend(self, *_: object, **__: object) -> str:
        return self.name


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch):
    def use(*names: str) -> None:
        monkeypatch.setattr(backends, "_load", lambda name: Fake(name, "no" if name in names else None))

    return use


def attended_by(chosen, longest_query: int) -> str:
    metadata = AttentionMetadata(None, None, None, longest_query=longest_query, longest_seq=9)
    return chosen.attend(None, None, None, metadata, scale=1.0, window=0)


def test_each_phase_has_the_best_that_can(refusing) -> None:
    refusing("cpu")
    chosen = backends.choose_attention("auto", SPEC)
    assert isinstance(chosen, ByPhase)
    assert attended_by(chosen, 1) == "triton"
    assert attended_by(chosen, 2) == "flash_attn"
    assert chosen.records_decodes
    assert chosen.rows_per_prefix_tile(SPEC) == 32


def test_one_backend_may_serve_both(refusing) -> None:
    refusing("cpu", "flash_attn")
    chosen = backends.choose_attention("auto", SPEC)
    assert chosen.name == "triton"
    refusing("cpu", "flash_attn", "triton")
    assert backends.choose_attention("auto", SPEC).name == "reference"


def test_a_named_backend_serves_both(refusing) -> None:
    refusing()
    assert backends.choose_attention("flash_attn", SPEC).name == "flash_attn"
