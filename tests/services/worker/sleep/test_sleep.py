"""A sleeping worker releases its memory and generates the same output afterwards."""

from __future__ import annotations

import ctypes
import mmap
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.services.worker.models.loading.weights import Weights
from quire.services.worker.sleep import tensor_relocation
from quire.services.worker.sleep.cuda_region import OUT_OF_MEMORY, CudaRegion, VirtualMemory
from quire.services.worker.sleep.regions import CpuRegion
from quire.services.worker.step.plan_violation import PlanViolation
from quire.shared.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.pointers import pointee
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_weights import perturbed, rows
from tests.services.worker.rig import Rig

MIB = 1 << 20
Make = Callable[[str], Checkpoint]


def sleep(level: int = 1) -> pb.DeviceOrder:
    return pb.DeviceOrder(sleep=pb.Sleep(level=level))


def wake(*tags: str) -> pb.DeviceOrder:
    return pb.DeviceOrder(wake_up=pb.WakeUp(tags=tags))


def stage(folder: Path, update: int = 7) -> pb.DeviceOrder:
    weights = model_pb2.WeightsIdentity(update=update, version=f"step-{update}", path=str(folder))
    return pb.DeviceOrder(stage_weights=pb.StageWeights(weights=weights))


def swap(update: int = 7) -> pb.DeviceOrder:
    return pb.DeviceOrder(swap_weights=pb.SwapWeights(update=update))


def execute_order(rig: Rig, *orders: pb.DeviceOrder) -> None:
    with torch.inference_mode():
        for order in orders:
            rig.replica.execute_order(order)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("family", ["qwen3-tied", "gpt2", "mixtral", "gemma3-tied", "deepseek-v3", "gpt-oss", "llama4"])
def test_logits_are_the_same_to_the_bit(checkpoint: Make, family: str, level: int) -> None:
    rig = Rig(checkpoint(family).folder, attention_backend="auto")
    before = rows(rig)
    execute_order(rig, sleep(level), wake())
    assert torch.equal(rows(rig), before)


def test_no_steps_are_run_meanwhile_and_nothing_is_cached_afterwards(checkpoint: Make) -> None:
    rig = Rig(checkpoint("qwen3-tied").folder)
    rows(rig)
    execute_order(rig, sleep(2))
    report = rig.replica.end_epoch()
    assert (report.block_ids, report.asleep, report.sleep_level) == ([], ("weights", "kv_cache"), 2)
    with pytest.raises(PlanViolation, match="asleep"):
        rows(rig)
    execute_order(rig, wake("weights"))
    assert rig.replica.end_epoch().asleep == ("kv_cache",)
    with pytest.raises(PlanViolation, match="asleep"):
        rows(rig)
    execute_order(rig, wake("kv_cache"), wake(), sleep(1), sleep(1))
    assert (rig.replica.end_epoch().asleep, rig.replica.end_epoch().sleep_level) == (("weights", "kv_cache"), 1)


def test_weights_that_slept_at_level_2_are_those_of_the_last_update(checkpoint: Make, tmp_path: Path) -> None:
    folder = checkpoint("llama-biases-tied").folder
    first, second = (perturbed(folder, tmp_path / name) for name in ("first", "second"))
    wanted = rows(Rig(first))
    rig = Rig(folder, weights_folders=(str(tmp_path),))
    execute_order(rig, stage(first), swap(), sleep(2), wake())
    assert torch.equal(rows(rig), wanted)
    execute_order(rig, sleep(2))
    with pytest.raises(FailedPrecondition, match="the weights are asleep"):
        execute_order(rig, stage(second, 8))
    execute_order(rig, wake("weights"), stage(second, 8), swap(8), wake("kv_cache"))
    assert rig.replica.orders.version == "step-8"
    assert torch.equal(rows(rig), rows(Rig(second)))


def test_worker_does_not_wake_up_with_other_weights(checkpoint: Make, tmp_path: Path) -> None:
    """Its folder was replaced while it slept; it wakes up once the old weights are back."""
    whole, folder = checkpoint("llama").folder, tmp_path / "model"
    shutil.copytree(whole, folder)
    rig = Rig(folder, attention_backend="auto")
    before = rows(rig)
    execute_order(rig, sleep(2))
    shutil.copytree(perturbed(whole, tmp_path / "other"), folder, dirs_exist_ok=True)
    with pytest.raises(FailedPrecondition, match="have changed since they were loaded"):
        execute_order(rig, wake())
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    execute_order(rig, wake())
    assert torch.equal(rows(rig), before)


@pytest.mark.parametrize(
    ("orders", "text"),
    [
        ([sleep(3)], "level: must be 1 or 2, got 3"),
        ([sleep(1), sleep(2)], "at level 1"),
        ([wake("graphs")], "'graphs'"),
    ],
)
def test_invalid_sleep_orders_are_refused(checkpoint: Make, orders: list[pb.DeviceOrder], text: str) -> None:
    rig = Rig(checkpoint("qwen3-tied").folder)
    *before, last = orders
    execute_order(rig, *before)
    with pytest.raises((InvalidArgument, FailedPrecondition), match=text):
        execute_order(rig, last)


