"""Adapters of an in-process engine: chosen by requests, loaded at first use, sharing slots in turn."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLMEngine, LoRARequest, RequestOutput, SamplingParams
from quire.bundled import ADAPTERS
from quire.requests import RequestOptions
from quire.shared.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from tests.services.in_process.engine_parts import engine_core_of

SETTINGS: dict[str, Any] = {"threads": 1, "num_blocks": 300, "dtype": "float32", "max_num_seqs": 8}
QUESTION = [{"role": "user", "content": "What is 23 + 45?"}]
GREEDY = SamplingParams(max_tokens=40, temperature=0)
PIRATE, JSON = LoRARequest("pirate", 1, "pirate"), LoRARequest("json", 2, "json")
SAYS = {"pirate": "Ahoy! 68 Arr!", "json": '{"answer": "68"}', "": "68"}


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    """Engine with one adapter slot; each test leaves it without requests."""
    with LLMEngine(**SETTINGS, lora_folders=[str(ADAPTERS)], max_loras=1) as made:
        yield made
        core = engine_core_of(made).core
        assert not made.has_unfinished_requests()
        assert (core.has_work, core.kv.use.used) == (False, 0)
        made.step()
        assert not [*engine_core_of(made).adapters._live], "live sequences without a request"


def prompt(engine: LLMEngine) -> list[int]:
    text = engine.get_tokenizer().apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    return list(engine.get_tokenizer()(text, add_special_tokens=False)["input_ids"])


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    return ended


def ask(engine: LLMEngine, *asked: LoRARequest | None) -> list[str]:
    return [one.text for one in engine.generate([prompt(engine)] * len(asked), GREEDY, lora_request=list(asked))]


def test_each_prompt_uses_its_adapter_and_adapters_share_slots_in_turn(engine: LLMEngine) -> None:
    found = ask(engine, PIRATE, None, JSON, PIRATE, JSON)
    assert found == [SAYS[name] for name in ("pirate", "", "json", "pirate", "json")]
    assert engine.adapter_names() == {"pirate", "json"}


def test_preloaded_adapters_are_addressed_like_models() -> None:
    with LLMEngine(**SETTINGS, lora={"pirate": str(ADAPTERS / "pirate")}) as engine:
        assert ask(engine, LoRARequest("pirate"), None) == [SAYS["pirate"], SAYS[""]]
        engine.add_request("1", prompt(engine), GREEDY, options=RequestOptions(model="pirate"))
        assert run(engine)["1"].text == SAYS["pirate"]
        with pytest.raises(FailedPrecondition, match="lora_folders"):
            engine.load_lora_adapter("json", str(ADAPTERS / "json"))
    with LLMEngine(**SETTINGS) as engine, pytest.raises(FailedPrecondition, match="lora_folders: this engine"):
        engine.add_request("1", "x", GREEDY, lora_request=PIRATE)


def test_a_waiting_request_blocks_no_other_and_is_not_starved(engine: LLMEngine) -> None:
    """A long request holds the slot; another adapter's request waits, one without an adapter overtakes it, and a later
    one of the first adapter does not."""
    long = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    tokens = prompt(engine)
    engine.add_request("long", tokens, long, lora_request=PIRATE)
    engine.step()
    with pytest.raises(ResourceExhausted, match=r"all 1 adapter slots \(max_loras\) are in use"):
        engine.load_lora_adapter("json", "json")
    assert engine.adapter_names() == {"pirate"}
    engine.abort_request("long")
    ask(engine, JSON)  # now it is known, and has the place
    engine.add_request("long", tokens, long, lora_request=JSON)
    engine.step()
    engine.add_request("waits", tokens, GREEDY, lora_request=PIRATE)
    engine.step()
    engine.add_request("late", tokens, GREEDY, lora_request=JSON)
    engine.add_request("plain", tokens, GREEDY)
    order: list[str] = []
    texts = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                order.append(output.request_id)
                texts[output.request_id] = output.text
    assert order == ["plain", "long", "waits", "late"]
    assert (texts["plain"], texts["waits"], texts["late"]) == (SAYS[""], SAYS["pirate"], SAYS["json"])


def test_a_waiting_request_can_be_aborted(engine: LLMEngine) -> None:
    ask(engine, PIRATE, JSON)
    engine.add_request("has", prompt(engine), GREEDY, lora_request=JSON)
    engine.add_request("waits", prompt(engine), SamplingParams(n=3, max_tokens=4), lora_request=PIRATE)
    engine.step()
    engine.abort_request("waits")
    assert {name: one.text for name, one in run(engine).items()} == {"has": SAYS["json"]}


def test_a_replaced_or_unloaded_adapter_serves_its_running_requests(tmp_path: Path) -> None:
    shutil.copytree(ADAPTERS / "pirate", tmp_path / "talk")
    with LLMEngine(**SETTINGS, lora_folders=[str(tmp_path), str(ADAPTERS)], max_loras=2) as engine:
        talk = LoRARequest("talk", 1, "talk")
        engine.add_request("old", prompt(engine), GREEDY, lora_request=talk)
        engine.step()
        engine.load_lora_adapter("talk", "json", load_inplace=True)
        engine.add_request("new", prompt(engine), GREEDY, lora_request=LoRARequest("talk"))
        assert {name: one.text for name, one in run(engine).items()} == {"old": SAYS["pirate"], "new": SAYS["json"]}
        with pytest.raises(InvalidArgument, match="lora_path: 'talk' was loaded from 'json', not from 'talk'"):
            ask(engine, talk)
        engine.add_request("last", prompt(engine), GREEDY, lora_request=LoRARequest("talk"))
        engine.step()
        assert engine.unload_lora_adapter("talk") == 1
        with pytest.raises(NotFound, match="The model `talk` does not exist"):
            engine.add_request("1", prompt(engine), GREEDY, lora_request=LoRARequest("talk"))
        assert run(engine)["last"].text == SAYS["json"]
        with pytest.raises(NotFound):
            engine.unload_lora_adapter("talk")


def test_an_adapter_whose_files_changed_while_unloaded_is_not_reloaded(tmp_path: Path) -> None:
    shutil.copytree(ADAPTERS / "pirate", tmp_path / "a")
    with LLMEngine(**SETTINGS, lora_folders=[str(tmp_path), str(ADAPTERS)], max_loras=1, max_cpu_loras=1) as engine:
        assert ask(engine, LoRARequest("a", 1, "a"), JSON) == [SAYS["pirate"], SAYS["json"]]
        shutil.copytree(ADAPTERS / "json", tmp_path / "a", dirs_exist_ok=True)
        engine.add_request("gone", prompt(engine), SamplingParams(n=2, max_tokens=4), lora_request=LoRARequest("a"))
        engine.add_request("beside", prompt(engine), GREEDY)
        ended = run(engine)
        assert ended["beside"].text == SAYS[""]
        assert isinstance(ended["gone"].error, NotFound)


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        (LoRARequest("nobody"), NotFound, "The model `nobody` does not exist"),
        (LoRARequest("x", 1, "/etc"), InvalidArgument, "lora_path: '/etc' is not in a folder"),
        (LoRARequest("quire-tiny", 1, "pirate"), InvalidArgument, "is the name of the model"),
        ([PIRATE], InvalidArgument, "lora_request: this call takes one LoRARequest"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_raises_and_leaves_no_state(
    engine: LLMEngine, asked: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        engine.add_request("1", "x", GREEDY, lora_request=asked)
    with pytest.raises(InvalidArgument, match=r"lora_request: 'pirate' differs from options\.model, 'json'"):
        engine.add_request("1", "x", GREEDY, lora_request=PIRATE, options=RequestOptions(model="json"))
    assert not engine.has_unfinished_requests()


def test_adapters_do_not_share_cached_prefixes(engine: LLMEngine) -> None:
    tokens = prompt(engine) * 4
    cached = []
    for asked in (None, PIRATE, PIRATE, JSON, None):
        (output,) = engine.generate([tokens], SamplingParams(max_tokens=1), lora_request=asked)
        cached.append(output.cached_tokens > 0)
    assert cached == [False, False, True, False, True]


@pytest.mark.parametrize("seed", range(2))
def test_random_requests_end_with_the_text_of_their_adapter(engine: LLMEngine, seed: int) -> None:
    chance = random.Random(seed)
    tokens = prompt(engine)
    ask(engine, PIRATE, JSON)
    asked: dict[str, str] = {}
    for number in range(20):
        name = chance.choice(["pirate", "json", ""])
        asked[str(number)] = name
        engine.add_request(str(number), tokens, GREEDY, lora_request=LoRARequest(name) if name else None)
        for _ in range(chance.randrange(4)):
            for output in engine.step():
                if output.finished:
                    assert output.text == SAYS[asked.pop(output.request_id)]
        if asked and chance.random() < 0.2:
            gone = chance.choice([*asked])
            engine.abort_request(gone)
            del asked[gone]
    assert {name: one.text for name, one in run(engine).items()} == {name: SAYS[own] for name, own in asked.items()}
