"""The models that clients can name. A model stays listed while no worker serves it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire.services.frontend.request.model_names import model_not_found
from quire.services.frontend.scheduler_client.client import ClusterLimits
from quire.shared.pb.common.v1 import model_pb2


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model name as clients see it: the served model, an alias or an adapter."""

    name: str
    vocab_size: int
    created_unix_s: int
    max_model_len: int  # 0 until a worker has reported it
    ready: bool
    adapter_of: str = ""  # the base model of an adapter; empty: not an adapter
    input_modalities: tuple[str, ...] = ("text",)  # what prompts may contain


class Catalogue:
    """Catalogue of the served model, its aliases and its adapters."""

    def __init__(
        self,
        identity: model_pb2.ModelIdentity,
        limits: Callable[[], ClusterLimits | None],
        aliases: Sequence[str] = (),
        *,
        modalities: Sequence[str] = (),
    ) -> None:
        """Starts without adapters. `aliases`: further names of the model; answers carry its first name.
        `modalities`: of the media that prompts may contain."""
        self._media_modalities = tuple(modalities)
        self._identity = identity
        self._limits = limits
        self._own_names = dict.fromkeys((identity.name, *aliases))
        self._created_unix_s = int(time.time())
        self._max_model_len = 0
        self._adapters: frozenset[str] = frozenset()
        self._last_limits: ClusterLimits | None = None

    @property
    def name(self) -> str:
        return self._identity.name

    def entry(self, name: str = "") -> CatalogueEntry:
        """Returns the entry of `name`: the model's, an adapter's, or the model's if empty. Raises NotFound for a name
        that is neither."""
        self.check(name)
        adapter = self.adapter_name(name)
        return CatalogueEntry(
            adapter or self.name,
            self._identity.vocab_size,
            self._created_unix_s,
            self._max_model_len,
            self._limits() is not None,
            adapter_of=self.name if adapter else "",
            input_modalities=("text", *self._taken_media()),
        )

    def _taken_media(self) -> list[str]:
        """Returns the modalities that this frontend prepares and, once workers are known, some worker encodes."""
        limits = self._limits() or self._last_limits
        return [name for name in self._media_modalities if limits is None or name in limits.media_modalities]

    def entries(self) -> list[CatalogueEntry]:
        """Returns the model under each of its names, then its adapters, sorted by name."""
        self._refresh()
        own = self.entry()
        named = [replace(own, name=name) for name in self._own_names]
        return [*named, *map(self.entry, sorted(self._adapters - self._own_names.keys()))]

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters that the cluster last reported."""
        self._refresh()
        return self._adapters

    def adapter_name(self, name: str) -> str:
        """Returns the adapter that requests for `name` use; empty for the base model."""
        return "" if name in self._own_names else name

    def served_name(self, name: str) -> str:
        """Returns the model name that answers to a request for `name` carry."""
        return self.adapter_name(name) or self.name

    def max_model_len(self, name: str) -> int:
        """Returns the context length for `name`, 0 until a worker has reported it. Raises NotFound only after that:
        before, any name may be an adapter's, and the request is checked again once limits are known."""
        self._refresh()
        if self._max_model_len:
            self.check(name)
        return self._max_model_len

    def check(self, name: str) -> None:
        """Raises NotFound that lists the available names, for a name that is neither the model's nor a loaded
        adapter's."""
        self._refresh()
        if name and name not in self._own_names and name not in self._adapters:
            raise model_not_found(name, [*self._own_names], self._adapters)

    def _refresh(self) -> None:
        """Adopts the context length and the adapters if the cluster has reported new limits; keeps the last ones
        otherwise."""
        limits = self._limits()
        if limits is not None and limits is not self._last_limits:
            self._last_limits = limits
            self._max_model_len, self._adapters = limits.max_model_len, frozenset(limits.adapters)
