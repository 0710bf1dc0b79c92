"""`LLM` and `AsyncLLM`: a cluster of one's own in a script or a notebook, or one that is there already."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import IO, Any, Unpack

from quire.async_client import AsyncClient
from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from quire.generating import Generating
from quire.lora import LoadedAdapters, LoRARequests
from quire.metrics import Metric, parse
from quire.outputs import Classification, Ranked, RequestOutput
from quire.params import SamplingParams
from quire.progress import bar
from quire.requests import ChatExtras, ChatMessages, EmbedExtras, Options, Params, Prompt, is_one
from shared.errors import FailedPrecondition, InvalidArgument
from shared.settings import SERVICES
from shared.weights_heads import DEFAULT_GROUP

ADMIN = ("admin_address", "admin_key_file")


class _Embedded:
    """Starts frontend, scheduler and worker on free ports, or joins the cluster at `address`.

    settings: those of the services by their own names, for example `device="cuda"`, `num_blocks=64`, or
    `worker={"threads": 2}` where a name belongs to several services. Raises InvalidArgument for unknown ones.
    """

    def __init__(
        self, model: str = "", *, address: str = "", workers: int = 1, log: IO[Any] | None = None, **settings: Any
    ) -> None:
        self._cluster: Cluster | None = None
        self._sink: IO[Any] | None = None
        self.address = address
        self._api_key = str(settings.get("api_key", ""))
        if address:
            settings.pop("api_key", None)
        if not address:
            options = ClusterOptions(
                model=model, workers=workers, http_port=0, grpc_port=0, settings=by_service(settings)
            )
            if log is None:
                log = self._sink = open(os.devnull, "w")  # noqa: SIM115 (closed in _stop())
            self._start(options, log)
        elif model or settings:
            raise InvalidArgument(
                f"address: {address!r} names a cluster that is there; model and settings do not apply"
            )

    def _start(self, options: ClusterOptions, log: IO[Any]) -> None:
        self._cluster = Cluster(options, log=log, report=lambda _line: None)
        try:
            self._cluster.start()
        except BaseException:
            self._stop()
            raise
        self.address = self._cluster.grpc_address

    def get_metrics(self) -> list[Metric]:
        """Of all services of a cluster of one's own. Raises FailedPrecondition for one that was joined."""
        if self._cluster is None or self._cluster.metrics is None:
            raise FailedPrecondition(f"the cluster at {self.address} is not this program's: read its /metrics")
        return parse(self._cluster.metrics.text())

    def get_tokenizer(self) -> Any:
        """The model's, as transformers has it. Raises FailedPrecondition for a cluster that was joined, whose model
        may lie elsewhere: its frontend tokenizes (client.tokenize)."""
        if self._cluster is None:
            where = f"the model of the cluster at {self.address} is not here"
            raise FailedPrecondition(f"{where}: client.tokenize() asks its frontend")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self._cluster.options.model_folder))

    def _stop(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None
        if self._sink is not None:
            self._sink.close()


class LLM(_Embedded):
    """with LLM() as llm: print(llm.generate("Once upon a time")[0].text)"""

    def __init__(self, model: str = "", **options: Any) -> None:
        """`admin_address`, `admin_key_file`: for operators' verbs where the cluster at `address` is not this user's on
        this machine (Client)."""
        operators = {name: options.pop(name) for name in ADMIN if options.get("address") and name in options}
        super().__init__(model, **options)
        self.client = Client(self.address, api_key=self._api_key, **operators)
        self.files = self.client.files  # of a cluster with batch_folder=
        self.batches = self.client.batches
        self._adapters = LoadedAdapters(self.client)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        lora_request: LoRARequests = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continues each prompt: text, token ids, or {"prompt": ...} or {"prompt_token_ids": ...}; results in their
        order. `params`: for all, or a list with each one's own; `sampling_params` is vLLM's name of it. `lora_request`:
        the same of adapters, which are loaded if they are not there."""
        count = 1 if is_one(prompts) else len(prompts)
        options = self._adapters.options(lora_request, count)
        with bar(count, shown=use_tqdm) as advance:
            return self.client.generate(prompts, _either(params, sampling_params), options, on_done=advance)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        params: Params = None,
        *,
        sampling_params: Params = None,
        lora_request: LoRARequests = None,
        use_tqdm: bool = False,
        **extras: Unpack[ChatExtras],
    ) -> list[RequestOutput]:
        """Answers one conversation or several; `lora_request`: as of generate(); `extras`: tools, tool_choice,
        reasoning_effort, ..."""
        count = 1 if isinstance(messages[0], dict) else len(messages)
        options = self._adapters.options(lora_request, count)
        with bar(count, shown=use_tqdm) as advance:
            return self.client.chat(messages, _either(params, sampling_params), options, on_done=advance, **extras)

    def embed(self, inputs: Prompt | Sequence[Prompt], **extras: Unpack[EmbedExtras]) -> list[list[float]]:
        """A vector for each input, text or token ids; `extras`: pooler (last, mean, cls), normalize, dimensions."""
        return self.client.embed(inputs, **extras)

    def encode(self, inputs: Prompt | Sequence[Prompt], **extras: Unpack[EmbedExtras]) -> list[list[list[float]]]:
        """All vectors of each input: with pooler all one of each token, with step of those that are step_tag_id."""
        return self.client.encode(inputs, **extras)

    def classify(self, inputs: Prompt | Sequence[Prompt]) -> list[Classification]:
        """The class of each input, text or token ids, by a model with a classifier."""
        return self.client.classify(inputs)

    def score(self, queries: str | Sequence[str], documents: str | Sequence[str]) -> list[float]:
        """How well each document answers the query, or its own of as many queries."""
        return self.client.score(queries, documents)

    def rerank(self, query: str, documents: Sequence[str], top_n: int = 0) -> list[Ranked]:
        """Documents by how well they answer the query, the best first; `top_n`: only so many, 0: all."""
        return self.client.rerank(query, documents, top_n)

    def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> int:
        """Has every worker load it (Client.load_adapter); lora_folders= of a cluster of one's own says from where."""
        return self._adapters.load(lora_name, lora_path, replace=load_inplace)

    def unload_lora_adapter(self, lora_name: str) -> int:
        """It is no model any more (Client.unload_adapter)."""
        return self._adapters.unload(lora_name)

    def sleep(self, level: int = 1, mode: str = "keep") -> int:
        """The memory of devices is for others (Client.sleep)."""
        return self.client.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> list[str]:
        """It is taken again (Client.wake_up)."""
        return self.client.wake_up(tags)

    def update_weights_from_disk(self, model_path: str, weight_version: str = "", mode: str = "wait") -> str:
        """Other weights take the place of those that are there (Client.update_weights_from_disk)."""
        return self.client.update_weights_from_disk(model_path, weight_version, mode)

    def update_weights_from_tensor(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: str = "", mode: str = "wait"
    ) -> str:
        """The same as a stream (Client.update_weights_from_tensor)."""
        return self.client.update_weights_from_tensor(named_tensors, weight_version, mode)

    def update_weights_from_ipc(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: str = "", mode: str = "wait"
    ) -> str:
        """The same through memory of this host (Client.update_weights_from_ipc)."""
        return self.client.update_weights_from_ipc(named_tensors, weight_version, mode)

    def init_weights_update_group(self, *place: Any, **options: Any) -> int:
        """For update_weights_from_distributed() (Client.init_weights_update_group)."""
        return self.client.init_weights_update_group(*place, **options)

    def update_weights_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]], **options: Any
    ) -> str:
        """The same through a trainer's process group (Client.update_weights_from_distributed)."""
        return self.client.update_weights_from_distributed(names, dtypes, shapes, **options)

    def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> None:
        self.client.destroy_weights_update_group(group_name)

    def close(self) -> None:
        """Drains and ends the cluster's processes if they are ours. Also happens when the interpreter exits."""
        self.client.close()
        self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLLM(_Embedded):
    """async with AsyncLLM() as llm: result = await llm.generate("Once upon a time")

    `async for output in llm.generate(...)` gives what there is so far, again and again.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        super().__init__(model, **options)
        self.client = AsyncClient(self.address, api_key=self._api_key)
        self.chat = self.client.chat
        self.embed = self.client.embed
        self.encode = self.client.encode
        self.classify = self.client.classify
        self.score = self.client.score
        self.stream = self.client.stream
        self.stream_chat = self.client.stream_chat
        self.files = self.client.files  # of a cluster with batch_folder=
        self.batches = self.client.batches

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str = "",
        *,
        sampling_params: SamplingParams | None = None,
        options: Options | None = None,
    ) -> Generating:
        """Continues a prompt; to be awaited or iterated, once."""
        options = options or Options()
        if request_id:
            options = replace(options, request_id=request_id)
        return Generating(self.client, prompt, params or sampling_params, options)

    async def close(self) -> None:
        await self.client.close()
        self._stop()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def by_service(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by their own names, or in a dict under a service's. Raises InvalidArgument for unknown ones."""
    sections: dict[str, dict[str, Any]] = {service: dict(settings.pop(service, {})) for service in SERVICES}
    for name, value in settings.items():
        owners = [service for service, model in SERVICES.items() if name in model.model_fields]
        if not owners:
            raise InvalidArgument(f"unknown setting {name}={value!r}", field=name)
        owner = "worker" if "worker" in owners else owners[0]
        sections[owner].setdefault(name, value)
    return sections


def _either(params: Params, sampling_params: Params) -> Params:
    if params is not None and sampling_params is not None:
        raise InvalidArgument("params and sampling_params are one thing: give one of them", field="params")
    return sampling_params if params is None else params
