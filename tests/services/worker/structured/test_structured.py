"""Constrained sequences in a worker: every output fulfils its grammar, whatever the model prefers."""

from __future__ import annotations

import json
import queue
import re
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from quire.services.worker.structured.backends.llguidance_backend import LLGuidanceBackend
from quire.services.worker.structured.compile_pool import CompileResult
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import runner_of
from tests.services.worker.rig import Rig
from tests.services.worker.structured.grammar_rig import EOS, PERSON, TINY, admit, hot, prepare, run, step, text


def test_different_grammars_and_none_in_one_step(tiny: Rig, tokenizer: Tokenizer) -> None:
    schema = prepare(tiny, json_schema=json.dumps(PERSON))
    pattern = prepare(tiny, regex=r"[A-Z]{2}-\d{3,4}")
    choice = prepare(tiny, choice=pb.StructuredOutput.Choice(options=["über alles", "nothing"]))
    said = run(
        tiny,
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


def test_thousands_of_options(tiny: Rig, tokenizer: Tokenizer) -> None:
    options = [f"{number * 7919 % 100_003} ways" for number in range(8000)]
    choice = prepare(tiny, choice=pb.StructuredOutput.Choice(options=options))
    said = run(tiny, [admit(tokenizer, slot, choice) for slot in (0, 1)])
    assert {text(tokenizer, said[slot]) for slot in (0, 1)} <= set(options)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_json_is_valid_at_any_temperature(tiny: Rig, tokenizer: Tokenizer, temperature: float) -> None:
    schema = prepare(tiny, json_schema=json.dumps(PERSON))
    for first in range(0, 40, 8):
        new = [admit(tokenizer, slot, schema, sampling=hot(first + slot, temperature=temperature)) for slot in range(8)]
        for tokens in run(tiny, new).values():
            assert json.loads(text(tokenizer, tokens)).keys() == {"name", "age"}
        tiny.step(released=list(range(8)))


def test_sequences_without_a_grammar_are_unaffected(tiny: Rig, tokenizer: Tokenizer) -> None:
    def free(slot: int) -> New:
        return admit(tokenizer, slot, b"", sampling=hot(9))

    alone = [step(tiny, [free(2)] if i == 0 else None)[2] for i in range(20)]
    tiny.step(released=[2])
    pattern = prepare(tiny, regex=r"\d+,")
    with_neighbour = [step(tiny, [free(2), admit(tokenizer, 4, pattern)] if i == 0 else None)[2] for i in range(20)]
    assert alone == with_neighbour


def test_a_sequence_resumes_in_the_middle_of_its_grammar(tiny: Rig, tokenizer: Tokenizer) -> None:
    """The tokens so far are replayed, as after a preemption or on another worker."""
    schema = prepare(tiny, json_schema=json.dumps(PERSON))
    whole = run(tiny, [admit(tokenizer, 0, schema, sampling=hot(5))])[0]
    tiny.step(released=[0])
    for cut in range(1, len(whole)):
        rest = run(tiny, [admit(tokenizer, 0, schema, output=whole[:cut], sampling=hot(5))])[0]
        assert whole[:cut] + rest == whole
        tiny.step(released=[0])


@pytest.mark.parametrize("count", [4000, 15_000])
def test_one_of_thousands_of_choices_is_made(tiny: Rig, tokenizer: Tokenizer, count: int) -> None:
    """Such a constraint was once admitted and then failed in the middle of the output."""
    options = [f"w{number}" for number in range(count)]
    name = prepare(tiny, choice={"options": options})
    said = run(tiny, [admit(tokenizer, 0, name, sampling=hot(7))])[0]
    tiny.step(released=[0])
    assert tokenizer.decode(said) in options


def test_a_refused_token_is_not_reported_as_a_library_error(tokenizer: Tokenizer) -> None:
    backend = LLGuidanceBackend(TINY, 4096, [0])
    letter, digit = tokenizer.encode("a").ids[0], tokenizer.encode("1").ids[0]
    alone, one, other = (backend.compile(pb.StructuredOutput(regex="[0-9]{3}")).new_matcher() for _ in range(3))
    assert not alone.accept_sampled(letter)
    assert backend.filler().accept([one, other], [letter, digit]) == [False, True]
    assert [matcher.fault for matcher in (alone, one, other)] == ["", "", ""]


def test_an_output_that_breaks_its_grammar_ends_with_an_error(tiny: Rig, tokenizer: Tokenizer) -> None:
    schema = prepare(tiny, json_schema=json.dumps(PERSON))
    wrong = tokenizer.encode("not JSON").ids
    step(tiny, [admit(tokenizer, 0, schema, output=wrong), admit(tokenizer, 1, schema)])
    (failure,) = tiny.last_result.failures
    assert failure.slot == 0
    assert failure.error.message == (
        f"structured_output: the grammar does not allow token {wrong[0]}, which the output contains"
    )


def test_a_wrong_token_in_a_batch_ends_its_sequence_alone(tiny: Rig, tokenizer: Tokenizer) -> None:
    letters, digits = prepare(tiny, regex="a+"), prepare(tiny, regex=r"\d+")
    step(tiny, [admit(tokenizer, 0, letters), admit(tokenizer, 1, digits), admit(tokenizer, 2, letters)])
    masks = runner_of(tiny.replica).sampler.grammar_masks
    sequences = [masks.slots[slot] for slot in range(3)]
    masks.builder.wait()
    before = masks.builder.step_masks(sequences)
    masks.advance(sequences, torch.tensor([tokenizer.token_to_id(letter) for letter in "aba"]))
    step_with_it = masks.builder.step_masks(sequences)
    assert before
    assert step_with_it
    assert list(step_with_it.faults()) == [1]
    assert not before.faults()  # that step was finished before
    assert [sequence.is_live for sequence in sequences] == [True, False, True]


def test_sequences_admitted_together_replay_their_own_tokens(tiny: Rig, tokenizer: Tokenizer) -> None:
    """Two tokens of one sequence and none of another are as many tokens as sequences."""
    digits = prepare(tiny, regex=r"\d{3}")
    output = tokenizer.encode("47").ids
    assert len(output) == 2
    said = run(tiny, [admit(tokenizer, 0, digits, output=output), admit(tokenizer, 1, digits)])
    assert text(tokenizer, [*output, *said[0]]).startswith("47")
    assert [len(text(tokenizer, tokens)) for tokens in ([*output, *said[0]], said[1])] == [3, 3]


def test_a_sequence_that_is_fast_again_rejoins_the_batch(tiny: Rig, tokenizer: Tokenizer) -> None:
    letters = prepare(tiny, regex="a+")
    step(tiny, [admit(tokenizer, slot, letters) for slot in range(3)])
    masks = runner_of(tiny.replica).sampler.grammar_masks
    sequences = [masks.slots[slot] for slot in range(3)]
    masks.builder.wait()
    for sequence in sequences:
        sequence.advance_alone = True
    step(tiny)
    masks.builder.wait()
    assert all(sequence.is_live and not sequence.advance_alone for sequence in sequences)


def test_the_grammar_ends_the_sequence_even_with_ignore_eos(tiny: Rig, tokenizer: Tokenizer) -> None:
    exact = prepare(tiny, regex=r"[ab]{5}")
    said = run(tiny, [admit(tokenizer, 0, exact, sampling=hot(ignore_eos=True))])
    assert re.fullmatch("[ab]{5}", text(tokenizer, said[0]))
    tiny.step(released=[0])
    endless = prepare(tiny, regex=r"[ab]+")
    said = run(tiny, [admit(tokenizer, 0, endless, sampling=hot(ignore_eos=True))], steps=50)
    assert EOS not in said[0]
    assert len(said[0]) == 50


def test_min_tokens_holds_while_the_grammar_allows_more(tiny: Rig, tokenizer: Tokenizer) -> None:
    endless = prepare(tiny, regex=r"[ab]+")
    said = run(tiny, [admit(tokenizer, 0, endless, sampling=hot(min_tokens=30, logit_bias={EOS: 100.0}))])
    assert said[0].index(EOS) == 30
    tiny.step(released=[0])
    short = prepare(tiny, regex=r"[ab]{3}")
    said = run(tiny, [admit(tokenizer, 0, short, sampling=hot(min_tokens=30))])
    assert re.fullmatch("[ab]{3}", text(tokenizer, said[0]))


def test_the_model_chooses_among_its_end_tokens(tiny: Rig, tokenizer: Tokenizer) -> None:
    """If only end tokens are allowed, they keep their logits."""
    short = prepare(tiny, regex="a")
    other = tokenizer.token_to_id("<|im_end|>")
    for favourite in (EOS, other):
        new = admit(tokenizer, 0, short, sampling=hot(logit_bias={favourite: 100.0, EOS + other - favourite: -100.0}))
        new = replace(new, eos=(EOS, other))
        said = [step(tiny, [new] if number == 0 else None)[0] for number in range(2)]
        assert tokenizer.decode(said[:1]) == "a"
        assert said[1] == favourite
        tiny.step(released=[0])


def test_banning_the_only_allowed_token_is_an_error(tiny: Rig, tokenizer: Tokenizer) -> None:
    digits = prepare(tiny, regex=r"\d{3}")
    letter = tokenizer.encode("a").ids[:1]
    step(tiny, [admit(tokenizer, 0, digits, sampling=hot(allowed_token_ids=letter))])
    (failure,) = tiny.last_result.failures
    assert "every token is banned" in failure.error.message


def test_bad_words_that_ban_all_allowed_tokens_are_a_client_error(tiny: Rig, tokenizer: Tokenizer) -> None:
    """vllm-project/vllm#54218: a client must not be able to cause server errors."""
    answer = prepare(tiny, json_schema='{"type": "boolean"}')
    texts = [word[:length] for word in ("true", "false") for length in range(1, 6)]
    words = tuple((token,) for text in texts for token in tokenizer.encode(text).ids)
    step(tiny, [replace(admit(tokenizer, 0, answer), bad_words=words)])
    (failure,) = tiny.last_result.failures
    assert failure.error.code == finish_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert failure.error.field == "structured_output"
    text = "every token is banned: none that structured_output allows is permitted by bad_words"
    assert failure.error.message == text
    tiny.step(released=[0])


def test_equal_grammars_are_compiled_once(tiny: Rig) -> None:
    outcomes: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
    message = pb.StructuredOutput(regex="only once+")
    for _ in range(8):
        tiny.grammars.prepare(b"once", message, outcomes.put)
    times = {outcomes.get().compile_us for _ in range(8)}
    assert len(times - {0}) == 1


def test_an_unsatisfiable_constraint_is_refused(tiny: Rig) -> None:
    with pytest.raises(InvalidArgument, match="no text satisfies it"):
        prepare(tiny, json_schema=json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}))


