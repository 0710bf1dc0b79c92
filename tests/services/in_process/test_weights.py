"""Weight updates of a running engine: afterwards it generates what a fresh start with the new weights generates, and a
refused update changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLMEngine, SamplingParams, bundled
from quire.shared.errors import InvalidArgument
from tests.bundled_text import PREFIX, text_tensors

SETTINGS: dict[str, Any] = {"threads": 1, "num_blocks": 100, "dtype": "float32", "max_num_seqs": 4}
SAMPLING = SamplingParams(max_tokens=12, temperature=0, logprobs=1)
PROMPT = "Once upon a time there was a boy who counted: one, two, three, four,"
Tensors = dict[str, torch.Tensor]
NORM = "model.layers.0.input_layernorm.weight"
STORED = f"{PREFIX}{NORM}"  # in the file of the bundled model


def folder_of(path: Path, change: Callable[[Tensors], None]) -> Path:
    """Writes the bundled model with changed weights."""
    shutil.copytree(bundled.FOLDER, path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return path


def shake(tensors: Tensors) -> None:
    """Changes the weights enough that every layer affects the output."""
    noise = torch.Generator().manual_seed(3)
    for tensor in tensors.values():
        tensor.add_((torch.randn(tensor.shape, generator=noise) * 0.2 * tensor.float().std()).to(tensor))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("weights") / "other", shake)


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    with LLMEngine(**SETTINGS) as made:
        yield made


def ask(engine: LLMEngine, prompt: str = PROMPT, **sampling: Any) -> Any:
    engine.add_request("one", prompt, SAMPLING)
    return finish(engine)


def finish(engine: LLMEngine) -> Any:
    while engine.has_unfinished_requests():
        outputs = engine.step()
    (output,) = outputs
    assert output.error is None
    return output


def said(output: Any) -> list[Any]:
    """Returns the output with the bits of its log-probabilities."""
    return [(output.outputs[0].token_ids, [one.top for one in output.outputs[0].logprobs])]


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}])
def test_updated_weights_generate_the_text_of_a_fresh_start(other: Path, settings: dict[str, Any]) -> None:
    with LLMEngine(str(other), **(SETTINGS | settings)) as fresh:
        wanted = said(ask(fresh))
    with LLMEngine(**(SETTINGS | settings)) as engine:
        before = said(ask(engine))
        assert before != wanted
        engine.update_weights_from_disk(other, "step-7")
        output = ask(engine)
        assert said(output) == wanted
        assert (output.weight_version, output.cached_tokens) == ("step-7", 0)
        engine.update_weights_from_disk(str(bundled.FOLDER))
        output = ask(engine)
        assert (said(output), output.weight_version) == (before, "2")


def test_a_trainers_tensors_are_copied_and_not_retained(engine: LLMEngine, other: Path) -> None:
    (file,) = other.glob("*.safetensors")
    tensors = {name: tensor.float().requires_grad_() for name, tensor in load_file(file).items()}
    engine.update_weights_from_tensor(tensors.items())
    wanted = said(ask(engine))
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    assert said(ask(engine)) == wanted
    with LLMEngine(str(other), **SETTINGS) as fresh:
        assert said(ask(fresh)) == wanted


def test_tensors_by_the_names_of_a_text_model_are_taken(engine: LLMEngine, other: Path) -> None:
    """A trainer may hold the text part alone; names as transformers 5 has them in a LLaVA model work as well."""
    shaken = load_file(next(other.glob("*.safetensors")))
    with LLMEngine(str(other), **SETTINGS) as fresh:
        wanted = said(ask(fresh))
    before, plain = said(ask(engine)), text_tensors()
    for prefix in ("", "language_model.", "model.language_model."):
        named = {name if not prefix else prefix + name.removeprefix("model."): shaken[PREFIX + name] for name in plain}
        engine.update_weights_from_tensor(named.items())
        assert said(ask(engine)) == wanted, prefix
        engine.update_weights_from_tensor(plain.items())
        assert said(ask(engine)) == before


def test_a_running_request_continues_with_the_new_weights(engine: LLMEngine, other: Path) -> None:
    engine.add_request("one", PROMPT, SAMPLING)
    for _ in range(4):
        (output,) = engine.step()
    (first, version) = list(output.outputs[0].token_ids), output.weight_version
    assert (len(first), version) == (4, "0")
    engine.update_weights_from_disk(other)
    output = finish(engine)
    assert output.weight_version == "1"
    assert output.outputs[0].token_ids[:4] == first
    prompt = engine.get_tokenizer()(PROMPT)["input_ids"]
    engine.add_request("two", {"prompt_token_ids": prompt + first}, SamplingParams(max_tokens=8, temperature=0))
    assert output.outputs[0].token_ids[4:] == finish(engine).outputs[0].token_ids


def lack(tensors: Tensors) -> None:
    del tensors[STORED]


def cut(tensors: Tensors) -> None:
    tensors[STORED] = tensors[STORED][:-1].clone()


def widen(tensors: Tensors) -> None:
    tensors["model.of_nobody"] = torch.zeros(1)


@pytest.mark.parametrize(("change", "named"), [(lack, NORM), (cut, NORM), (widen, "model.of_nobody")])
def test_mismatching_weights_are_named_and_nothing_changes(
    engine: LLMEngine, tmp_path: Path, change: Callable[[Tensors], None], named: str
) -> None:
    def shaken(tensors: Tensors) -> None:
        shake(tensors)
        change(tensors)

    before = said(ask(engine))
    with pytest.raises(InvalidArgument, match=named):
        engine.update_weights_from_disk(folder_of(tmp_path / "wrong", shaken))
    output = ask(engine)
    assert (said(output), output.weight_version) == (before, "0")
    assert output.cached_tokens > 0, "what was cached still is"


def test_another_model_is_refused_by_what_differs(engine: LLMEngine, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "other", shake)
    config = folder / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-03'))
    assert config.read_text() != text
    with pytest.raises(InvalidArgument, match="rms_norm_eps"):
        engine.update_weights_from_disk(folder)
    with pytest.raises(InvalidArgument, match="does not exist"):
        engine.update_weights_from_disk(tmp_path / "nowhere")
    assert engine.weight_version == "0"


@pytest.mark.parametrize("wrong", [[(NORM, 3)], [(NORM, torch.zeros(3)), (NORM, torch.zeros(3))]])
def test_invalid_or_duplicate_tensors_are_named(engine: LLMEngine, wrong: list[tuple[str, Any]]) -> None:
    with pytest.raises(InvalidArgument, match=NORM):
        engine.update_weights_from_tensor(wrong)
