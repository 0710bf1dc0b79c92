"""Whether the output head is tied to the embedding is decided as by transformers, from config and tensors together."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint, make
from tests.services.worker.models.test_text_parts import MAX_ERROR, MODELS, saved, text_of
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

PROMPT = [(7 * i + 3) % VOCAB_SIZE for i in range(9)]
FILE = "model.safetensors"


def write_tying(folder: Path, *, outer: bool | None, inner: bool | None = None) -> None:
    """Writes the tie fields of config.json; None: absent."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for section, value in ((values, outer), (values.get("text_config", {}), inner)):
        section.pop("tie_word_embeddings", None)
        if value is not None:
            section["tie_word_embeddings"] = value
    path.write_text(json.dumps(values))


def rows_of(folder: Path, **settings: object) -> tuple[torch.Tensor, list[int]]:
    rig = Rig(folder, **settings)
    rig.step([New(0, PROMPT)], {0: len(PROMPT)})
    rig.step()
    return torch.stack(rig.logits[0]), rig.tokens(0)


def check(folder: Path, name: str, **settings: object) -> None:
    """Compares with transformers on the same folder."""
    rows, tokens = rows_of(folder, **settings)
    model = getattr(transformers, name.partition("-")[0]).from_pretrained(folder, attn_implementation="eager").eval()
    wanted = text_of(Checkpoint(folder, model)).logits(tokens)[len(tokens) - len(rows) - 1 : -1]
    torch.testing.assert_close(rows, wanted, atol=MAX_ERROR, rtol=0)


@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("name", MODELS)
def test_stored_output_head_overrides_the_config(
    name: str, outer: bool | None, inner: bool | None, untied: Callable[[str], Path], tmp_path: Path
) -> None:
    """The default of a wrapper config in transformers 5 overrides the text model's value (vllm#51063)."""
    shutil.copytree(untied(name), tmp_path, dirs_exist_ok=True)
    write_tying(tmp_path, outer=outer, inner=inner)
    check(tmp_path, name)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of models with a head of their own by name, each written once."""

    @functools.cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("untied")
        save_untied(name, folder)
        return folder

    return folder_of


def save_untied(name: str, folder: Path) -> None:
    made = saved(name, folder)
    tensors = load_file(folder / FILE)
    head = next((key for key in tensors if key.endswith("lm_head.weight")), "lm_head.weight")
    shape = (VOCAB_SIZE, made.model.config.get_text_config().hidden_size)
    tensors[head] = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.2
    save_file(tensors, folder / FILE, {"format": "pt"})


@pytest.mark.parametrize(("family", "name"), [("llama", "LlamaForCausalLM"), ("qwen3-tied", "Qwen3ForCausalLM")])
@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_a_plain_model_is_tied_only_to_an_equal_head(family: str, name: str, impl: str, tmp_path: Path) -> None:
    make(family, tmp_path)
    tensors = load_file(tmp_path / FILE)
    embedding = tensors["model.embed_tokens.weight"]
    write_tying(tmp_path, outer=True)
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tmp_path / FILE, {"format": "pt"})
    check(tmp_path, name, model_impl=impl)
    save_file({**tensors, "lm_head.weight": embedding.flip(0).contiguous()}, tmp_path / FILE, {"format": "pt"})
    check(tmp_path, name, model_impl=impl)


def test_a_head_in_another_file_is_found(tmp_path: Path) -> None:
    made = make("qwen3-tied", tmp_path)
    tensors = load_file(tmp_path / FILE)
    save_file({"lm_head.weight": tensors["model.embed_tokens.weight"] * -1}, tmp_path / "z.safetensors")
    weights = dict.fromkeys(tensors, FILE) | {"lm_head.weight": "z.safetensors"}
    (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": weights}))
    rows, tokens = rows_of(tmp_path)
    wanted = -made.logits(tokens)[len(tokens) - len(rows) - 1 : -1]
    torch.testing.assert_close(rows, wanted, atol=MAX_ERROR, rtol=0)
