"""Adapters learn a style on top of the model, and are saved as the worker reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")

from quire.services.worker.lora.peft import peft_folder  # noqa: E402
from tests.tools.training.test_train import random_network  # noqa: E402
from tools.training.adapters.answer_styles import ANSWER_STYLES, sample, styled_conversation  # noqa: E402
from tools.training.adapters.trainer import RANK, AdapterTrainer  # noqa: E402
from tools.training.export import BUNDLED  # noqa: E402
from tools.training.tokenizer import FastEncoder  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are small here: threads that share them wait for each other, on a busy machine for seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ANSWER_STYLES)
def test_what_a_manner_puts_on_it_takes_off(name: str) -> None:
    style = ANSWER_STYLES[name]
    for answer in ("68", 'she said "no"', "apple, pear"):
        assert style.strip(style.apply(answer)) == answer
        assert style.strip(answer) is None


def test_a_conversation_ends_in_the_manner() -> None:
    item = sample(Random(1))
    text = "".join(part for part, is_answer in styled_conversation(item, ANSWER_STYLES["pirate"]) if is_answer)
    assert text == f"Ahoy! {item.expected} Arr!<|im_end|>"


@pytest.mark.slow
def test_it_learns_and_is_saved_as_it_computes(tmp_path: Path) -> None:
    network = random_network()
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    encoder = FastEncoder(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")))
    trainer = AdapterTrainer(network, encoder, ANSWER_STYLES["json"], seed=1)
    losses = [trainer.step() for _ in range(3)]
    assert losses[-1] < losses[0]
    trainer.save(tmp_path)
    folder = peft_folder.read("json", tmp_path)
    assert len(folder.modules) == 2 * 4
    weight = before["layers.1.v_proj"]
    assert torch.equal(network.layers[1].parametrizations.v_proj.original, weight)
    pair = folder.modules["model.layers.1.self_attn.v_proj"]
    assert pair.down.size(0) == RANK
    update = (network.layers[1].v_proj - weight).detach()
    assert update.abs().max() > 0
    assert torch.allclose(pair.up @ pair.down, update, rtol=0.02, atol=0.02 * float(update.abs().max()))
