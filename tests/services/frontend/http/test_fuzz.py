"""Any input gets an answer that the OpenAPI document describes, and nothing of it stays in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.services.frontend.http.fuzz import Findings, fuzz
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.tool_model import tool_model_folder

DOCUMENT_EXAMPLES, FIELD_EXAMPLES, PLACE_EXAMPLES = 5, 40, 1


@pytest.fixture
async def document(tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    async with (
        scheduler(ScriptedScheduler()) as script,
        running(tool_model_folder(tmp_path), script.address) as frontend,
    ):
        yield (await frontend.http.get("/openapi.json")).json()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "examples"),
    [
        (Findings.of_document, DOCUMENT_EXAMPLES),
        (Findings.of_fields, FIELD_EXAMPLES),
        (Findings.of_places, PLACE_EXAMPLES),
    ],
    ids=["document", "fields", "places"],
)
async def test_nothing_sent_is_answered_wrongly(tmp_path: Path, part: object, examples: int) -> None:
    findings = await fuzz(tmp_path / "talking", examples, part)
    assert findings.wrong == []
    assert findings.statuses[200] > 0  # some cases were accepted
    assert findings.statuses[400] > 0  # some cases were refused


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/invocations"])
async def test_bodies_can_be_made_of_the_document(path: str, document: dict[str, Any]) -> None:
    """schemathesis silently skips a schema that is too complex."""
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    made = []

    @settings(
        max_examples=1,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def make(case: Any) -> None:
        made.append(case.body)

    make()
    assert made
