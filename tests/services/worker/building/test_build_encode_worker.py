"""An encode worker has a model's encoder alone; its rows are those that other workers compute."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.replica.replica import Replica
from quire.services.worker.step.fetched_item import FetchedItem, FetchedRows
from quire.services.worker.step.plan_violation import PlanViolation
from quire.shared.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.checkpoints import make
from tests.services.worker.media.pictures import NUM_ROWS, fetched, identifier_of, make_llava, picture
from tests.spec_decode.pair import build

SIZES = {"block_size": 4, "num_blocks": 50, "max_num_seqs": 8, "max_num_batched_tokens": 24}
A, B = picture(1), picture(2)
NAME = identifier_of(A)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    make_llava(folder)
    return folder


def prepared(replica: Replica, *items: FetchedItem | FetchedRows) -> tuple[object, ...]:
    with torch.inference_mode():
        batch = replica.media.encode(items)
    batch.wait()
    return batch.errors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_an_encode_worker_are_those_of_others(llava: Path, dtype: str) -> None:
    encoder = build(None, llava, role="encode", dtype=dtype, **SIZES)
    other = build(None, llava, dtype=dtype, **SIZES)
    assert encoder.media.layout == other.media.layout != b""
    for replica in (encoder, other):
        assert prepared(replica, fetched(A), fetched(B)) == (None, None)
    rows = encoder.media.read(NAME)
    assert (rows.shape[0], rows.dtype) == (NUM_ROWS, np.uint8)
    assert np.array_equal(rows, other.media.read(NAME))
    other.media.release(NAME)
    assert prepared(other, FetchedRows(NAME, NUM_ROWS, rows)) == (None,)
    assert np.array_equal(rows, other.media.read(NAME))
    assert other.media.num_rows == 2 * NUM_ROWS


def test_rows_of_other_types_and_weights_have_another_layout(llava: Path, tmp_path: Path) -> None:
    make_llava(tmp_path, seed=8)
    layouts = {
        build(None, folder, role="encode", dtype=dtype, **SIZES).media.layout
        for folder in (llava, tmp_path)
        for dtype in ("float32", "bfloat16")
    }
    assert len(layouts) == 4


def test_it_has_no_language_weights_and_no_kv(llava: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "quire"):
        replica = build(None, llava, role="encode", **SIZES)
    assert "no language weights, no KV cache" in caplog.text
    assert "model loaded" not in caplog.text
    assert replica.limits.layout.has_no_kv
    assert not replica.pages.block_bytes


def test_it_refuses_plans(llava: Path) -> None:
    from quire.services.worker.runner.no_steps import NoSteps
    from quire.services.worker.step.slots import NO_SLOTS

    runner = NoSteps()
    with pytest.raises(PlanViolation, match="executes no steps"):
        runner.move_tokens(NO_SLOTS, NO_SLOTS)
    with pytest.raises(PlanViolation, match="announced no encoder"):
        runner.media.admit(0, [], 0)


def test_rows_that_are_not_kept_are_not_found(llava: Path) -> None:
    replica = build(None, llava, role="encode", **SIZES)
    with pytest.raises(NotFound, match="does not keep the rows"):
        replica.media.read(NAME)
    prepared(replica, fetched(A))
    replica.media.release(NAME)
    with pytest.raises(NotFound, match=NAME.hex()):
        replica.media.read(NAME)


@pytest.mark.parametrize("width", [1, 63, 4 * 64 + 2, 64 * 4 * 17])
def test_rows_of_another_width_are_refused(llava: Path, width: int) -> None:
    replica = build(None, llava, **SIZES)
    (error,) = prepared(replica, FetchedRows(NAME, 2, np.zeros((2, width), np.uint8)))
    assert isinstance(error, Unavailable)
    assert f"rows of {width} bytes" in error.message
    assert replica.media.num_rows == 0


def test_what_has_no_encoder_cannot_be_an_encode_worker(llava: Path, tmp_path: Path) -> None:
    folder = make("llama", tmp_path).folder
    with pytest.raises(InvalidArgument, match="role: encode needs a model with an encoder of pictures"):
        build(None, folder, role="encode", **SIZES)
    with pytest.raises(InvalidArgument, match="role: encode needs a model"):
        build(None, llava, role="encode", language_model_only=True, **SIZES)
    with pytest.raises(InvalidArgument, match="role: an encode worker is one process"):
        build(None, llava, role="encode", tensor_parallel_size=2, **SIZES)


def order_of(folder: str, update: int) -> tuple[pb.DeviceOrder, pb.DeviceOrder]:
    weights = model_pb2.WeightsIdentity(update=update, version=f"v{update}", path=folder, encoder_update=update)
    stage = pb.DeviceOrder(stage_weights=pb.StageWeights(weights=weights))
    return stage, pb.DeviceOrder(swap_weights=pb.SwapWeights(update=update))


def execute(replica: Replica, *orders: pb.DeviceOrder) -> None:
    with torch.inference_mode():
        for order in orders:
            replica.execute_order(order)


def test_an_update_from_a_folder_replaces_the_encoder(llava: Path, tmp_path: Path) -> None:
    """vllm#44910, trl#7198, verl#6523: embeddings of the weights before were used after an update."""
    new = tmp_path / "new"
    make_llava(new, seed=8)
    wanted = build(None, new, role="encode", **SIZES)
    replica = build(None, llava, role="encode", weights_folders=(str(tmp_path),), **SIZES)
    for one in (wanted, replica):
        prepared(one, fetched(A))
    before = replica.media.read(NAME)
    stage, swap = order_of("new", 7)
    execute(replica, stage)
    assert np.array_equal(replica.media.read(NAME), before), "staging changes nothing"
    execute(replica, swap)
    assert replica.media.num_items == 0, "rows of the old weights are dropped"
    prepared(replica, fetched(A))
    assert np.array_equal(replica.media.read(NAME), wanted.media.read(NAME))
    weights = replica.end_epoch().weights
    assert weights is not None
    assert (weights.update, weights.version, weights.encoder_update) == (7, "v7", 7)


def test_a_folder_with_the_text_model_alone_leaves_the_encoder(llava: Path, tmp_path: Path) -> None:
    make_llava(tmp_path / "text", seed=8)
    file = tmp_path / "text" / "model.safetensors"
    text = {name: tensor for name, tensor in load_file(file).items() if "vision" not in name and "multi" not in name}
    save_file(text, file, {"format": "pt"})
    replica = build(None, llava, role="encode", weights_folders=(str(tmp_path),), **SIZES)
    prepared(replica, fetched(A))
    before = replica.media.read(NAME)
    execute(replica, *order_of("text", 7))
    prepared(replica, fetched(A))
    assert np.array_equal(replica.media.read(NAME), before)


def test_an_update_that_does_not_fit_changes_nothing(llava: Path, tmp_path: Path) -> None:
    make_llava(tmp_path / "other", seed=8)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["vision_config"]["layer_norm_eps"] = 0.5
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    replica = build(None, llava, role="encode", weights_folders=(str(tmp_path),), **SIZES)
    stage, swap = order_of("other", 7)
    with pytest.raises(InvalidArgument, match="its vision_config differs from that of the model served"):
        execute(replica, stage)
    with pytest.raises(FailedPrecondition, match="no weights are staged as update 7"):
        execute(replica, swap)
    with pytest.raises(InvalidArgument, match="absent"):
        execute(replica, order_of("absent", 8)[0])
    with pytest.raises(FailedPrecondition, match="cannot be changed or put to sleep"):
        execute(replica, pb.DeviceOrder(sleep=pb.Sleep(level=1)))
    assert replica.end_epoch().weights.update == 0
