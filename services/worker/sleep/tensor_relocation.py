"""Relocation of tensors into other memory while all references to them stay valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

ALIGNMENT = 512  # bytes, as GPU allocators guarantee
RELEASE_EVERY_BYTES = 1 << 30  # bytes moved between two releases of cached memory


def total_bytes(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of the tensors' distinct storages, each rounded up to ALIGNMENT: the size of a target for
    relocate()."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(_aligned(size) for size in sizes.values())


def relocate(
    tensors: Sequence[Tensor], target: Tensor, acquire: Callable[[int], None], release_cached: Callable[[], None]
) -> None:
    """Moves storages into `target` (uint8), one after the other; tensors that share a storage still do. `acquire`:
    called with the bytes that must be mapped; `release_cached`: called after some have moved, so that at most little
    more than one copy exists."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    at = num_moved = 0
    for sharing in by_storage.values():
        storage = sharing[0].untyped_storage()
        size = storage.nbytes()
        acquire(at + size)
        target[at : at + size].copy_(_bytes_of(sharing[0]))
        for tensor in sharing:
            offset = at // tensor.element_size() + tensor.storage_offset()
            tensor.set_(target.untyped_storage(), offset, tensor.size(), tensor.stride())
        del storage
        at, num_moved = at + _aligned(size), num_moved + size
        if num_moved >= RELEASE_EVERY_BYTES:
            num_moved = 0
            release_cached()
    release_cached()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns the tensor's whole storage as bytes."""
    storage = tensor.untyped_storage()
    return tensor.new_empty(0).view(-1).byte().set_(storage, 0, (storage.nbytes(),), (1,))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
