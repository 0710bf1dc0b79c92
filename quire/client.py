"""Blocking client for a cluster's gRPC API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, TypeVar, Unpack

from quire.clients import calls
from quire.clients.admin import AdminClient, admin_of
from quire.clients.api_key import with_api_key
from quire.clients.batches import Batches, Files
from quire.clients.calls import InferenceCall
from quire.outputs import Classification, Delta, Message, Ranked, RequestOutput, collect
from quire.params import SamplingParams
from quire.requests import (
    ChatExtras,
    ChatMessages,
    EachOptions,
    EmbedExtras,
    Params,
    Prompt,
    RequestOptions,
    Scored,
    for_each,
    is_single_prompt,
    options_for_each,
    plain,
)
from quire.rpc_errors import translated_errors
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.batch.v1 import batch_pb2_grpc
from quire.shared.pb.common.v1.weights_stream_pb2 import BroadcastContent
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from quire.shared.rpc.channel import connect_blocking
from quire.shared.security.tls_files import NO_TLS, Tls
from quire.shared.tensor_headers import DEFAULT_GROUP, tensor_headers
from quire.shared.transcription.transcript import Transcript
from quire.transcriptions import TranscriptDelta, TranscriptionExtras, collected

TIMEOUT_S = 120.0  # for forming a trainer's group
DEFAULT_ADDRESS = "127.0.0.1:50051"
OnDone = Callable[[RequestOutput], object] | None
T = TypeVar("T")


class Client:
    """Blocking calls to a frontend; thread-safe. Close it, or use it in a `with` statement."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        tls: Tls = NO_TLS,
        admin_address: str = "",
        admin_key_file: str = "",
        api_key: str = "",
    ) -> None:
        """`api_key`: empty: that of the environment (QUIRE_API_KEY), if any. `admin_*`: address and key for
        operators' methods on a frontend that does not run on this machine as this user."""
        self.address = address
        self._tls = tls
        self._admin_at = admin_address, admin_key_file
        self._channel = connect_blocking(address, tls)
        self._inference = with_api_key(inference_pb2_grpc.InferenceServiceStub(self._channel), api_key)
        self.files = Files(with_api_key(batch_pb2_grpc.FileServiceStub(self._channel), api_key))
        self.batches = Batches(with_api_key(batch_pb2_grpc.BatchServiceStub(self._channel), api_key))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        options: EachOptions = None,
        timeout_s: float | None = None,
        *,
        on_done: OnDone = None,
    ) -> list[RequestOutput]:
        """Continues each prompt (text, token ids or a dict), all concurrently; returns results in the order of the
        prompts. `params`, `options`: one for all, or a list with one per prompt. `on_done`: called for each result,
        in that order."""
        batch: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        count = len(batch)
        each = zip(batch, for_each(params, count), options_for_each(options, count), strict=True)
        asked = [calls.whole_generation(prompt, own, chosen) for prompt, own, chosen in each]
        return self._collected(asked, [plain(prompt) for prompt in batch], timeout_s, on_done)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        params: Params = None,
        options: EachOptions = None,
        timeout_s: float | None = None,
        on_done: OnDone = None,
        **extras: Unpack[ChatExtras],
    ) -> list[RequestOutput]:
        """Answers one conversation, or several concurrently, in order. `on_done` is called with each result; the
        first error cancels the others and is raised."""
        batch: list[ChatMessages] = [messages] if isinstance(messages[0], dict) else list(messages)  # type: ignore
        count = len(batch)
        each = zip(batch, for_each(params, count), options_for_each(options, count), strict=True)
        asked = [calls.whole_chat(turns, own, chosen, extras) for turns, own, chosen in each]
        return self._collected(asked, batch, timeout_s, on_done)

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **extras: Unpack[EmbedExtras],
    ) -> list[list[float]]:
        """Returns a vector for each input (text or token ids), in order; `extras`: pooler, normalize, dimensions."""
        return self._ask(calls.embed(inputs, options, extras), timeout_s)

    def embed_stream(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None, **extras: Unpack[EmbedExtras]
    ) -> Iterator[tuple[int, list[float]]]:
        """Yields the index and vector of each input as soon as it is computed."""
        yield from self._stream(calls.embed_stream(inputs, options, extras))

    def encode(
        self,
        inputs: Prompt | Sequence[Prompt],
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **extras: Unpack[EmbedExtras],
    ) -> list[list[list[float]]]:
        """Returns all vectors of each input: with pooler "all" one per token, with "step" one per step_tag_id token."""
        return self._ask(calls.encode(inputs, options, extras), timeout_s)

    def classify(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None, timeout_s: float | None = None
    ) -> list[Classification]:
        """Returns the class of each input (text or token ids), in order."""
        return self._ask(calls.classify(inputs, options), timeout_s)

    def score(
        self,
        queries: str | Sequence[str],
        documents: Scored | Sequence[Scored],
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
    ) -> list[float]:
        """Scores how well each document matches the query, or each pair of equally many queries and documents."""
        return self._ask(calls.score(queries, documents, options), timeout_s)

    def rerank(
        self,
        query: str,
        documents: Sequence[Scored],
        top_n: int = 0,
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
    ) -> list[Ranked]:
        """Returns documents with their scores by how well they match the query, best first, at most `top_n` (0:
        all)."""
        return self._ask(calls.rerank(query, documents, top_n, options), timeout_s)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Iterator[Delta]:
        """Yields the continuation as it is generated."""
        yield from self._stream(calls.generation(prompt, params, options))

    def stream_chat(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **extras: Unpack[ChatExtras],
    ) -> Iterator[Delta]:
        """Yields one sample's answer in deltas as it is generated; leaving the loop early cancels the call, unless
        it is resumable."""
        yield from self._stream(calls.chat(messages, params, options, extras))

    def transcribe(
        self,
        sound: Any,
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **extras: Unpack[TranscriptionExtras],
    ) -> Transcript:
        """Returns the text of a file of sound, with its segments, by a model that transcribes. `sound`: an array, a
        pair of an array and its sampling rate, a path or bytes; `extras`: language, prompt, translate, ..."""
        return collected(self._stream(calls.transcribe(sound, options, extras), timeout_s))

    def stream_transcription(
        self, sound: Any, options: RequestOptions | None = None, **extras: Unpack[TranscriptionExtras]
    ) -> Iterator[TranscriptDelta]:
        """Yields the text of a file of sound as it is computed, and at last the whole text."""
        yield from self._stream(calls.transcribe(sound, options, extras))

    def attach(self, request_id: str, offset: int = 0, *, tenant: str = "") -> Iterator[Delta]:
        """Reads a stream started with RequestOptions(resumable=True), at any frontend: its messages from number
        `offset` on, then new ones as they arrive; Delta.offset is the number. Raises NotFound after its retention
        time."""
        yield from self._stream(calls.attach(request_id, offset, tenant))

    def cancel(self, request_id: str, *, tenant: str = "") -> None:
        """Ends a resumable stream."""
        self._ask(calls.cancel(request_id, tenant))

    def tokenize(self, text: str) -> list[int]:
        return self._ask(calls.tokenize(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._ask(calls.detokenize(token_ids))

    def models(self) -> list[pb.Model]:
        return self._ask(calls.models())

    def adapter_names(self) -> set[str]:
        """Returns the adapters that requests may select as their model."""
        return {model.name for model in self.models() if model.adapter_of}

    def status(self, timeout_s: float = 5.0) -> list[admin_pb2.ServiceStatus]:
        """Returns the status of every service of the cluster."""
        with closing(self._admin()) as admin:
            return admin.status(timeout_s)

    def reset_prefix_cache(self, preempt_running: bool = False) -> int:
        """Discards all cached prefixes; returns the number of blocks that held one."""
        with closing(self._admin()) as admin:
            return admin.reset_prefix_cache(preempt_running=preempt_running)

    def pause_generation(self, mode: str = "keep") -> int:
        """Stops all workers between two steps. With "keep" sequences continue at resume_generation(), with "abort"
        they end, with "wait" they finish first: Unavailable if that takes a scheduler more than a minute, which then
        continues. New requests wait. Returns the number of waiting or, with "abort", ended sequences."""
        with closing(self._admin()) as admin:
            return admin.pause_generation(mode)

    def resume_generation(self) -> None:
        with closing(self._admin()) as admin:
            admin.resume_generation()

    def update_weights_from_disk(self, model_path: str, weight_version: str = "", mode: str = "wait") -> str:
        """Replaces the weights of every worker by those in a folder inside one of their weights_folders (absolute or
        relative path). With "wait" requests in progress finish first and new ones wait; with "keep" they continue
        with the new weights, with "abort" they end. Returns the version that results report
        (RequestOutput.weight_version). Updates all workers or none: InvalidArgument says what does not match."""
        with closing(self._admin()) as admin:
            return admin.update_weights(model_path, weight_version, mode)

    def update_weights_from_tensor(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: str = "", mode: str = "wait"
    ) -> str:
        """Updates weights from a checkpoint's tensors, such as a trainer's state_dict().items(), which are streamed
        to the workers."""
        with closing(self._admin()) as admin:
            return admin.stream_weights(named_tensors, weight_version, mode)

    def update_weights_from_ipc(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: str = "", mode: str = "wait"
    ) -> str:
        """Updates weights of workers on this host and of this user, which read the tensors directly: on GPUs through
        CUDA IPC, otherwise in shared memory. The tensors must not change until this returns."""
        with closing(self._admin()) as admin:
            return admin.share_weights(named_tensors, weight_version, mode)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        *,
        group_name: str = DEFAULT_GROUP,
        backend: str = "nccl",
        timeout_s: float = TIMEOUT_S,
    ) -> int:
        """Makes every rank of every worker join a torch.distributed process group ("nccl" or "gloo") whose TCPStore
        listens at this address, with ranks from rank_offset on. The trainer, rank 0, must join at the same time.
        Returns the number of worker ranks when all members have joined (WeightsUpdateGroup does all of this)."""
        request = admin_pb2.InitWeightsUpdateGroupRequest(
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
            timeout_ms=round(timeout_s * 1000),
        )
        with closing(self._admin()) as admin:
            return admin.init_weights_update_group(request)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        *,
        weight_version: str = "",
        mode: str = "wait",
        group_name: str = DEFAULT_GROUP,
        timeout_s: float = TIMEOUT_S,
    ) -> str:
        """Updates weights from tensors that the trainer broadcasts in the group, in this order, while this call
        waits. Raises Unavailable if they do not all arrive within timeout_s: the old weights stay in use, the group
        ends."""
        content = BroadcastContent(group_name=group_name, timeout_ms=round(timeout_s * 1000))
        with closing(self._admin()) as admin:
            heads = tensor_headers(names, dtypes, shapes)
            return admin.broadcast_weights(heads, content, weight_version, mode)

    def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> None:
        """Makes the workers leave the group."""
        with closing(self._admin()) as admin:
            admin.destroy_weights_update_group(group_name)

    def sleep(self, level: int = 1, mode: str = "keep") -> int:
        """Releases the device memory of all workers: the KV cache, and the weights, which move to host memory (level
        1) or are discarded and read again at wake_up() (level 2). Requests in progress wait ("keep"), end ("abort"),
        or finish first ("wait"); new ones wait. Returns the number of waiting or ended sequences."""
        with closing(self._admin()) as admin:
            return admin.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> list[str]:
        """Allocates the memory again: "weights", "kv_cache", or everything. When nothing is asleep, generation
        continues. Returns what is still asleep. Raises ResourceExhausted if other processes use the memory: retry
        later."""
        with closing(self._admin()) as admin:
            return admin.wake_up(tags or ())

    def is_sleeping(self) -> bool:
        """Whether any part of the cluster is asleep."""
        return any(one.role == admin_pb2.ROLE_SCHEDULER and one.asleep for one in self.status())

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> int:
        """Loads a LoRA adapter into every worker, from a folder inside one of their lora_folders (absolute or
        relative path). Afterwards `name` can be used as a model. `replace`: replaces an adapter of that name.
        Returns the number of workers."""
        with closing(self._admin()) as admin:
            return admin.load_adapter(name, path, replace=replace)

    def unload_adapter(self, name: str) -> int:
        """Makes `name` unavailable as a model. Returns the number of sequences that still use it until they end."""
        with closing(self._admin()) as admin:
            return admin.unload_adapter(name)

    def adapters(self) -> list[admin_pb2.Adapter]:
        """Returns the loaded adapters with their usage."""
        with closing(self._admin()) as admin:
            return admin.adapters()

    def _admin(self) -> AdminClient:
        """Opens an admin client for each call, because a restarted frontend has another port and key."""
        return AdminClient(admin_of(self.address, *self._admin_at), self._tls)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _ask(self, call: InferenceCall[T], timeout_s: float | None = None) -> T:
        with translated_errors():
            return call.read(call.on(self._inference, timeout_s))

    def _stream(self, call: InferenceCall[T], timeout_s: float | None = None) -> Iterator[T]:
        """Yields the converted messages of a streaming call; gRPC errors are raised as QuireErrors. The call is
        cancelled when the iteration ends."""
        messages = call.on(self._inference, timeout_s)
        try:
            with translated_errors():
                yield from map(call.read, messages)
        finally:
            messages.cancel()  # leaving the loop early frees the blocks; a resumable stream continues

    def _collected(
        self,
        asked: Sequence[InferenceCall[Message]],
        prompts: Sequence[object],
        timeout_s: float | None,
        on_done: OnDone,
    ) -> list[RequestOutput]:
        """Sends all calls at once and returns their results in order; the first error cancels all streams and is
        raised."""
        streams = [call.on(self._inference, timeout_s) for call in asked]
        found = []
        try:
            with translated_errors():
                for stream, prompt in zip(streams, prompts, strict=True):
                    found.append(collect(stream, prompt))
                    if on_done is not None:
                        on_done(found[-1])
        finally:
            for stream in streams:  # after an error, unread streams would keep their blocks
                stream.cancel()
        return found
