"""The models that clients can name. A model stays listed while no worker serves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.scheduler_client.client import Limits
from shared.errors import NotFound
from shared.pb.common.v1 import model_pb2


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model as clients see it."""

    name: str
    vocab_size: int
    created_unix_s: int
    max_model_len: int  # 0 until a worker has said so
    ready: bool


class Catalogue:
    """Of the one model that this frontend tokenizes for."""

    def __init__(self, identity: model_pb2.ModelIdentity, limits: Callable[[], Limits | None]) -> None:
        self._identity = identity
        self._limits = limits
        self._created_unix_s = int(time.time())
        self._max_model_len = 0

    @property
    def name(self) -> str:
        return self._identity.name

    def entry(self, name: str = "") -> CatalogueEntry:
        """NotFound unless `name` is the model's, or empty."""
        self.check(name)
        limits = self._limits()
        if limits is not None:
            self._max_model_len = limits.max_model_len
        return CatalogueEntry(
            self.name, self._identity.vocab_size, self._created_unix_s, self._max_model_len, limits is not None
        )

    def check(self, name: str) -> None:
        if name not in ("", self.name):
            raise NotFound(f"The model `{name}` does not exist.", field="model")
