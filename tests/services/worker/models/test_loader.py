"""Checkpoints are loaded completely or rejected naming the error."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.building.build import build_replica
from quire.services.worker.models.loading.progress import Progress
from quire.shared.errors import InvalidArgument
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
WEIGHTS = "model.safetensors"


def last_logits(folder: Path, **settings: object) -> torch.Tensor:
    rig = Rig(folder, **settings)
    rig.step([New(0, PROMPT)], {0: len(PROMPT)})
    return rig.logits[0][0]


@pytest.fixture
def copy(checkpoint: Make, tmp_path: Path) -> Path:
    """Copies a checkpoint for modification."""
    return Path(shutil.copytree(checkpoint("llama").folder, tmp_path / "copy"))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def test_a_sharded_checkpoint_is_the_same_model(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen2-tied")
    made.model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(last_logits(tmp_path), last_logits(made.folder))


def test_an_index_names_the_files_that_count(checkpoint: Make, tmp_path: Path) -> None:
    """Files that the index does not name are not read."""
    made = checkpoint("llama")
    made.model.save_pretrained(tmp_path, max_shard_size="40KB")
    save_file({"stray": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert torch.equal(last_logits(tmp_path), last_logits(made.folder))


@pytest.mark.parametrize(
    ("family", "base"), [("gpt2", "transformer."), ("qwen3-tied", "model."), ("opt", "model.decoder.")]
)
def test_a_checkpoint_may_hold_the_decoder_alone(checkpoint: Make, tmp_path: Path, family: str, base: str) -> None:
    """Examples are GPT-2 on the hub and many embedding models."""
    made = checkpoint(family)
    folder = Path(shutil.copytree(made.folder, tmp_path / "copy"))
    tensors = load_file(folder / WEIGHTS)
    assert any(name.startswith(base) for name in tensors)
    save_file({name.removeprefix(base): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)
    assert torch.equal(last_logits(folder), last_logits(made.folder))


def test_a_missing_tensor_is_named(copy: Path) -> None:
    rewrite(copy, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(InvalidArgument, match=r"lacks tensors.*: model\.layers\.1\.mlp\.up_proj\.weight$"):
        Rig(copy)


def test_an_unexpected_tensor_is_named(copy: Path) -> None:
    rewrite(copy, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)})
    with pytest.raises(InvalidArgument, match=r"does not have: model\.layers\.0\.self_attn\.q_proj\.bias$"):
        Rig(copy)


def test_a_tensor_of_another_shape_is_named_with_both(copy: Path) -> None:
    rewrite(copy, **{"model.norm.weight": torch.zeros(47)})
    with pytest.raises(InvalidArgument, match=r"model\.norm\.weight has shape \[47\], config\.json implies \[48\]"):
        Rig(copy)


def fuse_experts(folder: Path) -> None:
    """Stacks all experts of a layer in one tensor, as transformers 5 has them in memory."""
    tensors = load_file(folder / WEIGHTS)
    names = [name for name in tensors if ".experts.0.gate_proj" in name]
    for prefix in [name.removesuffix(".0.gate_proj.weight") for name in names]:
        count = sum(name.startswith(prefix) for name in tensors) // 3
        parts = [
            [tensors.pop(f"{prefix}.{i}.{part}_proj.weight") for i in range(count)] for part in ("gate", "up", "down")
        ]
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([torch.stack(parts[0]), torch.stack(parts[1])], 1)
        tensors[f"{prefix}.down_proj"] = torch.stack(parts[2])
    save_file(tensors, folder / WEIGHTS)


def test_experts_may_be_one_tensor(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-moe-tied")
    shutil.copytree(made.folder, tmp_path / "fused")
    fuse_experts(tmp_path / "fused")
    assert torch.equal(last_logits(tmp_path / "fused"), last_logits(made.folder))


def test_an_expert_that_is_missing_is_named(checkpoint: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("mixtral").folder, tmp_path / "copy"))
    name = "model.layers.2.block_sparse_moe.experts.3.w3.weight"
    rewrite(folder, **{name: None})
    with pytest.raises(InvalidArgument, match=f"lacks tensors.*: {name.replace('.', chr(92) + '.')}$"):
        Rig(folder)


def test_experts_in_mxfp4_are_widened(tmp_path: Path) -> None:
    """They are dequantized as in transformers: a checkpoint of the dequantized weights is the same model."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # slow import

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "num_hidden_layers": 2}
    wide, packed = tmp_path / "wide", tmp_path / "packed"
    checkpoints.make("gpt-oss", wide, **sizes)
    tensors = load_file(wide / WEIGHTS)
    shutil.copytree(wide, packed)
    given = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, width, rows = tensors[name].shape
        blocks = torch.randint(256, (count, rows, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 125, (count, rows, width // 32), dtype=torch.uint8)
        given.update({f"{name}_blocks": blocks, f"{name}_scales": scales})
        del given[name]
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, wide / WEIGHTS)
    save_file(given, packed / WEIGHTS)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config))
    assert torch.equal(last_logits(packed), last_logits(wide))


