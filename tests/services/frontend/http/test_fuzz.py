"""Whatever is sent, the answer is one that the document names, and nothing is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.frontend.http.fuzz import Findings, fuzz

DOCUMENT_EXAMPLES, FIELD_EXAMPLES, PLACE_EXAMPLES = 5, 40, 1


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
    assert findings.statuses[200] > 0  # some of it was good
    assert findings.statuses[400] > 0  # some of it was not
