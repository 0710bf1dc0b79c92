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
    """A model as clients see it."""

    name: str
    vocab_size: int
    created_unix_s: int
    max_model_len: int  # 0 until a worker has said so
    ready: bool
    adapter_of: str = ""  # the model that it is an adapter of; empty: it is none


class Catalogue:
    """Of the one model that this frontend tokenizes for, and of its adapters."""

    def __init__(
        self,
        identity: model_pb2.ModelIdentity,
        limits: Callable[[], ClusterLimits | None],
        aliases: Sequence[str] = (),
    ) -> None:
        """`aliases`: further names of the model; answers carry its first one."""
        self._identity = identity
        self._limits = limits
        self._own_names = dict.fromkeys((identity.name, *aliases))
        self._created_unix_s = int(time.time())
        self._max_model_len = 0
        self._adapters: frozenset[str] = frozenset()
        self._seen: ClusterLimits | None = None  # which said so

    @property
    def name(self) -> str:
        return self._identity.name

    def entry(self, name: str = "") -> CatalogueEntry:
        """NotFound unless `name` is the model's, an adapter's, or empty."""
        self.check(name)
        adapter = self.adapter_name(name)
        return CatalogueEntry(
            adapter or self.name,
            self._identity.vocab_size,
            self._created_unix_s,
            self._max_model_len,
            self._limits() is not None,
            adapter_of=self.name if adapter else "",
        )

    def entries(self) -> list[CatalogueEntry]:
        """The model under each of its names, then its adapters by name."""
        self._look()
        own = self.entry()
        named = [replace(own, name=name) for name in self._own_names]
        return [*named, *map(self.entry, sorted(self._adapters - self._own_names.keys()))]

    @property
    def adapters(self) -> frozenset[str]:
        """By name; as the last worker said."""
        self._look()
        return self._adapters

    def adapter_name(self, name: str) -> str:
        """Which adapter a request of that model goes through; empty: none."""
        return "" if name in self._own_names else name

    def served_name(self, name: str) -> str:
        """The name that answers to a request of that model carry."""
        return self.adapter_name(name) or self.name

    def max_model_len(self, name: str) -> int:
        """For a request of that model, 0 until a worker has said so. NotFound, but not before that: until then any name
        may be that of an adapter, and whoever prepares the request for the first worker knows."""
        self._look()
        if self._max_model_len:
            self.check(name)
        return self._max_model_len

    def check(self, name: str) -> None:
        self._look()
        if name and name not in self._own_names and name not in self._adapters:
            raise model_not_found(name, [*self._own_names], self._adapters)

    def _look(self) -> None:
        limits = self._limits()
        if limits is not None and limits is not self._seen:
            self._seen = limits
            self._max_model_len, self._adapters = limits.max_model_len, frozenset(limits.adapters)
