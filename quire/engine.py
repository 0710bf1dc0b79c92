"""`LLMEngine`: no cluster, no sockets: requests go in, step() computes, what came of it comes out."""

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
    """engine = LLMEngine(); engine.add_request("1", "Once upon a time"); while engine.has_unfinished_requests(): ...

    What `LLM` has in processes of their own is here one object of one thread: nothing runs between two calls of step().
    Settings are those of the services, as for `LLM`; those of sockets, Redis and clusters mean nothing here.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        """Loads the model. Raises InvalidArgument for what is wrong with it or with the settings."""
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
        """Takes it in; step() computes. `lora_request`: its adapter, which is loaded if it is not there. Raises
        QuireError for what cannot be run, which leaves nothing behind."""
        options = replace(self._adapters.chosen(lora_request, options), request_id=request_id)
        if priority:
            options = replace(options, priority=priority)
        added = self._engine.add(generate_request(prompt, params, options))
        self._gathered[added] = OutputCollector(plain(prompt))

    def step(self) -> list[RequestOutput]:
        """Computes a step for as many as fit. Of each request that it brought something: all there is so far."""
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
        """Continues each prompt, all at a time, as `LLM.generate` does; results in the order of the prompts. Raises
        what one of them ends with. FailedPrecondition while others are under way: their news would be lost."""
        if self.has_unfinished_requests():
            text = f"generate: {len(self._gathered)} requests are under way, whose outputs step() returns"
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
        """These say nothing more. Those that are not there, or not any more, are passed over."""
        ended = [request_ids] if isinstance(request_ids, str) else [*request_ids]
        self._engine.abort(ended)
        for request_id in ended:
            self._gathered.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._gathered)

    def get_num_unfinished_requests(self) -> int:
        return len(self._gathered)

    def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> int:
        """That requests may name from now on, out of one of lora_folders; with `load_inplace` in the place of one of
        that name. Raises QuireError, and then nothing has changed."""
        return self._adapters.load(lora_name, lora_path, replace=load_inplace)

    def unload_lora_adapter(self, lora_name: str) -> int:
        """Nobody can name it any more. Returns how many sequences still go through it, to their ends."""
        return self._adapters.unload(lora_name)

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> int:
        """As Client.load_adapter(); 1 has it."""
        self._engine.load_adapter(name, path, replace=replace)
        return 1

    def unload_adapter(self, name: str) -> int:
        """As Client.unload_adapter()."""
        num_sequences: int = self._engine.unload_adapter(name)
        return num_sequences

    def adapter_names(self) -> set[str]:
        """That requests may name."""
        return set(self._engine.adapters)

    @property
    def weight_version(self) -> str:
        """Of the weights that the next step is computed with: "0" at the start."""
        version: str = self._engine.weight_version
        return version

    def update_weights_from_disk(self, model_path: str | Path, weight_version: str = "") -> None:
        """Puts the weights of another folder in the place of those that are there; its config.json says the same.

        No cached prefix is used any more, and requests that go on are computed anew with what they have so far. The
        version is the number of updates unless it is given. Raises InvalidArgument with what is missing or has another
        shape, and FailedPrecondition where weights cannot be changed (on a GPU, with the code of transformers): then
        nothing has changed. Takes the memory of the weights once more while it lasts.
        """
        self._engine.update_weights(Path(model_path), weight_version)

    def update_weights_from_tensor(self, named_tensors: Iterable[tuple[str, Any]], weight_version: str = "") -> None:
        """The same from all tensors of the model as a checkpoint names them: a trainer's
        `model.state_dict().items()`, of which nothing is kept."""
        self._engine.update_weights(named_tensors, weight_version)

    def get_tokenizer(self) -> Any:
        """The model's, as transformers has it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(Path(self._folder)))

    def close(self) -> None:
        """Gives back its threads; what goes on is aborted."""
        self._engine.close()
        self._gathered.clear()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
