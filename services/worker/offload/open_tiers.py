"""What lies below a worker's device, as its settings say."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from services.worker.kv.host_memory import HostMemory, open_host_memory
from services.worker.kv.kv_cache import LayerCache
from services.worker.kv.kv_memory import GIB, BlockShape
from services.worker.limits import Limits
from services.worker.offload.block_file import HEADER_BYTES
from services.worker.offload.disk_store import DiskObserver, DiskStore
from services.worker.offload.folder import BlockFolder
from services.worker.offload.identity import identity_of, weights_digest
from services.worker.spec_decode.drafter import Drafter
from shared.errors import InvalidArgument
from shared.logs import logger
from shared.settings import WorkerSettings
from shared.worker_limits import MOST_BLOCKS

log = logger("worker.offload")

FILE_GRAIN = 4096  # bytes that a file takes up


class Tiers(NamedTuple):
    """None where there is none."""

    host_memory: HostMemory | None = None
    disk: DiskStore | None = None


def open_tiers(
    settings: WorkerSettings,
    fitting: Limits,
    memory: Sequence[LayerCache],
    shape: BlockShape,
    drafter: Drafter | None,
    *,
    layout: bytes,
    observer: DiskObserver,
) -> Tiers:
    """`layout`: what the bytes of a block mean, as workers tell each other. Raises InvalidArgument."""
    size, folder = settings.kv_offloading_size, settings.kv_offloading_disk
    if not size:
        if folder or settings.kv_offloading_disk_size:
            raise InvalidArgument(
                f"kv_offloading_disk: {folder!r}: blocks reach the disk through host memory: kv_offloading_size must "
                "say how much of it",
                field="kv_offloading_disk",
            )
        return Tiers()
    reason = _reason_against(settings, fitting, drafter)
    if reason:
        raise InvalidArgument(f"kv_offloading_size: {size}: {reason}", field="kv_offloading_size")
    host_memory = open_host_memory(size, memory, shape)
    if bool(folder) != bool(settings.kv_offloading_disk_size):
        raise InvalidArgument(
            f"kv_offloading_disk_size: {settings.kv_offloading_disk_size} GiB in the folder {folder!r}: one needs the "
            "other",
            field="kv_offloading_disk_size",
        )
    disk = _open_disk(settings, host_memory, layout=layout, observer=observer) if folder else None
    return Tiers(host_memory, disk)


def _reason_against(settings: WorkerSettings, fitting: Limits, drafter: Drafter | None) -> str:
    if settings.num_ranks > 1:
        return f"ranks of a group of {settings.num_ranks} have no memory in common for their parts of a block"
    if fitting.num_groups > 1 or fitting.layout.windows:
        return "layers with windows or states keep their blocks on the device"
    if drafter is not None and drafter.block_bytes:
        return "drafts need KV of their own, which stays on the device; ngram, suffix, medusa and grammar need none"
    return ""


def _open_disk(
    settings: WorkerSettings, host_memory: HostMemory, *, layout: bytes, observer: DiskObserver
) -> DiskStore:
    parent, gib = Path(settings.kv_offloading_disk).expanduser(), settings.kv_offloading_disk_size
    file_bytes = -(-(host_memory.block_bytes + HEADER_BYTES) // FILE_GRAIN) * FILE_GRAIN
    num_places = int(gib * GIB) // file_bytes
    if not 1 <= num_places <= MOST_BLOCKS:
        raise InvalidArgument(
            f"kv_offloading_disk_size: {gib} GiB has room for {num_places} files of {file_bytes} bytes; 1 to "
            f"{MOST_BLOCKS} are possible",
            field="kv_offloading_disk_size",
        )
    started = time.perf_counter()
    folder = BlockFolder(parent, settings.name, "kv_offloading_disk")
    try:
        identity, about = _identity(settings, layout, folder)
        disk = DiskStore(folder, identity, about, host_memory, num_places, observer=observer)
        _check_room(parent, gib, num_places * file_bytes, len(disk.held()) * file_bytes)
    except OSError as error:
        text = f"kv_offloading_disk: {str(folder.present)!r}: {error.strerror}"
        raise InvalidArgument(text, field="kv_offloading_disk") from None
    took_s = round(time.perf_counter() - started, 2)
    log.info("disk for KV", folder=str(folder.present), blocks=num_places, found=len(disk.held()), seconds=took_s)
    return disk


def _check_room(parent: Path, gib: float, num_bytes: int, held_bytes: int) -> None:
    free = shutil.disk_usage(parent).free + held_bytes
    if num_bytes > free:
        raise InvalidArgument(
            f"kv_offloading_disk_size: {gib} GiB is more than the {free / GIB:.1f} GiB that {str(parent)!r} has free",
            field="kv_offloading_disk_size",
        )


def _identity(settings: WorkerSettings, layout: bytes, folder: BlockFolder) -> tuple[bytes, Mapping[str, object]]:
    dummy = settings.load_format == "dummy"
    weights = f"dummy {settings.seed}" if dummy else weights_digest(Path(settings.model), folder.digests)
    return identity_of(
        layout,
        weights,
        model=Path(settings.model).name,
        device=settings.device,
        kv_cache_dtype=settings.kv_cache_dtype,
        batch_invariant=settings.batch_invariant,
    )
