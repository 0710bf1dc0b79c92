"""Opens the KV tiers below the device: host memory and disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.services.worker.kv.host_memory import HostMemory, count_places, open_host_memory
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.kv.kv_memory import GIB, BlockShape
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.loading.weight_files import FILES
from quire.services.worker.offload import host_region
from quire.services.worker.offload.block_file import HEADER_BYTES
from quire.services.worker.offload.disk_store import DiskObserver, DiskStore
from quire.services.worker.offload.folder import BlockFolder, WorkerFolder
from quire.services.worker.offload.host_region import HostRegion
from quire.services.worker.offload.identity import cache_identity, weights_digest
from quire.services.worker.offload.tiers import NoDisk, Tiers
from quire.services.worker.spec_decode.drafter import Drafter
from quire.shared.errors import InvalidArgument
from quire.shared.kv.kv_specs import KVGroup
from quire.shared.logs import logger
from quire.shared.settings import WorkerSettings
from quire.shared.worker_limits import MAX_BLOCKS

log = logger("worker.offload")

FILE_GRAIN = 4096  # file sizes are rounded up to this many bytes


def open_tiers(
    settings: WorkerSettings,
    fitting: WorkerLimits,
    memory: Sequence[LayerCache],
    shape: BlockShape,
    drafter: Drafter | None,
    *,
    place: LayerPlacement,
    layout: bytes,
    observer: DiskObserver,
) -> Tiers:
    """Opens the configured tiers below the device, host memory and disk; none without kv_offloading_size. `memory`: the
    device's caches; `layout` describes the content of a block, as exchanged between workers. Raises InvalidArgument for
    incompatible settings and for folders without room."""
    size, folder = settings.kv_offloading_size, settings.kv_offloading_disk
    if not size:
        if folder or settings.kv_offloading_disk_size:
            raise InvalidArgument(
                f"kv_offloading_disk: {folder!r}: requires kv_offloading_size, because blocks reach the disk "
                "through host memory",
                field="kv_offloading_disk",
            )
        return Tiers()
    reason = _reject_reason(settings, drafter)
    if reason:
        raise InvalidArgument(f"kv_offloading_size: {size}: {reason}", field="kv_offloading_size")
    _check_ranks(settings)
    if bool(folder) != bool(settings.kv_offloading_disk_size):
        raise InvalidArgument(
            f"kv_offloading_disk_size: {settings.kv_offloading_disk_size} GiB and kv_offloading_disk: {folder!r} "
            "must be "
            "set together",
            field="kv_offloading_disk_size",
        )
    name = BlockIdentity(settings, layout, fitting.layout.groups)
    host_memory = _open_host_memory(settings, memory, shape, name, place)
    disk = _open_disk(settings, host_memory, name, observer) if folder else NoDisk()
    return Tiers(host_memory, disk, name.known)


def _reject_reason(settings: WorkerSettings, drafter: Drafter | None) -> str:
    """Returns why blocks cannot be offloaded with these settings; empty if they can."""
    if settings.pipeline_parallel_size > 1:
        return (
            f"not supported with pipeline_parallel_size {settings.pipeline_parallel_size}, whose stages compute "
            "different steps"
        )
    if settings.context_parallel_size > 1:
        return (
            f"not supported with context_parallel_size {settings.context_parallel_size}, whose ranks all hold the "
            "same KV"
        )
    if drafter is not None and drafter.block_bytes:
        return "not supported with a drafter that has its own KV; ngram, suffix, medusa and grammar have none"
    return ""


def _check_ranks(settings: WorkerSettings) -> None:
    """Raises InvalidArgument for persistent tiers with several ranks: each file has one owner."""
    for field in ("kv_offloading_region", "kv_offloading_disk"):
        folder = getattr(settings, field)
        if folder and settings.num_ranks > 1:
            reason = (
                f"not supported with {settings.num_ranks} ranks, which hold parts of every block in separate memory"
            )
            raise InvalidArgument(f"{field}: {folder!r}: {reason}", field=field)


def _open_host_memory(
    settings: WorkerSettings,
    memory: Sequence[LayerCache],
    shape: BlockShape,
    name: BlockIdentity,
    place: LayerPlacement,
) -> HostMemory:
    """Opens host memory for as many blocks as kv_offloading_size holds: memory of this process, or a persistent region
    in the folder kv_offloading_region, which is closed if that fails."""
    gib, parent = settings.kv_offloading_size, settings.kv_offloading_region
    if not parent:  # all ranks have equally many places and divide the memory
        num_places = count_places(gib, shape, num_ranks=settings.num_ranks, num_hosts=settings.nnodes)
        return open_host_memory(memory, place.min_over_ranks(num_places))
    folder = WorkerFolder(Path(parent).expanduser(), f"{settings.name}.region", "kv_offloading_region")
    try:
        num_places = count_places(gib, shape, already=host_region.existing_bytes(folder))
        region = HostRegion(folder, name.identify(folder), num_places, shape.num_bytes)
    except BaseException:
        folder.close()
        raise
    return open_host_memory(memory, num_places, region)


def _open_disk(
    settings: WorkerSettings, host_memory: HostMemory, name: BlockIdentity, observer: DiskObserver
) -> DiskStore:
    """Opens the disk tier in this worker's folder and finds the blocks of earlier runs with the same identity; logs
    their number. Raises InvalidArgument for a size or folder that does not work."""
    parent, gib = Path(settings.kv_offloading_disk).expanduser(), settings.kv_offloading_disk_size
    file_bytes = -(-(host_memory.block_bytes + HEADER_BYTES) // FILE_GRAIN) * FILE_GRAIN
    num_places = int(gib * GIB) // file_bytes
    if not 1 <= num_places <= MAX_BLOCKS:
        raise InvalidArgument(
            f"kv_offloading_disk_size: {gib} GiB holds {num_places} files of {file_bytes} bytes; it must hold 1 "
            f"to {MAX_BLOCKS}",
            field="kv_offloading_disk_size",
        )
    started = time.perf_counter()
    own = WorkerFolder(parent, settings.name, "kv_offloading_disk")
    folder = BlockFolder(own)
    try:
        disk = DiskStore(folder, name.identify(own), name.about, host_memory, num_places, observer=observer)
        _check_room(parent, gib, num_places * file_bytes, len(disk.contents()) * file_bytes)
    except OSError as error:
        text = f"kv_offloading_disk: {str(folder.current)!r}: {error.strerror}"
        raise InvalidArgument(text, field="kv_offloading_disk") from None
    took_s = round(time.perf_counter() - started, 2)
    log.info(
        "disk tier for KV opened",
        folder=str(folder.current),
        blocks=num_places,
        found=len(disk.contents()),
        seconds=took_s,
    )
    return disk


def _check_room(parent: Path, gib: float, num_bytes: int, held_bytes: int) -> None:
    """Raises InvalidArgument if the disk has less free than `num_bytes`, counting the `held_bytes` that the tier uses
    already."""
    free = shutil.disk_usage(parent).free + held_bytes
    if num_bytes > free:
        raise InvalidArgument(
            f"kv_offloading_disk_size: {gib} GiB is more than the {free / GIB:.1f} GiB that {str(parent)!r} has free",
            field="kv_offloading_disk_size",
        )


class BlockIdentity:
    """Identity of the content of this worker's blocks (model, weights, layout, settings that change bits), computed on
    first use because it reads the weights."""

    def __init__(self, settings: WorkerSettings, layout: bytes, groups: Sequence[KVGroup]) -> None:
        self._settings, self._layout, self._groups = settings, layout, groups
        self.known = b""  # empty: not computed yet
        self.about: Mapping[str, object] = {}

    def identify(self, folder: WorkerFolder) -> bytes:
        """Returns the identity and keeps it and its description; `folder` caches the digests of weight files."""
        settings = self._settings
        if not self.known:
            dummy = settings.load_format == "dummy"
            weights = f"dummy {settings.seed}" if dummy else weights_digest(Path(settings.model), FILES, folder.digests)
            self.known, self.about = cache_identity(
                self._layout,
                weights,
                model=Path(settings.model).name,
                device=settings.device,
                kv_cache_dtype=settings.kv_cache_dtype,
                batch_invariant=settings.batch_invariant,
                groups=[f"{group.spec}: layers {', '.join(map(str, group.layers))}" for group in self._groups],
            )
        return self.known
