"""Constrained sequences in a worker: every output fulfils its grammar, whatever the model would rather say."""

from __future__ import annotations

import hashlib
import json
import queue
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.worker.structured.compile_pool import Prepared
from shared.errors import InvalidArgument
from shared.pb.common.v1 import sampling_pb2 as pb
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

TINY = Path(__file__).parents[3] / "quire/tiny/model"
EOS = 0
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def _rig() -> Rig:
    return Rig(TINY, num_blocks=512, block_size=16, attention_backend="auto", record_logits=False)


@pytest.fixture
def rig(_rig: Rig) -> Iterator[Rig]:
    yield _rig
    if _rig.scheduler.rows:
        _rig.step(released=list(_rig.scheduler.rows))


def prepare(rig: Rig, **constraint: Any) -> bytes:
    """The grammar's name, once it is there."""
    message = pb.StructuredOutput(**constraint)
    name = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
    outcome: list[Prepared] = []
    there = threading.Event()
    rig.grammars.prepare(name, message, lambda prepared: (outcome.append(prepared), there.set()))
    assert there.wait(20)
    if outcome[0].error is not None:
        raise outcome[0].error
    return name


def hot(seed: int = 1, temperature: float = 1.0, **fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(temperature=temperature, seed=seed, max_tokens=200, **fields)


def admit(tokenizer: Tokenizer, slot: int, grammar_id: bytes, output: list[int] | None = None, **fields: Any) -> New:
    prompt = tokenizer.encode(f"Sequence {slot} says: ").ids
    sampling = fields.pop("sampling", None) or hot(slot)
    return New(
        slot,
        prompt + (output or []),
        num_prompt=len(prompt),
        sampling=sampling,
        eos=(EOS,),
        grammar_id=grammar_id,
        **fields,
    )


def step(rig: Rig, new: list[New] | None = None) -> dict[int, int]:
    """Prompts are computed at once."""
    return rig.step(new=new, counts={sequence.slot: len(sequence.tokens) for sequence in new or []})


def run(rig: Rig, new: list[New], steps: int = 120) -> dict[int, list[int]]:
    """Tokens of each slot up to its end of sequence."""
    said: dict[int, list[int]] = {sequence.slot: [] for sequence in new}
    arriving = new
    for _ in range(steps):
        for slot, token in step(rig, arriving).items():
            if slot in said and EOS not in said[slot]:
                said[slot].append(token)
        assert not rig.last_result.failures
        arriving = []
        if all(EOS in tokens for tokens in said.values()):
            break
    return said


def text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    assert tokens[-1] == EOS
    return tokenizer.decode(tokens[:-1])


def test_different_grammars_and_none_side_by_side(rig: Rig, tokenizer: Tokenizer) -> None:
    schema = prepare(rig, json_schema=json.dumps(PERSON))
    pattern = prepare(rig, regex=r"[A-Z]{2}-\d{3,4}")
    choice = prepare(rig, choice=pb.StructuredOutput.Choice(options=["über alles", "nothing"]))
    said = run(
        rig,
        [
            admit(tokenizer, 0, schema),
            admit(tokenizer, 1, pattern),
            admit(tokenizer, 3, choice),
            admit(tokenizer, 5, schema),
        ],
    )
    for slot in (0, 5):
        person = json.loads(text(tokenizer, said[slot]))
        assert person.keys() == {"name", "age"}
        assert 0 <= person["age"] <= 9
    assert re.fullmatch(r"[A-Z]{2}-\d{3,4}", text(tokenizer, said[1]))
    assert text(tokenizer, said[3]) in ("über alles", "nothing")


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_json_is_valid_at_any_temperature(rig: Rig, tokenizer: Tokenizer, temperature: float) -> None:
    schema = prepare(rig, json_schema=json.dumps(PERSON))
    for first in range(0, 40, 8):
        new = [admit(tokenizer, slot, schema, sampling=hot(first + slot, temperature=temperature)) for slot in range(8)]
        for tokens in run(rig, new).values():
            assert json.loads(text(tokenizer, tokens)).keys() == {"name", "age"}
        rig.step(released=list(range(8)))


def test_neighbours_without_a_grammar_say_what_they_always_say(rig: Rig, tokenizer: Tokenizer) -> None:
    def free(slot: int) -> New:
        return admit(tokenizer, slot, b"", sampling=hot(9))

    alone = [step(rig, [free(2)] if i == 0 else None)[2] for i in range(20)]
    rig.step(released=[2])
    pattern = prepare(rig, regex=r"\d+,")
    beside = [step(rig, [free(2), admit(tokenizer, 4, pattern)] if i == 0 else None)[2] for i in range(20)]
    assert alone == beside


def test_a_sequence_goes_on_in_the_middle_of_its_grammar(rig: Rig, tokenizer: Tokenizer) -> None:
    """As after a preemption, or on another worker: the tokens so far are replayed."""
    schema = prepare(rig, json_schema=json.dumps(PERSON))
    whole = run(rig, [admit(tokenizer, 0, schema, sampling=hot(5))])[0]
    rig.step(released=[0])
    for cut in range(1, len(whole)):
        rest = run(rig, [admit(tokenizer, 0, schema, output=whole[:cut], sampling=hot(5))])[0]
        assert whole[:cut] + rest == whole
        rig.step(released=[0])


def test_an_output_that_breaks_its_grammar_ends_with_an_error(rig: Rig, tokenizer: Tokenizer) -> None:
    schema = prepare(rig, json_schema=json.dumps(PERSON))
    wrong = tokenizer.encode("not JSON").ids
    step(rig, [admit(tokenizer, 0, schema, output=wrong), admit(tokenizer, 1, schema)])
    (failure,) = rig.last_result.failures
    assert failure.slot == 0
    assert failure.error.message == (
        f"structured_output: the grammar does not allow token {wrong[0]}, which the output holds"
    )


def test_the_grammar_ends_the_sequence_though_eos_is_ignored(rig: Rig, tokenizer: Tokenizer) -> None:
    exact = prepare(rig, regex=r"[ab]{5}")
    said = run(rig, [admit(tokenizer, 0, exact, sampling=hot(ignore_eos=True))])
    assert re.fullmatch("[ab]{5}", text(tokenizer, said[0]))
    rig.step(released=[0])
    endless = prepare(rig, regex=r"[ab]+")
    said = run(rig, [admit(tokenizer, 0, endless, sampling=hot(ignore_eos=True))], steps=50)
    assert EOS not in said[0]
    assert len(said[0]) == 50


def test_min_tokens_holds_while_the_grammar_allows_more(rig: Rig, tokenizer: Tokenizer) -> None:
    endless = prepare(rig, regex=r"[ab]+")
    said = run(rig, [admit(tokenizer, 0, endless, sampling=hot(min_tokens=30, logit_bias={EOS: 100.0}))])
    assert said[0].index(EOS) == 30
    rig.step(released=[0])
    short = prepare(rig, regex=r"[ab]{3}")
    said = run(rig, [admit(tokenizer, 0, short, sampling=hot(min_tokens=30))])
    assert re.fullmatch("[ab]{3}", text(tokenizer, said[0]))


def test_what_the_grammar_needs_may_be_banned_otherwise_which_is_an_error(rig: Rig, tokenizer: Tokenizer) -> None:
    digits = prepare(rig, regex=r"\d{3}")
    letter = tokenizer.encode("a").ids[:1]
    step(rig, [admit(tokenizer, 0, digits, sampling=hot(allowed_token_ids=letter))])
    (failure,) = rig.last_result.failures
    assert "every token is banned" in failure.error.message


def test_equal_grammars_are_compiled_once(rig: Rig) -> None:
    outcomes: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
    message = pb.StructuredOutput(regex="only once+")
    for _ in range(8):
        rig.grammars.prepare(b"once", message, outcomes.put)
    times = {outcomes.get(timeout=20).compile_us for _ in range(8)}
    assert len(times - {0}) == 1


def test_a_constraint_without_any_text_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidArgument, match="nothing fulfils it"):
        prepare(rig, json_schema=json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}))


def test_marks_of_reasoning_may_come_in_free_text_and_begin_a_tag(rig: Rig, tokenizer: Tokenizer) -> None:
    """The model's own tokens for them, which ordinary tokens do not spell."""
    arguments = {"type": "json_schema", "json_schema": {"enum": [1, 2]}}
    tag = {"type": "tag", "begin": "<tool_call>", "content": arguments, "end": "</tool_call>"}
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag], "at_least_one": True}
    name = prepare(rig, structural_tag=json.dumps({"format": {**form, "stop_after_first": True}}))
    think, end_of_thought, call = (tokenizer.token_to_id(text) for text in ("<think>", "</think>", "<tool_call>"))
    thought = [think, *tokenizer.encode("so").ids, end_of_thought]
    for output in ([], thought, [*tokenizer.encode("Hm").ids, *thought]):
        said = run(rig, [admit(tokenizer, 0, name, output=[*output, call])])[0]
        assert text(tokenizer, said) in ("1</tool_call>", "2</tool_call>")
        rig.step(released=[0])
