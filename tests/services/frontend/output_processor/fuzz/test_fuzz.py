"""Tests of every tool format with its reasoning format on faulty answers.

The result does not depend on how the text is split, calls are of offered tools with complete arguments, and no markup
reaches the content. `python -m tests.services.frontend.output_processor.fuzz` runs more cases than a test has time for.
"""

from __future__ import annotations

import json
import os

import pytest

from quire.services.frontend.output_processor.answer_parser import CallDelta
from quire.services.frontend.output_processor.parsing import registry
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from tests.services.frontend.output_processor.fuzz.conversations import ANSWERS
from tests.services.frontend.output_processor.fuzz.reading import FamilyReader, expected, failures, marked_tokenizer
from tests.services.frontend.output_processor.fuzz.spellings import FAMILIES, Family

NUM_CASES = int(os.environ.get("FUZZ_CASES", "100"))  # of each family


def label(family: Family) -> str:
    return f"{family.tools}+{family.reasoning or 'none'}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return marked_tokenizer(tmp_path_factory.mktemp("models") / "marked")


@pytest.mark.parametrize("family", FAMILIES, ids=label)
def test_correct_answers_are_read_completely(family: Family, tokenizer: Tokenizer) -> None:
    reader = FamilyReader(family, tokenizer)
    for answer in ANSWERS:
        found = reader.read([family.write(answer)])
        texts = [part if isinstance(part, CallDelta) else type(part)(part.text.strip()) for part in found]
        bare = [part._replace(arguments="") if isinstance(part, CallDelta) else part for part in texts]
        assert bare == expected(answer, family)
        arguments = [json.loads(part.arguments) for part in found if isinstance(part, CallDelta)]
        assert arguments == [call.arguments for call in answer.calls]


@pytest.mark.parametrize("family", FAMILIES, ids=label)
def test_faulty_answers_give_complete_calls_or_text(family: Family, tokenizer: Tokenizer) -> None:
    assert failures(family, tokenizer, ANSWERS, range(NUM_CASES)) == []


def test_mutation_tests_cover_every_format() -> None:
    assert {family.tools for family in FAMILIES} == set(registry.TOOL_PARSERS)
    assert {family.reasoning for family in FAMILIES} - {""} == set(registry.REASONING_PARSERS)
