"""Replaces the weights of a serving model in place.

New weights are loaded and packed separately, as at a start (staged), and copied over the old ones once all of them are
valid: an update happens completely or not at all, and needs the memory of the weights a second time while it lasts.
Everything that holds pointers to weights (a tape, a tied output head, a drafter that shares them) uses the new ones
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.services.worker.layers.placement import LayerPlacement, SelfLoadingModel
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.loading.loader import check_tensors, load_checkpoint, load_tensors, named_tensors
from quire.services.worker.models.loading.output_heads import resolve_output_head
from quire.services.worker.models.loading.tensor_names import model_name
from quire.services.worker.models.registry import find_model, read_model_config
from quire.shared.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.shared.models.model_identity import read_config

if TYPE_CHECKING:
    from quire.services.worker.models.vision.port import MediaEncoder

OURS = (
    "quire.services.worker.layers.",
    "quire.services.worker.models.",
    "quire.kernels.",
)  # modules whose objects hold weights
AT_START = "0"  # version of the weights at start

# Fields of config.json that may differ: weights are converted to the worker's dtype.
MAY_DIFFER = frozenset({"dtype"})


@dataclass(frozen=True, slots=True)
class WeightsId:
    """Identity of the weights that a worker uses."""

    update: int = 0  # ascending; 0: at start
    version: str = AT_START
    path: str = ""  # path in the update request
    spooled: str = ""  # folder of streamed weights
    is_kept: bool = True  # can be loaded again; False for tensors passed in memory
    encoder_update: int = 0  # last update that may have changed the encoder of media


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Source of new weights: a folder, or all tensors the model needs, named as in a checkpoint."""

    source: Path | Iterable[tuple[str, Tensor]]
    version: str = ""  # empty: the update's number


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights that are ready to be swapped in."""

    id: WeightsId
    pairs: list[tuple[Tensor, Tensor]]  # current and new tensors


class Weights:
    """Weights of a model that can be replaced: staged by one thread at a time, swapped in between steps on the device
    thread."""

    def __init__(self, model: CausalLM, new_model: Callable[[], CausalLM], place: LayerPlacement) -> None:
        """Takes the serving model; `new_model` creates another one of the same structure, without weights."""
        self._model, self._remake, self._place = model, new_model, place
        self._encoder: MediaEncoder | None = None
        self._new_encoder: Callable[[], MediaEncoder | None] = lambda: None
        self._staged: StagedWeights | None = None
        self._expected: tuple[WeightsId, CausalLM] | None = None
        self.id = WeightsId()

    def use_encoder(self, encoder: MediaEncoder, new_encoder: Callable[[], MediaEncoder | None]) -> None:
        """Adds the encoder of a model that takes pictures. Updates from folders that have its tensors replace it, too;
        those without, and tensors passed in memory or broadcast, leave it as it is."""
        self._encoder, self._new_encoder = encoder, new_encoder

    @property
    def version(self) -> str:
        return self.id.version

    @property
    def stages_beside_steps(self) -> bool:
        """Whether weights can be staged while steps run; otherwise staging needs the device, or all ranks,
        exclusively."""
        return self._place.device.type == "cpu" and self._place.shard.is_whole

    def update(self, new: NewWeights) -> None:
        """Stages and swaps in new weights at once, with the next update number.

        On errors, those of stage(), the old weights remain.
        """
        number = self.id.update + 1
        changed = number if isinstance(new.source, Path) else self.id.encoder_update
        self.stage(new.source, WeightsId(number, new.version or str(number), encoder_update=changed))
        self.swap(number)

    def stage(self, source: Path | Iterable[tuple[str, Tensor]], staged_id: WeightsId) -> None:
        """Loads and packs new weights separately, discarding those staged before; steps still use the old ones.

        Raises FailedPrecondition if weights cannot be changed, InvalidArgument for those of another model or invalid
        ones, ResourceExhausted without memory for both.
        """
        self.discard_staged()
        self.check_updatable()
        if isinstance(source, Path) and not staged_id.spooled:
            self._check_config(source)
        with _room():
            fresh = self._remake()
            if isinstance(source, Path):
                load_checkpoint(fresh, source)
            else:
                load_tensors(fresh, source)
            beside = self._encoder_pairs(source) if isinstance(source, Path) else []
        self._staged = StagedWeights(staged_id, [*_pairs(self._model, fresh, set()), *beside])

    def _encoder_pairs(self, folder: Path) -> list[tuple[Tensor, Tensor]]:
        """Loads the encoder's tensors from a folder that has some; returns them with the current ones."""
        fresh = load_encoder(folder, self._new_encoder)
        return [] if self._encoder is None or fresh is None else [*_pairs(self._encoder, fresh, set())]

    def preallocate(self, tensors: Iterable[tuple[str, Tensor]], staged_id: WeightsId) -> None:
        """Allocates memory for weights that arrive later (receive()), after checking their names, shapes and dtypes.

        `tensors` may be on the device "meta". Discards staged weights. Raises as stage().
        """
        self.discard_staged()
        self.check_updatable()
        with _room():
            fresh = self._remake()
        check_tensors(fresh, tensors)
        self._expected = staged_id, fresh

    def receive(self, tensors: Iterable[tuple[str, Tensor]], update: int) -> None:
        """Stages the preallocated update, each tensor as it arrives.

        Raises as stage(), and FailedPrecondition if nothing was preallocated.
        """
        expected, self._expected = self._expected, None
        if expected is None or expected[0].update != update:
            raise FailedPrecondition(f"no weights are expected as update {update}")
        staged_id, fresh = expected
        with _room():
            load_tensors(fresh, tensors)
        self._staged = StagedWeights(staged_id, [*_pairs(self._model, fresh, set())])

    def swap(self, update: int) -> None:
        """Copies the weights staged as this update over the current ones, in place, and takes their identity.

        Raises FailedPrecondition if they are not staged; whatever was staged is discarded.
        """
        staged, self._staged = self._staged, None
        if staged is None or staged.id.update != update:
            raise FailedPrecondition(f"no weights are staged as update {update}")
        self._copy(staged.pairs)
        self.id = staged.id

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copies new values over the current tensors, except the experts' token counters."""
        counts = self._model.expert_counts
        kept = None if counts is None else counts[0].clone()
        for old, values in pairs:
            old.copy_(values)
        if counts is not None and kept is not None:
            counts[0].copy_(kept)  # counters in the layers are not weights

    def tensors(self) -> list[Tensor]:
        """Returns all tensors that an update overwrites, without the experts' token counters."""
        counts = self._model.expert_counts
        counted = set() if counts is None else {counts[0].untyped_storage().data_ptr()}
        found = _tensors(self._model, set())
        return [tensor for tensor in found if tensor.untyped_storage().data_ptr() not in counted]

    def reload_weights(self, load: Callable[[CausalLM], None]) -> None:
        """Restores weights whose memory was lost; `load` fills a model with the same weights."""
        fresh = self._remake()
        load(fresh)
        self._copy([*_pairs(self._model, fresh, set())])

    def discard_staged(self) -> None:
        """Discards staged and preallocated weights and frees their memory; the current ones stay."""
        self._staged = self._expected = None

    def check_updatable(self) -> None:
        """Raises FailedPrecondition if the weights cannot be replaced."""
        reason = (
            "it has pipeline stages"
            if not self._place.stage.is_whole
            else "it has adapters"
            if self._place.adapters is not None
            else "its model runs with the code of transformers"
            if isinstance(self._model, SelfLoadingModel)
            else ""
        )
        if reason:
            raise FailedPrecondition(f"the weights of this worker cannot be changed: {reason}")

    def _check_config(self, folder: Path) -> None:
        """Raises InvalidArgument if the folder's config.json is that of another model: another family or other values
        than MAY_DIFFER."""
        values = read_config(folder)
        family, config = find_model(values), self._model.config
        if family is not type(self._model):
            named = f"{family.__name__}, not {type(self._model).__name__}"
            raise InvalidArgument(f"model: the weights in {folder} are those of {named}", field="model")
        new_config = resolve_output_head(read_model_config(values), folder)
        differing = [name for name in (field.name for field in fields(config)) if name not in MAY_DIFFER]
        differing = [name for name in differing if getattr(new_config, name) != getattr(config, name)]
        if differing:
            name = differing[0]
            text = f"its {name} is {getattr(new_config, name)}, that of the model served {getattr(config, name)}"
            raise InvalidArgument(f"model: {folder} is another model: {text}", field="model")


