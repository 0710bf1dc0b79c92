"""Compliance tests of Open Responses, Anthropic Messages and OpenAI chat from the package llm-comply, against real
processes with the bundled model."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from quire.cluster import Cluster
from tests.e2e.conftest import running_cluster

pytestmark = pytest.mark.slow

PACKAGE, VERSION = "llm-comply", "0.4.1"
MODEL = "quire-tiny"

ONE_MODEL = "a body without a model is answered by the one model that is served, as in vLLM and llama.cpp"
REASONING = "the package runs it for models by other names only, and the bundled model does not reason"
COMPACTION = "the server makes no compactions and answers 404, which the test allows"


@dataclass(frozen=True)
class Suite:
    """A test suite of the package, with expected failures and their reasons."""

    name: str
    passed: frozenset[str]
    failed: dict[str, str]
    skipped: dict[str, str]
    warned: dict[str, str] = field(default_factory=dict)  # passed, with a warning
    options: tuple[str, ...] = ()


SUITES = (
    Suite(
        "open-responses",
        passed=frozenset({
            "basic-response", "system-prompt", "multi-turn", "tool-calling", "streaming-response", "streaming-usage",
            "assistant-phase", "response-output-phase-schema", "compact-response", "compact-missing-model",
            "image-input",
        }),
        failed={"error-handling": ONE_MODEL},
        skipped={"reasoning-summary": REASONING},
        warned={"compact-response": COMPACTION},
    ),
    Suite(
        "openai-chat",
        passed=frozenset({
            "chat-basic-response", "chat-system-prompt", "chat-multi-turn", "chat-tool-calling",
            "chat-streaming-response", "chat-streaming-usage", "chat-image-input",
        }),
        failed={"chat-error-handling": ONE_MODEL},
        skipped={"chat-reasoning-summary": REASONING},
    ),
    Suite(
        "anthropic",
        passed=frozenset({
            "anth-basic-response", "anth-system-prompt", "anth-multi-turn", "anth-tool-calling",
            "anth-streaming-response", "anth-streaming-usage", "anth-error-handling", "anth-image-input",
        }),
        failed={},
        skipped={"anth-thinking-display": REASONING},
        options=("--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Batch-invariant cluster, so that no answer runs to its `max_tokens` by chance."""
    with running_cluster(worker={"num_blocks": 2000, "batch_invariant": True}) as running:
        yield running


@pytest.fixture(scope="module")
def package() -> str:
    """Module of the package to run."""
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        pytest.skip(f"needs {PACKAGE}=={VERSION}, found {found}: pip install {PACKAGE}=={VERSION}")
    return "llm_comply.cli"


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_a_suite_passes_but_for_what_is_listed(cluster: Cluster, package: str, suite: Suite) -> None:
    asked = ("--format", suite.name, "-u", f"http://{cluster.http_address}/v1", "-k", "none", "-m", MODEL, "--json")
    command = [sys.executable, "-m", package, *asked, *suite.options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    results = {result["id"]: result for result in json.loads(done.stdout)["results"]}
    by_status = {
        status: {name: one.get("errors") for name, one in results.items() if one["status"] == status}
        for status in ("passed", "failed", "skipped")
    }
    assert by_status["passed"].keys() == suite.passed, by_status["failed"]
    assert by_status["failed"].keys() == suite.failed.keys()
    assert by_status["skipped"].keys() == suite.skipped.keys()
    assert {name for name, one in results.items() if one.get("warnings")} == suite.warned.keys()
