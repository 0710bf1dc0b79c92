"""Routes of GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.services.frontend.generation.catalogue import Catalogue, CatalogueEntry
from quire.services.frontend.http.router import Router


class ModelRoutes:
    """Routes of the model catalogue."""

    def __init__(self, catalogue: Catalogue, endpoints: Sequence[str] = ()) -> None:
        """`endpoints`: paths that only some models have, and this one does."""
        self._catalogue, self._endpoints = catalogue, tuple(endpoints)
        self.router = Router(tags=["models"])
        self.router.add_api_route("/v1/models", self.list_models, methods=["GET"])
        self.router.add_api_route("/v1/models/{name:path}", self.get_model, methods=["GET"])

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card(entry) for entry in self._catalogue.entries()]}

    async def get_model(self, name: str) -> dict[str, Any]:
        return self._card(self._catalogue.entry(name))

    def _card(self, entry: CatalogueEntry) -> dict[str, Any]:
        """Returns a model's entry, with the paths of its own if it has any."""
        own = {"supported_endpoints": [*self._endpoints]} if self._endpoints else {}
        return {**_card(entry), **own}


def _card(entry: CatalogueEntry) -> dict[str, Any]:
    """Returns a model's entry; an adapter has its base model as root and parent."""
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created_unix_s,
        "owned_by": "quire",
        "root": entry.adapter_of or entry.name,
        "parent": entry.adapter_of or None,
        "max_model_len": entry.max_model_len or None,  # unknown until a worker has reported it
        "ready": entry.ready,
        "input_modalities": [*entry.input_modalities],
    }