@contextmanager
def _room() -> Iterator[None]:
    """Converts running out of memory, on the device or the host, to ResourceExhausted."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise ResourceExhausted(
            "not enough memory for the new weights in addition to the old ones; update from a folder after `quire "
            "sleep`"
        ) from None


def load_encoder(folder: Path, new: Callable[[], MediaEncoder | None]) -> MediaEncoder | None:
    """Loads an encoder of media from a folder; None if the model has none, or the folder has no tensor of it. Raises
    InvalidArgument if tensors are missing or do not fit."""
    fresh = new()
    if fresh is None:
        return None
    known = {name for name, _ in fresh.destinations()}
    if not any(model_name(name, known) in known for name, _ in named_tensors(folder)):
        return None
    load_checkpoint(fresh, folder, lambda _: True)
    return fresh


def copy_encoder(old: MediaEncoder, fresh: MediaEncoder) -> None:
    """Copies the weights of `fresh` over those of `old`, an encoder of the same structure, in place."""
    for tensor, values in _pairs(old, fresh, set()):
        tensor.copy_(values)


def _pairs(old: Any, fresh: Any, seen: set[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields corresponding tensors of two models of the same structure, each object visited once (`seen`: their ids).

    Objects that both share (placement, functions) are skipped.
    """
    if old is fresh or id(old) in seen:
        return
    seen.add(id(old))
    assert type(old) is type(fresh), "two models of one class are made of the same layers"
    if isinstance(old, Tensor):
        assert (old.shape, old.dtype) == (fresh.shape, fresh.dtype), "they have the same config"
        yield old, fresh
        return
    for one, other in _within(old, fresh):
        yield from _pairs(one, other, seen)


def _within(old: Any, fresh: Any) -> Iterable[tuple[Any, Any]]:
    """Returns corresponding parts of two objects: items, values or attributes; nothing for objects of other
    libraries."""
    if isinstance(old, list | tuple):
        return zip(old, fresh, strict=True)
    if isinstance(old, dict):
        return [(value, fresh[name]) for name, value in old.items()]
    if not type(old).__module__.startswith(OURS):
        return ()
    names = [field.name for field in fields(old)] if is_dataclass(old) else [*vars(old)]
    return [(getattr(old, name), getattr(fresh, name)) for name in names]


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yields the tensors of a loaded model that _pairs() would pair."""
    if id(value) in seen or isinstance(value, LayerPlacement):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    for part, _ in _within(value, value):
        yield from _tensors(part, seen)


def as_tensors(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    """Checks named tensors passed by a trainer. Raises InvalidArgument for other objects and repeated names."""
    checked: dict[str, Tensor] = {}
    for name, tensor in named:
        if not isinstance(tensor, Tensor) or name in checked:
            problem = "does not exist in the model" if name not in checked else "occurs twice"
            raise InvalidArgument(f"named_tensors: {name} {problem}", field="named_tensors")
        checked[name] = tensor.detach()
    return list(checked.items())
