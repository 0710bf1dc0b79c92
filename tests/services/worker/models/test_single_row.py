"""The chain for single rows computes the same as the decoder. Without CUDA in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire import kernels
from quire.kernels.triton.moe.expert_layers import prepare_experts
from quire.kernels.triton.single_row.row_experts import RowExpertsTile
from quire.kernels.triton.single_row.row_linear import RowTile
from quire.services.worker.layers.sharding import Shard
from quire.services.worker.models import single_row
from quire.services.worker.models.config.block_config import AttentionConfig
from tests.kernels.triton.tuned import tune
from tests.services.worker import checkpoints
from tests.services.worker.lora import peft_folders
from tests.services.worker.models.test_logits import error
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_sharding import ranked
from tests.services.worker.replica_internals import current_model_of, runner_of
from tests.services.worker.rig import Rig

PROMPT = [5, 9, 1, 77, 30, 12]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-tied", "llama-biases-tied", "qwen2-windows", "qwen3-moe-some-layers"])
@torch.inference_mode()
def test_logits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, "single_row.row_attention", splits=2)
    monkeypatch.setitem(kernels.PACKAGES, "cpu", ("quire.kernels.reference",))
    monkeypatch.setattr("quire.kernels.reference.prepare_experts", prepare_experts)  # also used by the chain
    tune(monkeypatch, "single_row.row_experts", tile=RowExpertsTile(up=64, down=64))
    made = checkpoints.make(family, tmp_path, **SIZES)
    rig = Rig(
        made.folder,
        device="cuda" if torch.cuda.is_available() else "cpu",
        attention_backend="reference",
        cuda_graphs=False,
    )
    runner = runner_of(rig.replica)
    chain = single_row.SingleRowProgram(current_model_of(rig.replica), pdl=torch.cuda.is_available())
    rig.step([New(0, PROMPT)], {0: len(PROMPT)})
    batches = []
    forward = current_model_of(rig.replica).forward
    current_model_of(rig.replica).forward = lambda batch, caches: (batches.append(batch), forward(batch, caches))[1]
    for _ in range(3):  # one of them starts a block
        rig.step()
        logits = chain.logits(batches[-1], runner.caches)  # stores the same keys and values again
        torch.testing.assert_close(logits.cpu(), rig.logits[0][-1].unsqueeze(0), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_adapters_in_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters cover all linear layers and single parts of fused ones; afterwards no adapter is loaded."""
    tune(monkeypatch, "single_row.row_attention", splits=2)
    if not torch.cuda.is_available():  # programs run one after the other
        monkeypatch.setattr(
            "quire.kernels.triton.single_row.row_linear.shape_for", lambda *_, **__: RowTile(64, 128, 1, 4)
        )
    monkeypatch.setitem(kernels.PACKAGES, "cpu", ("quire.kernels.reference",))
    for name in ("prepare_low_rank", "put_low_rank", "add_low_rank", "embed_low_rank"):
        monkeypatch.setattr(f"quire.kernels.reference.{name}", getattr(kernels.triton, name))
    made = checkpoints.make("llama-biases-tied", tmp_path, **SIZES | {"num_hidden_layers": 1})
    whole = peft_folders.save(made, tmp_path / "whole", seed=1, more=[peft_folders.embedding, peft_folders.head])
    some = peft_folders.save(
        made, tmp_path / "some", seed=2, rank=7, wanted=lambda name: name.endswith(("v_proj", "up_proj"))
    )
    lora = {"whole": str(whole.folder), "some": str(some.folder)}
    rig = Rig(
        made.folder,
        device="cuda" if torch.cuda.is_available() else "cpu",
        attention_backend="reference",
        cuda_graphs=False,
        lora=lora,
    )
    model, rows = current_model_of(rig.replica), rig.replica.adapters.step
    chain, forward, head = (
        single_row.SingleRowProgram(model, pdl=torch.cuda.is_available()),
        model.forward,
        model.logits,
    )
    for slot, (name, merged) in enumerate({"whole": whole, "some": some, "": made}.items()):
        rig.step([New(slot, PROMPT, adapter=name)], {slot: len(PROMPT)}, released=[slot - 1] if slot else [])
        with monkeypatch.context() as patched, rows.recording_with(bool(name)):
            patched.setattr(model, "forward", chain.logits)
            patched.setattr(model, "logits", lambda logits, *_: logits)
            rig.step()
        assert error(rig, merged, slot) < 1e-4
    assert (model.forward, model.logits) == (forward, head)
    assert error(rig, whole, 2) > 0.01, "the adapter changes nothing that could be seen"


def test_models_that_it_cannot_run_are_refused() -> None:
    class Place:
        ops = SimpleNamespace(sources={"rms_norm": "quire.kernels.triton"})
        quantization, checkpoint = "none", None
        batch_invariant = False
        shard = Shard()

    class Config:
        head_dim, hidden_size, num_q_heads, num_kv_heads, intermediate_size = 128, 1024, 16, 8, 3072
        attention = AttentionConfig()

    assert single_row.reject_reason(Config(), Place()) is None
    Place.batch_invariant = True
    assert "order" in str(single_row.reject_reason(Config(), Place()))
    Place.batch_invariant, Place.shard = False, Shard(0, 2, SimpleNamespace(fuses_residual_add=False))
    assert "NCCL" in str(single_row.reject_reason(Config(), Place()))
    Place.shard = Shard(0, 2, SimpleNamespace(fuses_residual_add=True))
    assert single_row.reject_reason(Config(), Place()) is None
    Config.intermediate_size = 3072 + 256
    assert "1664" in str(single_row.reject_reason(Config(), Place()))
    Config.intermediate_size, Place.shard = 3072, Shard()
    Config.attention = AttentionConfig(has_sinks=True)
    assert "sinks" in str(single_row.reject_reason(Config(), Place()))
    Config.attention = AttentionConfig()
    Config.intermediate_size = 3000
    assert "3000" in str(single_row.reject_reason(Config(), Place()))
    Config.head_dim = 96
    assert "96" in str(single_row.reject_reason(Config(), Place()))
    Place.ops.sources = {"rms_norm": "quire.kernels.reference"}
    assert "quire.kernels.triton" in str(single_row.reject_reason(Config(), Place()))


@pytest.mark.slow
@torch.inference_mode()
def test_all_reduces_in_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank runs the unfused decoder, whose all-reduces have the same order."""
    tune(monkeypatch, "single_row.row_attention", splits=2)
    made = checkpoints.make("llama-biases-tied", tmp_path, **SIZES)
    whole = Rig(made.folder)
    monkeypatch.setitem(kernels.PACKAGES, "cpu", ("quire.kernels.reference",))
    with ranked(made.folder) as rig:
        model = current_model_of(rig.replica)
        chain = single_row.SingleRowProgram(model, pdl=False)
        for each in (whole, rig):
            each.step([New(0, PROMPT)], {0: len(PROMPT)})
        model.forward = chain.logits
        model.logits = lambda logits: logits
        for _ in range(3):
            for each in (whole, rig):
                each.step()
            torch.testing.assert_close(rig.logits[0][-1], whole.logits[0][-1], rtol=1e-4, atol=1e-4)
    assert rig.tokens(0) == whole.tokens(0)