def test_reasoning_markers_may_occur_in_free_text_and_begin_a_tag(tiny: Rig, tokenizer: Tokenizer) -> None:
    """The markers are special tokens, which ordinary tokens do not spell."""
    arguments = {"type": "json_schema", "json_schema": {"enum": [1, 2]}}
    tag = {"type": "tag", "begin": "<tool_call>", "content": arguments, "end": "</tool_call>"}
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag], "at_least_one": True}
    name = prepare(tiny, structural_tag=json.dumps({"format": {**form, "stop_after_first": True}}))
    think, end_of_thought, call = (tokenizer.token_to_id(text) for text in ("<think>", "</think>", "<tool_call>"))
    thought = [think, *tokenizer.encode("so").ids, end_of_thought]
    for output in ([], thought, [*tokenizer.encode("Hm").ids, *thought]):
        said = run(tiny, [admit(tokenizer, 0, name, output=[*output, call])])[0]
        assert text(tokenizer, said) in ("1</tool_call>", "2</tool_call>")
        tiny.step(released=[0])


def test_a_thinking_budget_ends_reasoning_that_the_grammar_allows(tiny: Rig, tokenizer: Tokenizer) -> None:
    """Under a grammar without reasoning a section opened by the prompt is never closed; the output still fulfils the
    grammar."""
    think, end = (tokenizer.token_to_id(text) for text in ("<think>", "</think>"))
    thought = [{"type": "any_text"}, {"type": "const_string", "value": "</think>"}]
    form = {"type": "sequence", "elements": [*thought, {"type": "json_schema", "json_schema": PERSON}]}
    open_section = prepare(tiny, structural_tag=json.dumps({"format": form}))
    plain = prepare(tiny, json_schema=json.dumps(PERSON))
    for temperature in (0.0, 2.0):
        sampling = hot(3, temperature=temperature, thinking_token_budget=5)
        new = [admit(tokenizer, slot, form, sampling=sampling) for slot, form in enumerate((open_section, plain))]
        new = [
            replace(one, tokens=[*one.tokens, think], num_prompt=one.num_prompt + 1, thinking_marks=(think, end))
            for one in new
        ]
        said = run(tiny, new)
        assert said[0].index(end) == 5
        assert json.loads(text(tokenizer, said[0][6:])).keys() == {"name", "age"}
        assert json.loads(text(tokenizer, said[1])).keys() == {"name", "age"}
        tiny.step(released=[0, 1])
