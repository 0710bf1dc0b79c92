"""An in-process engine without sockets: each feature returns a cluster's answer, with every grammar backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

import quire.kernels.cpu
from quire import LLMEngine, LoRARequest, bundled
from quire.cluster import Cluster
from quire.requests import RequestOptions
from quire.services.worker.structured.backends import libraries
from quire.shared.errors import InvalidArgument
from quire.shared.structured_output.backends import LM_FORMAT_ENFORCER, OUTLINES_CORE, XGRAMMAR
from tests.e2e.conftest import running_cluster
from tests.matrix.features import FORMS, REQUESTS, params
from tests.matrix.requesting import Answer, Question, ask_now, assert_same, prompts, question

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NOT_TAKEN = {
    XGRAMMAR: {},
    OUTLINES_CORE: {"json_schema": "does not enforce 'm", "structural_tag": "takes no structural_tag"},
    LM_FORMAT_ENFORCER: {"json_schema": "does not enforce 'm", "structural_tag": "takes no structural_tag"},
}


NONE: Mapping[str, LoRARequest] = {}
ADAPTERS = [LoRARequest("pirate", 1, "pirate"), LoRARequest("json", 2, "json")]


@contextmanager
def engine(**settings: object) -> Iterator[LLMEngine]:
    with LLMEngine(num_blocks=2000, threads=1, **settings) as made:
        yield made


def answers(
    made: LLMEngine, questions: Mapping[str, Question], adapters: Mapping[str, LoRARequest] = NONE
) -> dict[str, Answer]:
    """Answers of all requests at once, each through its adapter, if any."""
    found: dict[str, Answer] = {}
    for name, one in questions.items():
        made.add_request(name, one.prompt, one.params, lora_request=adapters.get(name), options=one.options)
    while made.has_unfinished_requests():
        for output in made.step():
            if output.finished:
                found[output.request_id] = output
    return found


@pytest.mark.skipif(quire.kernels.cpu.unavailable() is not None, reason="plain torch rounds otherwise in other batches")
def test_engine_returns_what_a_cluster_returns(cluster: Cluster) -> None:
    questions = {name: question(prompts(cluster)[0], name) for name in REQUESTS}
    with engine() as made:
        found = answers(made, questions)
    for name, whole in ask_now(cluster, questions).items():
        assert_same(found[name], whole, name)


@pytest.mark.skipif(quire.kernels.cpu.unavailable() is not None, reason="plain torch rounds otherwise in other batches")
def test_engine_with_adapters_returns_what_a_cluster_returns(cluster: Cluster) -> None:
    """Each feature through one of two adapters, which alternate in one slot."""
    names = [*REQUESTS]
    chosen = {name: ADAPTERS[number % len(ADAPTERS)] for number, name in enumerate(names)}
    prompt = prompts(cluster)[0]
    folder = str(bundled.ADAPTERS)
    with engine(lora_folders=[folder], max_loras=1) as made:
        made.generate([prompt] * 2, params("greedy"), lora_request=ADAPTERS)
        requests = {name: LoRARequest(one.lora_name) for name, one in chosen.items()}
        found = answers(made, {name: question(prompt, name) for name in names}, requests)
    lora = {one.lora_name: f"{folder}/{one.lora_path}" for one in ADAPTERS}
    with running_cluster(worker={"num_blocks": 2000, "threads": 1, "lora": lora}) as other:
        named = {
            name: question(prompt, name, options=RequestOptions(model=one.lora_name)) for name, one in chosen.items()
        }
        for name, whole in ask_now(other, named).items():
            assert_same(found[name], whole, name)


@pytest.mark.parametrize("library", NOT_TAKEN)
def test_forms_are_heeded_whichever_library_makes_them(cluster: Cluster, library: str) -> None:
    if not libraries.is_installed(library):
        pytest.skip(f"{library} is not installed")
    prompt, refused = prompts(cluster)[0], NOT_TAKEN[library]
    with engine(structured_output_backend=library) as made:
        for name, text in refused.items():
            with pytest.raises(InvalidArgument, match=text):
                made.add_request(name, prompt, params(name))
        found = answers(made, {name: question(prompt, name) for name in FORMS if name not in refused})
    for name, result in found.items():
        assert not isinstance(result, Exception)
        assert result.error is None
        for sample in result.outputs:
            REQUESTS[name].check(sample, result, params(name))