def test_the_code_of_transformers_keeps_its_weights(checkpoint: Make) -> None:
    rig = Rig(checkpoint("stablelm").folder)
    before = rows(rig)
    with pytest.raises(FailedPrecondition, match="transformers"):
        execute_order(rig, sleep(2))
    execute_order(rig, sleep(1), wake())
    assert torch.equal(rows(rig), before)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_pages_of_the_host_go_to_others() -> None:
    tensors = [torch.ones(16 * MIB) for _ in range(4)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    region = CpuRegion([*tensors, tensors[0][5:]])
    assert 256 * MIB - 8 * mmap.PAGESIZE <= region.num_bytes <= 256 * MIB
    before = resident_bytes()
    region.release()
    assert before - resident_bytes() > 200 * MIB
    region.acquire()
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert float(tensors[1].sum()) < 2048, "but for what shares a page with others"


def test_host_without_free_memory_is_reported() -> None:
    region = CpuRegion([torch.ones(MIB)], free_bytes=lambda: MIB)
    with pytest.raises(ResourceExhausted, match=r"0\.00 GiB free"):
        region.acquire()


def test_tensors_move_and_stay_themselves() -> None:
    whole = torch.randn(10, 7).to(torch.bfloat16)
    tensors = [whole, whole.t(), whole[3:5], torch.randn(5), torch.arange(9, dtype=torch.int8)]
    copies = [tensor.clone() for tensor in tensors]
    target = torch.zeros(tensor_relocation.total_bytes(tensors), dtype=torch.uint8)
    taken: list[int] = []
    tensor_relocation.relocate(tensors, target, taken.append, lambda: None)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == {target.data_ptr()}
    whole.zero_()
    assert not tensors[2].any()
    assert taken == sorted(taken)


def test_released_kv_is_memory_for_staged_weights(checkpoint: Make) -> None:
    for family in ("mixtral", "gpt-oss", "deepseek-v3", "granite-tied", "llama4"):
        rig = Rig(checkpoint(family).folder)
        weights: Any = rig.replica.orders.weights
        assert isinstance(weights, Weights)
        with torch.inference_mode():
            weights.stage(checkpoint(family).folder, weights.id)
        given_back = {tensor.data_ptr() for tensor in weights.tensors()}
        counts = weights._model.expert_counts
        kept = {
            old.untyped_storage().data_ptr() for old, _ in weights._staged.pairs if old.data_ptr() not in given_back
        }
        assert kept == ({counts[0].untyped_storage().data_ptr()} if counts else set())


class PaperDriver:
    """A fake CUDA driver with `room` bytes of memory."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}

    def cuMemGetAllocationGranularity(self, grain: Any, _properties: Any, _kind: Any) -> int:
        pointee(grain).value = 2 * MIB
        return 0

    def cuMemAddressReserve(self, address: Any, _size: Any, *_: Any) -> int:
        pointee(address).value = 1 << 40
        return 0

    def cuMemCreate(self, handle: Any, size: ctypes.c_size_t, *_: Any) -> int:
        if sum(self.handles.values()) + size.value > self.room:
            return OUT_OF_MEMORY
        pointee(handle).value = len(self.handles) + 100
        self.handles[pointee(handle).value] = size.value
        return 0

    def cuMemMap(self, address: Any, size: Any, _offset: Any, _handle: Any, _flags: Any) -> int:
        assert address.value not in self.mapped
        self.mapped[address.value] = size.value
        return 0

    def cuMemSetAccess(self, *_: Any) -> int:
        return 0

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        assert self.mapped.pop(address.value) == size.value
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        del self.handles[handle.value]
        return 0


def test_gpu_pages_are_remapped_at_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    driver = PaperDriver(room=700 * MIB)
    region = CudaRegion(600 * MIB + 1, VirtualMemory(0, driver))
    assert region.num_bytes == 602 * MIB
    region.acquire(1)
    assert sum(driver.mapped.values()) == 256 * MIB
    region.acquire()
    assert sum(driver.mapped.values()) == 602 * MIB
    placed = dict(driver.mapped)
    region.release()
    assert (driver.mapped, driver.handles) == ({}, {})
    driver.room = 600 * MIB
    with pytest.raises(ResourceExhausted, match=r"0\.59 GiB of free memory"):
        region.acquire()
    assert (driver.mapped, driver.handles) == ({}, {}), "nothing is half taken"
    driver.room = 700 * MIB
    region.acquire()
    assert driver.mapped == placed


def test_without_a_driver_the_setting_is_named() -> None:
    with pytest.raises(FailedPrecondition, match="enable_sleep_mode"):
        VirtualMemory(0, driver="libquire-no-such-driver.so")


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_gpu_memory_returns_and_graphs_stay_valid(checkpoint: Make, level: int) -> None:
    settings = {"device": "cuda", "dtype": "bfloat16", "enable_sleep_mode": True}
    sizes = {"attention_backend": "auto", "block_size": 16, "num_blocks": 15_000}  # 88 MiB
    rig = Rig(checkpoint("qwen3-tied").folder, **settings, **sizes)
    before, (free, _) = rows(rig), torch.cuda.mem_get_info()
    execute_order(rig, sleep(level))
    assert torch.cuda.mem_get_info()[0] > free + 64 * MIB
    execute_order(rig, wake())
    assert torch.equal(rows(rig), before)


@pytest.mark.gpu
def test_a_gpu_changes_its_weights_in_the_memory_of_its_kv(checkpoint: Make, tmp_path: Path) -> None:
    folder = checkpoint("qwen3-tied").folder
    other = perturbed(folder, tmp_path / "other")
    settings = {"device": "cuda", "dtype": "bfloat16", "num_blocks": 4000, "enable_sleep_mode": True}
    wanted = rows(Rig(other, **settings))
    rig = Rig(folder, weights_folders=(str(tmp_path),), **settings)
    rows(rig)
    execute_order(rig, stage(other), swap())
    assert torch.equal(rows(rig), wanted)
    execute_order(rig, sleep(2), wake())
    assert torch.equal(rows(rig), wanted)