def test_derived_tensors_of_old_checkpoints_are_skipped(copy: Path) -> None:
    expected = last_logits(copy)
    rewrite(copy, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert torch.equal(last_logits(copy), expected)


@pytest.mark.parametrize("names", ["attn.k_scale attn.v_scale", "k_scale v_scale", "kv_scale", "k_proj.k_scale"])
def test_scales_of_cached_keys_and_values_are_logged_and_not_used(
    copy: Path, caplog: pytest.LogCaptureFixture, names: str
) -> None:
    """llm-compressor#967, sglang PR 1559 and PR 20870: checkpoints with scales for a cache in FP8 did not load."""
    expected = last_logits(copy)
    rewrite(copy, **{f"model.layers.0.self_attn.{name}": torch.tensor([0.5]) for name in names.split()})
    with caplog.at_level(logging.INFO, "quire"):
        assert torch.equal(last_logits(copy), expected)
    assert "scales of cached keys and values are not used" in caplog.text


def test_duplicate_tied_head_is_skipped(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")
    folder = Path(shutil.copytree(made.folder, tmp_path / "copy"))
    table = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    rewrite(folder, **{"lm_head.weight": table.clone()})
    assert torch.equal(last_logits(folder), last_logits(made.folder))


def test_a_folder_without_weights_is_refused(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    with pytest.raises(InvalidArgument, match=r"contains none of \*\.safetensors"):
        Rig(copy)


def test_a_broken_file_is_refused(copy: Path) -> None:
    (copy / WEIGHTS).write_bytes(b"not a tensor")
    with pytest.raises(InvalidArgument, match="cannot read"):
        Rig(copy)


def test_a_pointer_in_place_of_a_file_is_named_with_the_remedy(copy: Path) -> None:
    """Clones without Git LFS have such pointer files."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 15\n"
    (copy / WEIGHTS).write_text(pointer)
    with pytest.raises(InvalidArgument, match=f"cannot read .*{WEIGHTS}: it is a pointer of Git LFS.*git lfs pull"):
        Rig(copy)


def test_an_index_that_names_a_missing_file_is_refused(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(InvalidArgument, match=r"cannot read .*gone"):
        Rig(copy)


@pytest.mark.parametrize("content", ["", '{"weight_map": {"x"', "{}", "[]", '{"weight_map": ["x"]}'])
def test_a_torn_index_is_named(copy: Path, content: str) -> None:
    (copy / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InvalidArgument, match=r"model.safetensors.index.json is not an index with a weight_map"):
        Rig(copy)


@pytest.mark.parametrize("family", ["llama-biases-tied", "qwen3-tied"])
def test_dummy_weights_follow_the_seed_and_stay_finite(tmp_path: Path, family: str) -> None:
    folder = checkpoints.make(family, tmp_path, num_hidden_layers=24).folder
    (folder / WEIGHTS).unlink()
    first, again, other = (last_logits(folder, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.1 < first.std() < 10


def older_format(made: Checkpoint, folder: Path, *, sharded: bool) -> Path:
    """Saves the same weights in PyTorch's older format."""
    folder.mkdir()
    (folder / "config.json").write_text((made.folder / "config.json").read_text())
    tensors = made.model.state_dict()
    names = sorted(tensors)
    parts = [names[::2], names[1::2]] if sharded else [names]
    files = {f"pytorch_model-{i}.bin" if sharded else "pytorch_model.bin": part for i, part in enumerate(parts)}
    for file, part in files.items():
        torch.save({name: tensors[name] for name in part}, folder / file)
    if sharded:
        placed = {name: file for file, part in files.items() for name in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_older_checkpoints_hold_the_same(checkpoint: Make, tmp_path: Path, sharded: bool) -> None:
    made = checkpoint("llama")
    older = older_format(made, tmp_path / "older", sharded=sharded)
    assert torch.equal(last_logits(older), last_logits(made.folder))


def test_a_pickle_that_is_more_than_tensors_is_not_run(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    folder = older_format(made, tmp_path / "older", sharded=False)

    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return eval, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    torch.save({"model.norm.weight": Harm()}, folder / "pytorch_model.bin")
    with pytest.raises(InvalidArgument, match=r"cannot read .*pytorch_model\.bin"):
        Rig(folder)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_breaks_off_is_named(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    folder = older_format(made, tmp_path / "older", sharded=False)
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(InvalidArgument, match=r"cannot read .*pytorch_model\.bin"):
        Rig(folder)


def test_loading_progress_is_reported(checkpoint: Make) -> None:
    folder, seen = checkpoint("llama").folder, []

    class Watched(Progress):
        def __setattr__(self, name: str, value: int) -> None:
            super().__setattr__(name, value)
            if name == "loaded_bytes" and value:
                seen.append((value, self.total_bytes))

    build_replica(Rig.settings(folder), progress=Watched())
    sizes = [tensor.nbytes for tensor in load_file(folder / WEIGHTS).values()]
    loaded, totals = zip(*seen, strict=True)
    assert len(loaded) == len(sizes)
    assert (loaded[-1], set(totals)) == (sum(sizes), {sum(sizes)})
    assert list(loaded) == sorted(loaded)
