"""`LLMEngine`: inference without a cluster or sockets; step() computes and returns what is new."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire import bundled
from quire.offline.embedded_cluster import by_service
from quire.offline.lora import LoadedAdapters, LoRARequest, LoRARequests
from quire.outputs import OutputCollector, RequestOutput
from quire.params import SamplingParams
from quire.requests import (
    Params,
    Prompt,
    RequestOptions,
    for_each,
    generate_request,
    is_single_prompt,
    options_for_each,
    plain,
)
from quire.shared.errors import FailedPrecondition
from quire.shared.settings import SERVICES


class LLMEngine:
    """Synchronous engine: `engine.add_request("1", "Once upon a time"); while engine.has_unfinished_requests():
    engine.step()`.

    The functions of `LLM`'s processes run in one object and one thread; nothing runs between two calls of step().
    Settings are those of the services, as for `LLM`; those for sockets, Redis and clusters have no effect.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        """Loads the model (default: the bundled one) and builds frontend, scheduler and worker in this process.
        `settings` are those of any of them; raises InvalidArgument for unsupported models and invalid settings."""
        self._folder = model or str(bundled.FOLDER)
        sections = by_service(settings)
        served = sections["worker"].get("served_model_name") or ("" if model else bundled.NAME)
        for service in ("frontend", "worker"):
            sections[service]["model"] = self._folder
            sections[service].setdefault("served_model_name", served)
        made = [SERVICES[service](**sections[service]) for service in ("frontend", "scheduler", "worker")]
        self._engine = importlib.import_module("quire.services.in_process.engine").InProcessEngine(*made)
        self._gathered: dict[str, OutputCollector] = {}
        self._adapters = LoadedAdapters(self)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        options: RequestOptions | None = None,
    ) -> None:
        """Adds a request, which step() computes, and loads the adapter of `lora_request` if needed. Raises
        QuireError for a request that cannot run; it is then not added."""
        if lora_request is not None:
            options = self._adapters.chosen(lora_request, options)
        options = replace(options or RequestOptions(), request_id=request_id)
        if priority:
            options = replace(options, priority=priority)
        added = self._engine.add(generate_request(prompt, params, options))
        self._gathered[added] = OutputCollector(plain(prompt))

    def step(self) -> list[RequestOutput]:
        """Computes one step; returns the growing results of the requests that made progress."""
        outputs = []
        for news in self._engine.step():
            gathered = self._gathered[news.request_id]
            for message in news.messages:
                gathered.add(message)
            gathered.result.request_id = news.request_id
            gathered.result.error = news.error
            gathered.result.weight_version = self.weight_version
            outputs.append(gathered.result)
            if news.finished:
                del self._gathered[news.request_id]
        return outputs

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, lora_request: LoRARequests = None
    ) -> list[RequestOutput]:
        """Continues each prompt concurrently, like `LLM.generate`; returns results in the order of the prompts.
        Raises the error of a request. Raises FailedPrecondition while other requests are in progress, because their
        output would be lost."""
        if self.has_unfinished_requests():
            text = (
                f"generate: {len(self._gathered)} requests added before are unfinished; call step() until they "
                "have finished"
            )
            raise FailedPrecondition(text)
        batch: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        numbers = {str(number): number for number in range(len(batch))}
        options = options_for_each(self._adapters.options(lora_request, len(batch)), len(batch))
        found: dict[int, RequestOutput] = {}
        try:
            for (name, number), own in zip(numbers.items(), for_each(params, len(batch)), strict=True):
                self.add_request(name, batch[number], own, options=options[number])
            while self.has_unfinished_requests():
                found |= {numbers[output.request_id]: output for output in self.step() if output.finished}
        finally:
            self.abort_request(list(self._gathered))
        for output in found.values():
            if output.error is not None:
                raise output.error
        return [found[number] for number in range(len(batch))]

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Aborts one request or several without further output and forgets what they have generated; unknown ids are
        ignored."""
        ended = [request_ids] if isinstance(request_ids, str) else [*request_ids]
        self._engine.abort(ended)
        for request_id in ended:
            self._gathered.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._gathered)

    def get_num_unfinished_requests(self) -> int:
        return len(self._gathered)

    def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> int:
        """Loads an adapter from one of lora_folders; with `load_inplace` it replaces one of that name. Raises
        QuireError, and then nothing has changed."""
        return self._adapters.load(lora_name, lora_path, replace=load_inplace)

    def unload_lora_adapter(self, lora_name: str) -> int:
        """Makes an adapter unavailable. Returns the number of sequences that still use it until they end."""
        return self._adapters.unload(lora_name)

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> int:
        """Loads an adapter, like Client.load_adapter(); returns 1."""
        self._engine.load_adapter(name, path, replace=replace)
        return 1

    def unload_adapter(self, name: str) -> int:
        """Unloads an adapter, like Client.unload_adapter()."""
        num_sequences: int = self._engine.unload_adapter(name)
        return num_sequences

    def adapter_names(self) -> set[str]:
        """Returns the adapters that requests may select."""
        return set(self._engine.adapters)

    @property
    def weight_version(self) -> str:
        """Version of the weights that the next step uses: "0" at the start."""
        version: str = self._engine.weight_version
        return version

    def update_weights_from_disk(self, model_path: str | Path, weight_version: str = "") -> None:
        """Replaces the weights by those of another folder with the same config.json.

        Cached prefixes are not used any more, and the KV of running requests is recomputed. The version is the
        number of updates unless given. Raises InvalidArgument for missing or mismatched tensors, and
        FailedPrecondition where weights cannot be replaced (transformers' implementation on a GPU): then nothing has
        changed. Temporarily needs memory for a second copy of the weights.
        """
        self._engine.update_weights(Path(model_path), weight_version)

    def update_weights_from_tensor(self, named_tensors: Iterable[tuple[str, Any]], weight_version: str = "") -> None:
        """Replaces the weights by tensors with the names of a checkpoint, such as a trainer's
        `model.state_dict().items()`, which are copied."""
        self._engine.update_weights(named_tensors, weight_version)

    def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer as transformers provides it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(Path(self._folder)))

    def close(self) -> None:
        """Ends the threads; running requests are aborted."""
        self._engine.close()
        self._gathered.clear()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
