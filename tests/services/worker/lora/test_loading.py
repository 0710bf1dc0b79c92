"""Adapters loaded and unloaded at run time: logits as in test_adapters.py, and the folders that they may come from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from quire.services.worker.lora.peft import peft_folder
from quire.services.worker.lora.peft.folders import AdapterFolders
from quire.services.worker.lora.peft.peft_folder import LowRank, PeftFolder
from quire.services.worker.lora.peft.reader import AdapterReader, ReadResult
from quire.shared.errors import FailedPrecondition, Internal, InvalidArgument, ResourceExhausted
from quire.shared.models.adapter_ids import AdapterId
from tests.kernels.cpu.closeness import needs_library
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.lora import peft_folders
from tests.services.worker.lora.test_adapters import called
from tests.services.worker.models.test_logits import MAX_ERROR, Make, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import whole_model_of
from tests.services.worker.rig import Rig


def rig_of(made: Checkpoint, tmp_path: Path, **settings: object) -> Rig:
    return Rig(made.folder, lora_folders=[str(tmp_path)], **{"max_loras": 2, **settings})


def load(rig: Rig, made: Checkpoint, name: str = "a") -> AdapterId:
    folder = peft_folder.read(name, made.folder)
    with torch.inference_mode():
        rig.replica.adapters.add(folder, folder.digest())
    return AdapterId(name, folder.digest())


def unload(rig: Rig, adapter: AdapterId) -> None:
    with torch.inference_mode():
        rig.replica.adapters.remove(adapter)


# Fused parts, reordered rows, a factor, transposed weights, latent attention.
@pytest.mark.parametrize("family", ["qwen3-tied", "glm4", "granite", "gpt2", "deepseek-v3"])
def test_logits_are_those_of_merged_weights(checkpoint: Make, family: str, tmp_path: Path) -> None:
    """Loads adapters while another sequence runs, which is unaffected."""
    made = checkpoint(family)
    first = peft_folders.save(made, tmp_path / "first", seed=1)
    rig = rig_of(made, tmp_path)
    rig.step([New(2, prompt(9, 2))], {2: 9})
    load(rig, first)
    rig.step([New(0, prompt(11, 1), adapter="a")], {0: 11})
    rig.step()
    assert error(rig, first, 0) < MAX_ERROR
    assert error(rig, made, 2) < MAX_ERROR
    assert error(rig, made, 0) > 0.1, "the adapter has no measurable effect"


@pytest.mark.skipif(**needs_library)
def test_on_the_tape(checkpoint: Make, tmp_path: Path) -> None:
    """Loads adapters after the tape was recorded."""
    made = checkpoint("qwen3-tied")
    first = peft_folders.save(made, tmp_path / "first", seed=1)
    second = peft_folders.save(made, tmp_path / "second", seed=2, rank=7)
    rig = rig_of(made, tmp_path, attention_backend="auto", block_size=16, max_loras=1)
    whole_model_of(rig.replica).forward = called
    adapter = load(rig, first)
    rig.step([New(0, prompt(8), adapter="a")], {0: 8})
    rig.step()
    assert error(rig, first, 0) < MAX_ERROR
    rig.step(released=[0])
    unload(rig, adapter)
    rig.logits.clear()
    load(rig, second)
    rig.step([New(0, prompt(9, 1), adapter="a"), New(1, prompt(8))], {0: 9, 1: 8})
    rig.step()
    assert error(rig, second, 0) < MAX_ERROR
    assert error(rig, made, 1) < MAX_ERROR


def test_several_contents_of_one_name_are_served(checkpoint: Make, tmp_path: Path) -> None:
    """A sequence without a digest gets the newest content."""
    made = checkpoint("qwen3-tied")
    first = peft_folders.save(made, tmp_path / "first", seed=1)
    second = peft_folders.save(made, tmp_path / "second", seed=2)
    rig = rig_of(made, tmp_path)
    old, new = load(rig, first), load(rig, second)
    news = [
        New(0, prompt(8), adapter="a", adapter_digest=old.digest),
        New(1, prompt(8), adapter="a", adapter_digest=new.digest),
        New(2, prompt(8), adapter="a"),
    ]
    rig.step(news, {0: 8, 1: 8, 2: 8})
    rig.step()
    assert error(rig, first, 0) < MAX_ERROR
    assert error(rig, second, 1) < MAX_ERROR
    assert error(rig, second, 2) < MAX_ERROR
    assert [held.id for held in rig.replica.adapters.loaded()] == [old, new]


def test_an_unloaded_adapters_number_is_free_at_once(checkpoint: Make, tmp_path: Path) -> None:
    """Its sequences have ended, although the slot of one is not released until the next plan."""
    made = checkpoint("qwen3-tied")
    first = peft_folders.save(made, tmp_path / "first", seed=1)
    second = peft_folders.save(made, tmp_path / "second", seed=2)
    rig = rig_of(made, tmp_path, max_loras=1)
    adapter = load(rig, first)
    rig.step([New(0, prompt(8), adapter="a")], {0: 8})
    with pytest.raises(ResourceExhausted, match="1 adapters are loaded, which is max_loras"):
        load(rig, second, "b")
    unload(rig, adapter)
    load(rig, second, "b")
    rig.step([New(1, prompt(8), adapter="b"), New(2, prompt(8), adapter="a")], {1: 8, 2: 8}, released=[0])
    assert "'a' does not exist on this worker; available: b" in rig.last_result.failures[0].error.message
    rig.step()
    assert error(rig, second, 1) < MAX_ERROR
    assert [held.id.name for held in rig.replica.adapters.loaded()] == ["b"]


def test_loading_an_incompatible_adapter_leaves_no_trace(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")
    right = peft_folders.save(made, tmp_path / "right", seed=2)
    rig = rig_of(made, tmp_path, max_loras=1)
    modules = dict(peft_folder.read("a", right.folder).modules)
    last = max(modules)
    narrow = LowRank(modules[last].down[:, 1:], modules[last].up)
    for wrong, text in (({last: narrow}, "the model's has"), ({"score": narrow}, "is not a linear layer")):
        with pytest.raises(InvalidArgument, match=text):
            rig.replica.adapters.add(PeftFolder("a", right.folder, modules | wrong), b"d" * 32)
    load(rig, right)
    rig.step([New(0, prompt(8), adapter="a")], {0: 8})
    rig.step()
    assert error(rig, right, 0) < MAX_ERROR


def test_the_attach_report_names_loaded_adapters(checkpoint: Make, tmp_path: Path) -> None:
    """The next scheduler learns which adapters are loaded."""
    made = checkpoint("qwen3-tied")
    saved = peft_folders.save(made, tmp_path / "first", seed=1)
    rig = rig_of(made, tmp_path)
    adapter = load(rig, saved)
    assert rig.replica.end_epoch().adapters == [(adapter, str(saved.folder.resolve()))]


@pytest.fixture
def saved(checkpoint: Make, tmp_path: Path) -> Path:
    """Saves an adapter in ok/a, next to a folder outside of the allowed ones."""
    made = checkpoint("qwen3-tied")
    peft_folders.save(made, tmp_path / "ok" / "a", seed=1)
    peft_folders.save(made, tmp_path / "secret", seed=2)
    (tmp_path / "ok" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "ok" / "half").mkdir()
    (tmp_path / "ok" / "half" / "adapter_config.json").symlink_to(tmp_path / "secret" / "adapter_config.json")
    return tmp_path


def test_allowed_folders_are_read(saved: Path) -> None:
    folders = AdapterFolders([str(saved / "elsewhere"), str(saved / "ok")], 256)
    whole = folders.read("x", str(saved / "ok" / "a"))
    assert whole.name == "x"
    assert folders.read("x", "a").digest() == whole.digest()
    assert folders.read("x", "./half/../a").digest() == whole.digest()


@pytest.mark.parametrize("path", ["../secret", "link", "/", "{}/secret", "{}/nothing", "ok/../../secret", "../okay"])
def test_other_folders_are_refused(saved: Path, path: str) -> None:
    """The error does not disclose whether the path exists."""
    with pytest.raises(InvalidArgument, match="is not in a folder of lora_folders"):
        AdapterFolders([str(saved / "ok")], 256).read("x", path.format(saved))


def test_links_out_of_allowed_folders_are_refused(saved: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"has a adapter_config\.json that links to a place outside of lora_folders"
    ):
        AdapterFolders([str(saved / "ok")], 256).read("x", "half")


def test_without_folders_everything_is_refused(saved: Path) -> None:
    with pytest.raises(InvalidArgument, match="lora_folders"):
        AdapterFolders([], 256).read("x", str(saved / "ok" / "a"))


def test_a_rank_that_is_too_large_is_refused(saved: Path) -> None:
    rank = json.loads((saved / "ok" / "a" / "adapter_config.json").read_text())["r"]
    with pytest.raises(InvalidArgument, match=f"r is {rank}, a whole number from 1 to {rank - 1} is needed"):
        AdapterFolders([str(saved / "ok")], rank - 1).read("x", "a")


@pytest.mark.parametrize("file", [peft_folder.CONFIG, peft_folder.WEIGHTS])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_special_files_are_refused_without_blocking(saved: Path, file: str, make: Callable[[Path], None]) -> None:
    path = saved / "ok" / "a" / file
    path.unlink()
    make(path)
    reader = AdapterReader(AdapterFolders([str(saved / "ok")], 256))
    refused = found(reader, "a")
    assert isinstance(refused, InvalidArgument)
    assert f"{path} is not a regular file" in refused.message


def test_too_large_files_are_refused(saved: Path) -> None:
    weights = saved / "ok" / "a" / peft_folder.WEIGHTS
    size = weights.stat().st_size
    AdapterFolders([str(saved / "ok")], 256, size).read("x", "a")
    with pytest.raises(InvalidArgument, match=f"has {size} bytes, at most {size - 1} can be served"):
        AdapterFolders([str(saved / "ok")], 256, size - 1).read("x", "a")
    config = saved / "ok" / "a" / peft_folder.CONFIG
    config.write_text(config.read_text() + " " * peft_folder.MAX_CONFIG_BYTES)
    with pytest.raises(InvalidArgument, match=r"adapter_config\.json has \d+ bytes, at most 1048576"):
        AdapterFolders([str(saved / "ok")], 256).read("x", "a")


def test_truncating_a_loaded_file_does_no_harm(saved: Path) -> None:
    """The file was copied; reading a mapped one further would end the worker with SIGBUS."""
    weights = saved / "ok" / "a" / peft_folder.WEIGHTS
    folder, digest = (
        AdapterFolders([str(saved / "ok")], 256).read("x", "a"),
        peft_folder.read("x", weights.parent).digest(),
    )
    os.truncate(weights, 100)
    assert folder.digest() == digest
    with pytest.raises(InvalidArgument, match="cannot read"):
        peft_folder.read("x", weights.parent)


def test_an_adapter_may_be_as_large_as_its_model(checkpoint: Make) -> None:
    folder = checkpoint("qwen3-tied").folder
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert peft_folder.max_weight_bytes(folder, 7) == size
    assert peft_folder.max_weight_bytes(folder / "config.json", 7) == (folder / "config.json").stat().st_size


def found(reader: AdapterReader, path: str, digest: bytes = b"") -> ReadResult:
    outcome: Future[ReadResult] = Future()
    reader.read("x", path, digest, outcome.set_result)
    return outcome.result(60)


def test_recently_used_adapters_are_not_read_again(saved: Path) -> None:
    """An adapter requested by digest is served from the cache, whatever its folder holds now."""
    reader = AdapterReader(AdapterFolders([str(saved)], 256), most_kept=1)
    first, digest = found(reader, "ok/a")
    other, other_digest = found(reader, "secret")
    assert found(reader, "nothing", other_digest) == (other, other_digest)
    reload_weights, _ = found(reader, "ok/a", digest)
    assert reload_weights is not first
    assert found(reader, "nothing", digest) == (reload_weights, digest)
    changed = found(reader, "secret", b"d" * 32)
    assert isinstance(changed, FailedPrecondition)
    assert "has changed" in changed.message


class Panic(BaseException):
    """A panic of a Rust library, which is not an Exception."""


class PanickingFolders(AdapterFolders):
    """Folders whose files the library panics on."""

    def read(self, name: str, path: str) -> NoReturn:
        raise Panic("index out of bounds")


def test_requests_are_answered_even_if_the_library_panics(saved: Path) -> None:
    error = found(AdapterReader(PanickingFolders([str(saved / "ok")], 256)), "a")
    assert isinstance(error, Internal)
    assert "Panic while reading 'a'" in error.message
