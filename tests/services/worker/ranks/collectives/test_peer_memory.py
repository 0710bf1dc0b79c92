"""Shared memory is used if all ranks can write to each other, else by none."""

from __future__ import annotations

import pytest
import torch

from quire.services.worker.device.peer_driver import HANDLE_BYTES, PeerDriver
from quire.services.worker.ranks.collectives.peer_memory import ONE_SHOT_MAX_BYTES, open_mailbox
from tests.pointers import pointee

CPU = torch.device("cpu")


class Store(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:
        return self[key].encode()


class Driver:
    """Returns fake addresses for requested memory."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.refuses = ""

    def __getattr__(self, name: str):
        def call(*arguments: object) -> int:
            if name in ("cuIpcCloseMemHandle", "cuMemFree_v2"):
                self.closed.append(name)
            elif name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"):
                pointee(arguments[0]).value = 1 << 30 if name == "cuMemAlloc_v2" else 1 << 40
            return 801 if name == self.refuses else 0

        return call


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_a_rank_finds_the_memory_of_all(driver: Driver) -> None:
    store = Store({"inbox of 0": bytes(HANDLE_BYTES).hex(), "inbox of 2": bytes(HANDLE_BYTES).hex()})
    mailbox = open_mailbox(store, 1, 3, CPU, load_driver=lambda: PeerDriver(driver))
    assert mailbox is not None
    assert mailbox.inboxes.tolist() == [1 << 40, 1 << 30, 1 << 40]
    assert mailbox.most_bytes == ONE_SHOT_MAX_BYTES // 2
    assert len(bytes.fromhex(store["inbox of 1"])) == HANDLE_BYTES
    del mailbox
    assert driver.closed == ["cuIpcCloseMemHandle", "cuIpcCloseMemHandle", "cuMemFree_v2"]


@pytest.mark.parametrize("step", ["cuMemAlloc_v2", "cuIpcGetMemHandle"])
def test_rank_without_memory_is_reported(driver: Driver, step: str) -> None:
    driver.refuses = step
    store = Store()
    assert open_mailbox(store, 0, 2, CPU, load_driver=lambda: PeerDriver(driver)) is None
    assert store == {"inbox of 0": ""}


def test_a_machine_without_a_driver() -> None:
    store = Store()
    assert open_mailbox(store, 1, 2, CPU, load_driver=lambda: PeerDriver.load("libnobody.so.1")) is None
    assert store == {"inbox of 1": ""}


def test_memory_is_not_kept_where_another_rank_has_none(driver: Driver) -> None:
    assert open_mailbox(Store({"inbox of 1": ""}), 0, 2, CPU, load_driver=lambda: PeerDriver(driver)) is None
    assert driver.closed == ["cuMemFree_v2"]


def test_memory_is_freed_if_another_rank_is_unreachable(driver: Driver) -> None:
    driver.refuses = "cuIpcOpenMemHandle_v2"
    assert (
        open_mailbox(
            Store({"inbox of 1": bytes(HANDLE_BYTES).hex()}), 0, 2, CPU, load_driver=lambda: PeerDriver(driver)
        )
        is None
    )
    assert driver.closed == ["cuMemFree_v2"]
