"""A checkpoint converted to GGUF is the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.models.gguf.blocks import DECODE
from quire.shared.errors import InvalidArgument
from quire.shared.gguf.folder import as_folder
from quire.shared.gguf.kinds import KINDS
from tests import gguf_files
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
FAMILIES = {
    "llama": "llama",
    "llama-biases-tied": "llama",
    "llama-linear-rope": "llama",
    "mistral": "llama",
    "qwen2-tied": "qwen2",
    "qwen3-tied": "qwen3",
    "qwen3-yarn": "qwen3",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def answer(folder: Path, num_tokens: int = 6, **settings: Any) -> tuple[list[int], torch.Tensor]:
    """Returns greedy tokens after the prompt, and the logits they were chosen from."""
    rig = Rig(folder, **settings)
    rig.step([New(0, PROMPT)], {0: len(PROMPT)})
    for _ in range(num_tokens - 1):
        rig.step()
    return rig.tokens(0)[len(PROMPT) :], torch.stack(rig.logits[0])


def as_gguf(made: Checkpoint, folder: Path, architecture: str, matrices: Any = gguf_files.plain) -> Path:
    described = gguf_files.describing(made, architecture)
    return gguf_files.write(folder / "model.gguf", described, gguf_files.of_checkpoint(made, architecture, matrices))


@pytest.mark.parametrize(("family", "architecture"), FAMILIES.items())
def test_floats_are_the_same_model(checkpoint: Make, tmp_path: Path, family: str, architecture: str) -> None:
    made = checkpoint(family)
    tokens, logits = answer(as_folder(as_gguf(made, tmp_path, architecture)))
    wanted, those = answer(made.folder)
    assert tokens == wanted
    assert torch.equal(logits, those)


def test_precomputed_rope_frequencies(checkpoint: Make, tmp_path: Path) -> None:
    """For Llama 3.1, llama.cpp stores a tensor of factors in place of the parameters they are computed from."""
    made = checkpoint("llama-llama3-rope")
    plain = 500.0 ** -(torch.arange(0, 16, 2) / 16)
    tensors = gguf_files.of_checkpoint(made, "llama")
    tensors["rope_freqs.weight"] = gguf_files.plain(plain / made.model.model.rotary_emb.inv_freq)
    file = gguf_files.write(tmp_path / "model.gguf", gguf_files.describing(made, "llama"), tensors)
    tokens, logits = answer(as_folder(file))
    wanted, those = answer(made.folder)
    assert tokens == wanted
    torch.testing.assert_close(logits, those, rtol=1e-4, atol=1e-4)


def test_a_file_in_parts_is_one_model(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    tensors, described = gguf_files.of_checkpoint(made, "llama"), gguf_files.describing(made, "llama")
    half = len(tensors) // 2
    parts = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    names = [tmp_path / f"model-{number:05}-of-00002.gguf" for number in (1, 2)]
    gguf_files.write(names[0], described | {"split.count": 2}, parts[0])
    gguf_files.write(names[1], {"split.no": 1, "split.count": 2}, parts[1])
    folders = [as_folder(name) for name in names]
    assert [folder.name for folder in folders] == ["model", "model"]
    for folder in folders:
        assert torch.equal(answer(folder, 1)[1], answer(made.folder, 1)[1])
    names[1].unlink()
    with pytest.raises(InvalidArgument, match=r"model-00002-of-00002\.gguf is missing"):
        as_folder(names[0])


def wide(folder: Path) -> Checkpoint:
    """Writes a checkpoint whose rows consist of whole blocks, also of the K kinds."""
    heads = {"num_attention_heads": 8, "head_dim": 32}
    return checkpoints.make("llama", folder, hidden_size=256, intermediate_size=512, num_hidden_layers=2, **heads)


KINDS_AND_ERRORS = {"Q8_0": (gguf_files.q8_0, 0.05), "Q4_0": (gguf_files.q4_0, 0.7)}


@pytest.mark.parametrize("kind", KINDS_AND_ERRORS)
def test_error_of_quantized_blocks(tmp_path: Path, kind: str) -> None:
    """The relative RMS error of logits is at most 2 % with 8 bits and 36 % with 4 bits, of random weights."""
    matrices, most = KINDS_AND_ERRORS[kind]
    made = wide(tmp_path / "hf")
    _, logits = answer(as_folder(as_gguf(made, tmp_path, "llama", matrices)), 1)
    _, those = answer(made.folder, 1)
    error = float((logits - those).square().mean().sqrt() / those.std())
    assert most / 10 < error < most


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS.values() if kind.is_quantized])
def test_blocks_equal_their_decoded_values(tmp_path: Path, kind: str) -> None:
    """Each block type equals a checkpoint of its decoded values; rows of queries and keys are permuted."""
    made = wide(tmp_path / "hf")
    stored: dict[str, torch.Tensor] = {}

    def matrices(tensor: torch.Tensor) -> gguf_files.Tensor:
        blocks = gguf_files.random_blocks(kind, tensor.numel(), seed=len(stored))
        values = DECODE[kind](torch.from_numpy(blocks)).view(tensor.shape)
        stored[str(len(stored))] = values
        return gguf_files.Tensor(tensor.shape, gguf_files.NUMBERS[kind], blocks.tobytes())

    file = as_gguf(made, tmp_path, "llama", matrices)
    names = [name for name, tensor in made.model.state_dict().items() if tensor.dim() > 1]
    held = load_file(made.folder / "model.safetensors")
    heads = {"q_proj": 8, "k_proj": 2}
    for name, values in zip(names, stored.values(), strict=True):
        count = heads.get(name.split(".")[-2], 0)
        held[name] = gguf_files.in_halves(values, count) if count else values
    save_file(held, made.folder / "model.safetensors")
    assert torch.equal(answer(as_folder(file), 2)[1], answer(made.folder, 2)[1])


def test_a_tensor_that_is_missing_is_named(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    tensors = gguf_files.of_checkpoint(made, "llama")
    del tensors["blk.1.ffn_up.weight"]
    folder = as_folder(gguf_files.write(tmp_path / "model.gguf", gguf_files.describing(made, "llama"), tensors))
    with pytest.raises(InvalidArgument, match=r"lacks tensors.*: model\.layers\.1\.mlp\.up_proj\.weight$"):
        Rig(folder)


def test_a_tensor_that_is_not_known_is_named(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    tensors = gguf_files.of_checkpoint(made, "llama") | {"blk.0.surprise.weight": gguf_files.plain(torch.ones(4))}
    folder = as_folder(gguf_files.write(tmp_path / "model.gguf", gguf_files.describing(made, "llama"), tensors))
    with pytest.raises(InvalidArgument, match=r"holds tensors that the model does not have: blk\.0\.surprise\.weight"):
        Rig(folder)
