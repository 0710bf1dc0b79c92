"""Fills a model's tensors from safetensors, pickled or GGUF files, or with random numbers; every tensor has to
match."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.services.worker.layers.placement import Destination, LoadableModel, SelfLoadingModel, memory_of
from quire.services.worker.layers.sharding import TensorPart
from quire.services.worker.models.gguf import tensors as gguf
from quire.services.worker.models.loading import weight_files
from quire.services.worker.models.loading.copies import WeightCopier, threads_for
from quire.services.worker.models.loading.dummy_weights import fill_dummy
from quire.services.worker.models.loading.layer_storage import LayerStorage
from quire.services.worker.models.loading.progress import Progress
from quire.services.worker.models.loading.safetensors_layout import StoredTensor, stored_tensors
from quire.services.worker.models.loading.tensor_names import (
    BESIDE_TEXT,
    DERIVED_SUFFIXES,
    EMBEDDING,
    HEAD,
    KV_SCALE_SUFFIXES,
    model_name,
)
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger

log = logger("worker.weights")

NAMED_IN_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Loader:
    """Loads models from their folders, or with random weights (load_format "dummy")."""

    load_format: str
    seed: int
    progress: Progress = field(default_factory=Progress)

    @property
    def reads_files(self) -> bool:
        """Whether weights are read from files; otherwise they are random."""
        return self.load_format != "dummy"

    def names(self, folder: Path) -> frozenset[str]:
        """Returns the names of the folder's tensors; empty for random weights."""
        return frozenset() if self.load_format == "dummy" else frozenset(name for name, _ in named_tensors(folder))

    def load(
        self, model: LoadableModel, folder: Path, is_on_other_stage: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Fills and finishes the model: with random weights, by its own library, or from the folder's files. Raises
        InvalidArgument for missing, unexpected, misshapen or unreadable tensors. `is_on_other_stage`: selects tensors
        to ignore."""
        if self.load_format == "dummy":
            fill_dummy(model, self.seed)
        elif isinstance(model, SelfLoadingModel):
            model.load_folder(folder)
        else:
            load_checkpoint(model, folder, is_on_other_stage, self.progress)


def load_checkpoint(
    model: LoadableModel,
    folder: Path,
    is_on_other_stage: Callable[[str], bool] = lambda _: False,
    progress: Progress | None = None,
) -> None:
    """Fills and finishes a model from the folder's files, on GPUs with several threads. Raises as Loader.load()."""
    first = next((memory_of(destination) for _, destination in model.destinations()), None)
    num_threads = 0 if first is None else threads_for(first.device)
    _load(model, named_tensors(folder), str(folder), is_on_other_stage, num_threads=num_threads, progress=progress)


def load_tensors(model: LoadableModel, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Fills and finishes a model from tensors named as in a checkpoint. Raises InvalidArgument as Loader.load()."""
    sources = (
        (name, TensorSource(tensor.shape, partial(torch.Tensor.contiguous, tensor), tensor)) for name, tensor in tensors
    )
    _load(model, sources, "what is given")


def check_tensors(model: LoadableModel, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises the errors of load_tensors() without reading values: the tensors may be on the device "meta"."""
    sources = ((name, TensorSource(tensor.shape, partial(_same, tensor), tensor)) for name, tensor in tensors)
    _place(model, sources, "what is given", take=lambda name, source, destination, _: _check(name, source, destination))


def _load(
    model: LoadableModel,
    sources: Iterable[tuple[str, TensorSource]],
    given: str,
    is_on_other_stage: Callable[[str], bool] = lambda _: False,
    *,
    num_threads: int = 0,
    progress: Progress | None = None,
) -> None:
    """Copies the sources, which errors call `given`, and finishes the model; after an error it stays partly filled."""
    progress = progress or Progress()
    copies = WeightCopier(num_threads, progress)
    storage = LayerStorage(model, copies.wait)

    def take(name: str, source: TensorSource, destination: Destination, covered: Collection[str]) -> None:
        storage.allocate(covered)
        _copy(name, source, destination, copies)
        storage.mark_filled(covered)

    try:
        _place(model, sources, given, take, is_on_other_stage, progress=progress)
        copies.wait()
    finally:
        copies.close()
    model.finish()


def _place(
    model: LoadableModel,
    sources: Iterable[tuple[str, TensorSource]],
    given: str,
    take: Callable[[str, TensorSource, Destination, Collection[str]], None],
    is_on_other_stage: Callable[[str], bool] = lambda _: False,
    *,
    progress: Progress | None = None,
) -> None:
    """Matches checkpoint tensors to the model's; calls `take` with each and with the model tensors it covers. Raises
    InvalidArgument for missing and unexpected ones at the end. An output head stands in for a missing tied
    embedding; scales of cached keys and values are logged and not used."""
    missing, alternatives = dict(model.destinations()), model.alternatives
    if progress is not None:
        progress.total_bytes += sum(memory_of(destination).nbytes for destination in missing.values())
    unexpected, kv_scales, passed_over, head = [], [], frozenset(model.passed_over), None
    beginnings = (*BESIDE_TEXT, *(name for name in passed_over if name.endswith(".")))
    known = {*missing, *alternatives, *passed_over}
    for written, source in sources:
        name = model_name(written, known)
        destination = missing.pop(name, None)
        if destination is not None:
            take(name, source, destination, (name,))
        elif name in alternatives:
            covered = alternatives[name].instead_of
            take(name, source, alternatives[name].of_shape(source.shape), covered)
            for other in covered:
                missing.pop(other, None)
        elif name == HEAD and name in passed_over:
            head = source.outliving_its_file()
        elif name.endswith(KV_SCALE_SUFFIXES):
            kv_scales.append(name)
        elif (
            not name.endswith(DERIVED_SUFFIXES)
            and name not in passed_over
            and not name.startswith(beginnings)
            and not is_on_other_stage(name)
        ):
            unexpected.append(name)
    if kv_scales:
        log.info("scales of cached keys and values are not used", tensors=len(kv_scales))
    if head is not None:  # safetensors.torch.save_model keeps only the first name of tied weights
        for name in [name for name in missing if name.endswith(EMBEDDING)]:
            take(name, head, missing.pop(name), (name,))
    _complain(given, "lacks tensors that the model needs", list(missing))
    _complain(given, "holds tensors that the model does not have", unexpected)


class Slices(Protocol):
    """Tensor of which only the requested parts are read."""

    def get_shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Tensor of a checkpoint, read lazily, whole (`read`) or in parts."""

    shape: Sequence[int]
    read: Callable[[], Tensor]
    parts: Slices | Tensor
    stored: StoredTensor | None = None  # None: not stored in a file in this form

    def outliving_its_file(self) -> TensorSource:
        """Returns a source that can still be read when its file's iteration has ended."""
        parts = self.parts
        return replace(self, read=lambda: parts[(slice(None),)])


def _copy(name: str, source: TensorSource, destination: Destination, copies: WeightCopier) -> None:
    """Checks a tensor against its destination and copies it: a part, straight from its file, or read whole. Raises
    InvalidArgument for other shapes and kinds of dtypes; a destination of size 0 is resized."""
    if isinstance(destination, TensorPart):
        _copy_parts(name, source, destination, copies)
        return
    stored = source.stored if list(source.shape) == list(destination.shape) else None
    if stored is not None and copies.can_copy(stored, destination):
        copies.copy_stored(stored, destination)
        return
    tensor = source.read()
    _check_tensor(name, tensor, destination)
    if not destination.numel():  # sized as in the checkpoint
        destination.resize_(tensor.shape)
    copies.copy(tensor.view(destination.shape) if tensor.numel() == 1 else tensor, destination)


def _check(name: str, source: TensorSource, destination: Destination) -> None:
    """Raises the errors of _copy() without copying."""
    if isinstance(destination, TensorPart):
        _check_shape(name, source.shape, destination.shape)
        _check_kind(name, source.read(), destination.tensor)
    else:
        _check_tensor(name, source.read(), destination)


def _check_tensor(name: str, tensor: Tensor, destination: Tensor) -> None:
    """Raises InvalidArgument for another kind of dtype or another shape; destinations of size 0 accept any shape."""
    _check_kind(name, tensor, destination)
    if destination.numel() and not tensor.numel() == destination.numel() == 1:
        _check_shape(name, tensor.shape, destination.shape)


def _copy_parts(name: str, source: TensorSource, destination: TensorPart, copies: WeightCopier) -> None:
    """Copies this rank's ranges of a tensor one after the other into its memory; reads only those."""
    _check_shape(name, source.shape, destination.shape)
    before, at = (slice(None),) * destination.dim, 0
    for taken in destination.taken:
        part = source.parts[(*before, slice(taken.start, taken.stop))]
        _check_kind(name, part, destination.tensor)
        copies.copy(part, destination.tensor.narrow(destination.dim, at, len(taken)))
        at += len(taken)


def _check_kind(name: str, tensor: Tensor, destination: Tensor) -> None:
    """Raises InvalidArgument if one of both is floating-point and the other is not; other dtypes are converted."""
    if tensor.is_floating_point() != destination.is_floating_point():
        raise InvalidArgument(
            f"model: tensor {name} holds {tensor.dtype}, config.json implies {destination.dtype}", field="model"
        )


def _check_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    if list(shape) != list(wanted):
        raise InvalidArgument(
            f"model: tensor {name} has shape {list(shape)}, config.json implies {list(wanted)}", field="model"
        )


def named_tensors(folder: Path) -> Iterator[tuple[str, TensorSource]]:
    """Yields the tensors of a folder's files by their stored names, readable until the next file is opened. Raises
    InvalidArgument for missing, unreadable and invalid files."""
    for path in weight_files.paths(folder):
        weight_files.check(path)
        try:
            if path.suffix in (".bin", ".pt"):
                yield from _pickled(path)
                continue
            if path.suffix == ".gguf":
                yield from ((name, TensorSource(one.shape, one.read, one)) for name, one in gguf.tensors(path))
                continue
            stored = _stored(path)
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    parts = file.get_slice(name)
                    yield name, TensorSource(parts.get_shape(), partial(file.get_tensor, name), parts, stored.get(name))
        except (OSError, SafetensorError, RuntimeError, UnpicklingError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidArgument(f"model: cannot read {path}: {reason}", field="model") from None


def _stored(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb", buffering=0) as file:
        return stored_tensors(path, file.fileno())


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _source(held: Tensor) -> TensorSource:
    return TensorSource(held.shape, partial(held.view, held.shape), held)


def _pickled(path: Path) -> Iterator[tuple[str, TensorSource]]:
    """Yields the tensors of a file in PyTorch's pickle format; no code is run. Raises InvalidArgument for other
    content."""
    held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(held, dict) or not all(isinstance(tensor, Tensor) for tensor in held.values()):
        raise InvalidArgument(f"model: {path} must contain tensors by name only", field="model")
    for name, tensor in held.items():
        yield name, _source(tensor)


def _complain(given: str, what: str, names: list[str]) -> None:
    """Raises InvalidArgument that names the first few of `names`; does nothing without names."""
    if names:
        named = ", ".join(names[:NAMED_IN_ERRORS])
        more = f" and {len(names) - NAMED_IN_ERRORS} more" if len(names) > NAMED_IN_ERRORS else ""
        raise InvalidArgument(f"model: {given} {what}: {named}{more}", field="model")


def num_parameters(model: LoadableModel) -> int:
    """Returns the number of parameters over all ranks; call before finish()."""
    return sum(math.prod(destination.shape) for _, destination in model.destinations())
