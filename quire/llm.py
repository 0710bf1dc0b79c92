"""`LLM`: a cluster started by a script or a notebook, or an existing one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar, Unpack

from quire.offline.embedded_cluster import EmbeddedCluster
from quire.offline.lora import LoRARequest, LoRARequests
from quire.offline.progress import bar, file_bar
from quire.outputs import Classification, Ranked, RequestOutput
from quire.requests import (
    ChatExtras,
    ChatMessages,
    EmbedExtras,
    Params,
    Prompt,
    RequestOptions,
    Scored,
    is_single_prompt,
)
from quire.shared.errors import InvalidArgument
from quire.shared.tensor_headers import DEFAULT_GROUP
from quire.shared.transcription.transcript import Transcript
from quire.sounds import listed
from quire.transcriptions import TranscriptionExtras

Pooled = TypeVar("Pooled")
FILES_AT_ONCE = 8  # that are transcribed by one call


class LLM(EmbeddedCluster):
    """Interface for scripts: `with LLM() as llm: print(llm.generate("Once upon a time")[0].text)`."""

    def __init__(self, model: str = "", **options: Any) -> None:
        """Starts a cluster, or connects to one, with the arguments and errors of EmbeddedCluster."""
        super().__init__(model, **options)
        self.client = self._blocking
        self.files = self.client.files  # requires batch_folder= on the cluster
        self.batches = self.client.batches

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        lora_request: LoRARequests = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continues each prompt: text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}; returns results in
        order. Dictionaries may have multi_modal_data={"image": ...}. `params` (vLLM's name: `sampling_params`): one for
        all, or a list with one per prompt. `lora_request`: the same for adapters, which are loaded if needed."""
        count = 1 if is_single_prompt(prompts) else len(prompts)
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
        """Answers one conversation or several, in order. The adapters of `lora_request`, one for all or one each,
        are loaded if needed; `extras` are tools, tool_choice, reasoning_effort, ..."""
        count = 1 if isinstance(messages[0], dict) else len(messages)
        options = self._adapters.options(lora_request, count)
        with bar(count, shown=use_tqdm) as advance:
            return self.client.chat(messages, _either(params, sampling_params), options, on_done=advance, **extras)

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        lora_request: LoRARequests = None,
        **extras: Unpack[EmbedExtras],
    ) -> list[list[float]]:
        """Returns a vector for each input (text or token ids), with one adapter for all or one each. `extras` are
        pooler (last, mean, cls), normalize and dimensions."""
        return self._pooled(inputs, lora_request, lambda part, own: self.client.embed(part, own, **extras))

    def encode(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        lora_request: LoRARequests = None,
        **extras: Unpack[EmbedExtras],
    ) -> list[list[list[float]]]:
        """Returns all vectors of each input: with pooler "all" one per token, with "step" one per step_tag_id token."""
        return self._pooled(inputs, lora_request, lambda part, own: self.client.encode(part, own, **extras))

    def classify(self, inputs: Prompt | Sequence[Prompt], *, lora_request: LoRARequests = None) -> list[Classification]:
        """Returns the class of each input (text or token ids), by a model with a classifier."""
        return self._pooled(inputs, lora_request, self.client.classify)

    def score(
        self,
        queries: str | Sequence[str],
        documents: Scored | Sequence[Scored],
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[float]:
        """Returns a score of each document for the one query, or of each pair of equally many queries and documents;
        the adapter of `lora_request` is used for all of them."""
        return self.client.score(queries, documents, self._adapters.chosen(lora_request))

    def rerank(
        self, query: str, documents: Sequence[Scored], top_n: int = 0, *, lora_request: LoRARequest | None = None
    ) -> list[Ranked]:
        """Returns documents with their scores by how well they match the query, best first, at most `top_n` (0:
        all)."""
        return self.client.rerank(query, documents, top_n, self._adapters.chosen(lora_request))

    def transcribe(
        self, sounds: Any, *, use_tqdm: bool = False, **extras: Unpack[TranscriptionExtras]
    ) -> list[Transcript]:
        """Returns the text of each file of sound, with its segments, by a model that transcribes; in order, some at a
        time. `sounds`: one or a list of arrays, pairs of an array and its sampling rate, paths, or bytes; `extras`:
        language, prompt, translate, timestamp_granularities, ..."""
        batch = listed(sounds)
        with file_bar(len(batch), shown=use_tqdm) as advance, ThreadPoolExecutor(FILES_AT_ONCE) as threads:
            asked = [threads.submit(self.client.transcribe, sound, **extras) for sound in batch]
            try:
                for done in as_completed(asked):
                    done.result()
                    advance()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return [each.result() for each in asked]

    def _pooled(
        self,
        inputs: Prompt | Sequence[Prompt],
        asked: LoRARequests,
        ask: Callable[[list[Prompt], RequestOptions], list[Pooled]],
    ) -> list[Pooled]:
        """Makes one call per adapter, because all inputs of a call use the same one; returns results in the order of
        inputs."""
        batch: list[Any] = [inputs] if is_single_prompt(inputs) else list(inputs)
        found: dict[int, Pooled] = {}
        for own, numbers in self._adapters.groups(asked, len(batch)).items():
            answers = ask([batch[number] for number in numbers], own)
            found |= dict(zip(numbers, answers, strict=True))
        return [found[number] for number in range(len(batch))]

    def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> int:
        """Loads an adapter into every worker (Client.load_adapter), from lora_folders= of the cluster."""
        return self._adapters.load(lora_name, lora_path, replace=load_inplace)

    def unload_lora_adapter(self, lora_name: str) -> int:
        """Unloads an adapter (Client.unload_adapter)."""
        return self._adapters.unload(lora_name)

    def sleep(self, level: int = 1, mode: str = "keep") -> int:
        """Releases device memory (Client.sleep)."""
        return self.client.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> list[str]:
        """Allocates device memory again (Client.wake_up)."""
        return self.client.wake_up(tags)

    def update_weights_from_disk(self, model_path: str, weight_version: str = "", mode: str = "wait") -> str:
        """Replaces the weights by those in a folder (Client.update_weights_from_disk)."""
        return self.client.update_weights_from_disk(model_path, weight_version, mode)

    def update_weights_from_tensor(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: str = "", mode: str = "wait"
    ) -> str:
        """Replaces the weights by streamed tensors (Client.update_weights_from_tensor)."""
        return self.client.update_weights_from_tensor(named_tensors, weight_version, mode)

    def update_weights_from_ipc(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: str = "", mode: str = "wait"
    ) -> str:
        """Replaces the weights through shared memory of this host (Client.update_weights_from_ipc)."""
        return self.client.update_weights_from_ipc(named_tensors, weight_version, mode)

    def init_weights_update_group(self, *place: Any, **options: Any) -> int:
        """Forms a group for update_weights_from_distributed() (Client.init_weights_update_group)."""
        return self.client.init_weights_update_group(*place, **options)

    def update_weights_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]], **options: Any
    ) -> str:
        """Replaces the weights through a trainer's process group (Client.update_weights_from_distributed)."""
        return self.client.update_weights_from_distributed(names, dtypes, shapes, **options)

    def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> None:
        self.client.destroy_weights_update_group(group_name)

    def close(self) -> None:
        """Drains and ends the cluster's processes if this object started them. Also called when the interpreter
        exits."""
        self.client.close()
        self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _either(params: Params, sampling_params: Params) -> Params:
    if params is not None and sampling_params is not None:
        raise InvalidArgument("params and sampling_params are two names of one argument; give only one", field="params")
    return sampling_params if params is None else params
