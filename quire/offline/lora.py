"""`LoRARequest`: selects a prompt's adapter, which is loaded when it is first used."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from quire.requests import RequestOptions, one_per_prompt
from quire.shared.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Adapter selection in vLLM's form: LoRARequest("sql", 1, "/adapters/sql").

    The name identifies the adapter in the whole cluster; the number exists for compatibility and has no effect. The
    folder must be readable by workers: absolute, or relative to one of their lora_folders; empty: the adapter is
    already loaded.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise InvalidArgument("lora_name: must not be empty", field="lora_name")


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one per prompt; None: the model without an adapter."""


# A frontend lists an adapter shortly after the scheduler has loaded it for another program.
LISTED_WITHIN_S = 5.0
LISTED_POLL_S = 0.05


class AdapterSource(Protocol):
    """Loads adapters: a cluster, or an engine in this process."""

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> int: ...

    def unload_adapter(self, name: str) -> int: ...

    def adapter_names(self) -> set[str]:
        """Returns the adapters that requests may select."""


class LoadedAdapters:
    """Adapters that one program uses, with the folders from which they were loaded. Thread-safe."""

    def __init__(self, source: AdapterSource) -> None:
        self._source = source
        self._paths: dict[str, str] = {}
        self._loading = threading.Lock()  # only one of several requests loads a new adapter

    def load(self, name: str, path: str, *, replace: bool) -> int:
        count = self._source.load_adapter(name, path, replace=replace)
        self._paths[name] = path
        return count

    def unload(self, name: str) -> int:
        self._paths.pop(name, None)
        return self._source.unload_adapter(name)

    def options(self, asked: LoRARequests, count: int) -> list[RequestOptions] | None:
        """Returns the options of `count` prompts that select their adapters, which are loaded if needed; None
        without adapters. Raises QuireError if one cannot be loaded."""
        if asked is None:
            return None
        each = [asked] * count if isinstance(asked, LoRARequest) else one_per_prompt(asked, count, "lora_request")
        named = dict.fromkeys(request for request in each if request is not None)
        self._have([request for request in named if request.lora_path])
        return [RequestOptions(model=request.lora_name if request else "") for request in each]

    def groups(self, asked: LoRARequests, count: int) -> dict[RequestOptions, list[int]]:
        """Groups the indices of `count` prompts by the options that select their adapters, which are loaded if
        needed."""
        found: dict[RequestOptions, list[int]] = {}
        for number, own in enumerate(self.options(asked, count) or [RequestOptions()] * count):
            found.setdefault(own, []).append(number)
        return found

    def chosen(self, asked: LoRARequest | None, options: RequestOptions | None = None) -> RequestOptions:
        """Returns the options of one request. Raises QuireError; InvalidArgument if options name a model as well."""
        options = options or RequestOptions()
        if asked is None:
            return options
        if not isinstance(asked, LoRARequest):
            raise InvalidArgument("lora_request: this call takes one LoRARequest, not a list", field="lora_request")
        if options.model:
            text = f"lora_request: {asked.lora_name!r} differs from options.model, {options.model!r}; give one of them"
            raise InvalidArgument(text, field="lora_request")
        if asked.lora_path:
            self._have([asked])
        return replace(options, model=asked.lora_name)

    def _have(self, requests: Sequence[LoRARequest]) -> None:
        with self._loading:
            self._load_missing(requests)

    def _load_missing(self, requests: Sequence[LoRARequest]) -> None:
        """Loads the adapters that the cluster does not list; raises InvalidArgument if a name was loaded from
        another path."""
        there = self._source.adapter_names() if requests else set[str]()
        for request in requests:
            name, path = request.lora_name, request.lora_path
            if name not in there:
                self._load_or_find(name, path)
                there.add(name)
            elif self._paths.get(name, path) != path:
                text = f"lora_path: {name!r} was loaded from {self._paths[name]!r}, not from {path!r}"
                raise InvalidArgument(
                    f"{text}; replace it with load_lora_adapter(..., load_inplace=True)", field="lora_path"
                )

    def _load_or_find(self, name: str, path: str) -> None:
        """Loads an adapter; if another client loaded one of that name meanwhile, that one is used."""
        try:
            self.load(name, path, replace=False)
        except InvalidArgument as error:
            another_was_faster = error.field == "lora_name"
            if not (another_was_faster and self._is_listed(name)):
                raise

    def _is_listed(self, name: str) -> bool:
        """Waits until requests may select the adapter `name`; returns False after a timeout."""
        end = time.monotonic() + LISTED_WITHIN_S
        while name not in self._source.adapter_names():
            if time.monotonic() > end:
                return False
            time.sleep(LISTED_POLL_S)
        return True
