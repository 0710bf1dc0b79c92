"""An installed plugin package extends Quire at every extension point, one service at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.services.scheduler.core.core import Core
from quire.services.scheduler.sessions.scheduling_policies import find_policy
from quire.services.worker.attention import backends
from quire.services.worker.models import registry
from quire.services.worker.models.families.llama import LlamaForCausalLM
from quire.services.worker.models.single_row import model_reject_reason
from quire.services.worker.spec_decode import config as speculative_config
from quire.shared import plugins
from quire.shared.errors import InvalidArgument
from tests.services.scheduler.conftest import make_limits, make_sequence
from tests.services.worker import checkpoints
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import whole_model_of
from tests.services.worker.rig import Rig
from tests.spec_decode.pair import Pair, build
from tests.waiting import until

PROMPT = [5, 9, 1, 77, 30, 12]


@pytest.fixture
def example(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(installed))
    return installed


def last_logits(folder: Path, **settings: str) -> list[float]:
    rig = Rig(folder, **settings)
    rig.step([New(0, PROMPT)], {0: len(PROMPT)})
    return rig.logits[0][0].tolist()


def test_a_family_of_models(example: Path, tmp_path: Path) -> None:
    made = checkpoints.make("llama", tmp_path)
    usual = last_logits(made.folder)
    path = made.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["BackwardsLlamaForCausalLM"]}))
    assert last_logits(made.folder) == [-logit for logit in usual]


def test_a_family_that_overrides_logits_skips_the_single_row_program(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inherited program for single-row decoding on a GPU would skip the overridden logits."""
    monkeypatch.setattr(LlamaForCausalLM, "single_row", lambda *_: None)
    made = checkpoints.make("llama", tmp_path)
    path, config = made.folder / "config.json", json.loads((made.folder / "config.json").read_text())
    reasons = []
    for architecture in ("LlamaForCausalLM", "BackwardsLlamaForCausalLM"):
        path.write_text(json.dumps({**config, "architectures": [architecture]}))
        model = whole_model_of(Rig(made.folder).replica)
        assert isinstance(model, LlamaForCausalLM)
        reasons.append(model_reject_reason(model, model.layers[0].attention._place))
    assert reasons == [None, "the family overrides the forward pass"]


def test_an_attention_backend(example: Path, tmp_path: Path) -> None:
    made = checkpoints.make("llama", tmp_path)
    usual = last_logits(made.folder, attention_backend="reference")  # whose calls the plugin counts
    assert last_logits(made.folder, attention_backend="counting") == usual
    from quire_example.attention import CountingAttention

    assert CountingAttention.num_calls == checkpoints.SHAPE["num_hidden_layers"]


def test_a_method_of_drafting(example: Path) -> None:
    same_again = {"method": "same_again", "num_speculative_tokens": 1, "adaptive_length": False}
    pairs = [Pair(build(same_again)), Pair(build())]
    drafting, plain = (pair.ask([40] * 9, max_tokens=30, eos=()) for pair in pairs)
    for pair in pairs:
        pair.run()
    assert drafting.tokens == plain.tokens
    assert pairs[0].core.speculation.counts.draft_tokens >= 20


def test_a_scheduling_policy(example: Path) -> None:
    core = Core(make_limits(policy=find_policy("shortest_first"), max_num_seqs=1))
    for key, length in enumerate((30, 10, 20)):
        core.add(make_sequence(key, [key + 1] * length))
    assert core.waiting.peek().key == 1
    plan = core.schedule(0.0)
    assert plan is not None
    assert [admission.sequence.key for admission in plan.admitted] == [1]


def test_a_stat_logger(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a scheduler process, which discovers the installed stat logger."""
    ledger = tmp_path / "ledger"
    ledger.touch()
    monkeypatch.setenv("LEDGER", str(ledger))
    monkeypatch.setenv("PYTHONPATH", str(example))
    scheduler = {"stat_loggers": ("ledger",), "stats_interval_s": 0.2}
    with LLM(num_blocks=300, scheduler=scheduler) as llm:
        llm.generate("Once upon a time", SamplingParams(max_tokens=7, ignore_eos=True))
        until(lambda: not (sum(int(line.split()[1]) for line in ledger.read_text().splitlines()) < 7))
    assert {line.split()[0] for line in ledger.read_text().splitlines()} == {"worker-0"}


def test_errors_for_unknown_names_list_installed_ones(example: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"supported: .*Qwen3ForCausalLM, .*BackwardsLlamaForCausalLM"):
        registry.find_model({"architectures": ["NobodysForCausalLM"]})
    with pytest.raises(InvalidArgument, match=r"available: .*grammar, same_again"):
        speculative_config.parse(json.dumps({"method": "nobodys", "num_speculative_tokens": 1}))
    with pytest.raises(InvalidArgument, match=r"'nobodys' does not exist; available: fcfs, .*fair, shortest_first"):
        find_policy("nobodys")


def test_a_name_that_is_declared_twice_is_refused(example: Path) -> None:
    taken = {"counting": "somewhere.else:Backend"}
    with pytest.raises(InvalidArgument, match=r"counting is declared twice, as somewhere.else:Backend and as quire_ex"):
        plugins.known(backends.GROUP, taken)
