"""A cluster's gRPC API from Python, blocking."""

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
    for_each,
    is_single_prompt,
    options_for_each,
    plain,
    translated_errors,
)
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.batch.v1 import batch_pb2_grpc
from quire.shared.pb.common.v1.weights_stream_pb2 import BroadcastContent
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from quire.shared.rpc.channel import connect_blocking
from quire.shared.security.tls_files import NO_TLS, Tls
from quire.shared.tensor_headers import DEFAULT_GROUP, tensor_headers

TIMEOUT_S = 120.0  # of a trainer's group
DEFAULT_ADDRESS = "127.0.0.1:50051"
OnDone = Callable[[RequestOutput], object] | None
T = TypeVar("T")


class Client:
    """Blocking calls to a frontend. Safe to use from several threads; close it, or use it in a `with` statement."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        tls: Tls = NO_TLS,
        admin_address: str = "",
        admin_key_file: str = "",
        api_key: str = "",
    ) -> None:
        """`api_key`: empty: that of the environment (QUIRE_API_KEY), if any. `admin_*`: for status() and
        reset_prefix_cache() of a frontend that is not this user's on this machine."""
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
        """Continues each prompt, text, token ids or a dict, all at a time; results in the order of the prompts.
        `params`, `options`: for all, or a list with each one's own. `on_done`: called for each, in that order."""
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
        """Answers one conversation or several at a time."""
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
        """A vector for each input, text or token ids, in their order; `extras`: pooler, normalize, dimensions."""
        return self._ask(calls.embed(inputs, options, extras), timeout_s)

    def embed_stream(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None, **extras: Unpack[EmbedExtras]
    ) -> Iterator[tuple[int, list[float]]]:
        """Each input's vector as soon as it is computed, with the input's place."""
        yield from self._stream(calls.embed_stream(inputs, options, extras))

    def encode(
        self,
        inputs: Prompt | Sequence[Prompt],
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
        **extras: Unpack[EmbedExtras],
    ) -> list[list[list[float]]]:
        """All vectors of each input: with pooler all of its tokens, with step of those that are step_tag_id."""
        return self._ask(calls.encode(inputs, options, extras), timeout_s)

    def classify(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None, timeout_s: float | None = None
    ) -> list[Classification]:
        """The class of each input, text or token ids, in their order."""
        return self._ask(calls.classify(inputs, options), timeout_s)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
    ) -> list[float]:
        """How well each document answers the query, or its own of as many queries."""
        return self._ask(calls.score(queries, documents, options), timeout_s)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int = 0,
        options: RequestOptions | None = None,
        timeout_s: float | None = None,
    ) -> list[Ranked]:
        """Documents by how well they answer the query, the best first; `top_n`: only so many, 0: all."""
        return self._ask(calls.rerank(query, documents, top_n, options), timeout_s)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Iterator[Delta]:
        """The continuation as it comes."""
        yield from self._stream(calls.generation(prompt, params, options))

    def stream_chat(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **extras: Unpack[ChatExtras],
    ) -> Iterator[Delta]:
        """The answer as it comes."""
        yield from self._stream(calls.chat(messages, params, options, extras))

    def attach(self, request_id: str, offset: int = 0, *, tenant: str = "") -> Iterator[Delta]:
        """A stream that was begun with RequestOptions(resumable=True), at whichever frontend: what it has told from its
        message `offset` on, then what comes; Delta.offset counts. NotFound once its time is over."""
        yield from self._stream(calls.attach(request_id, offset, tenant))

    def cancel(self, request_id: str, *, tenant: str = "") -> None:
        """Ends such a stream."""
        self._ask(calls.cancel(request_id, tenant))

    def tokenize(self, text: str) -> list[int]:
        return self._ask(calls.tokenize(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._ask(calls.detokenize(token_ids))

    def models(self) -> list[pb.Model]:
        return self._ask(calls.models())

    def adapter_names(self) -> set[str]:
        """That requests may choose as their model."""
        return {model.name for model in self.models() if model.adapter_of}

    def status(self, timeout_s: float = 5.0) -> list[admin_pb2.ServiceStatus]:
        """Every service of the cluster."""
        with closing(self._admin()) as admin:
            return admin.status(timeout_s)

    def reset_prefix_cache(self, preempt_running: bool = False) -> int:
        """Forgets all cached prefixes; returns the number of blocks that held one."""
        with closing(self._admin()) as admin:
            return admin.reset_prefix_cache(preempt_running=preempt_running)

    def pause_generation(self, mode: str = "keep") -> int:
        """Stops all workers between two steps. Sequences that are there go on at resume_generation() with "keep", and
        end with "abort"; with "wait" they come to their ends first: Unavailable if that takes a scheduler more than a
        minute, which then goes on. New ones wait. Returns how many wait or, with "abort", have ended."""
        with closing(self._admin()) as admin:
            return admin.pause_generation(mode)

    def resume_generation(self) -> None:
        with closing(self._admin()) as admin:
            admin.resume_generation()

    def update_weights_from_disk(self, model_path: str, weight_version: str = "", mode: str = "wait") -> str:
        """Has every worker compute with the weights in that folder, which is in one of their weights_folders: absolute,
        or relative to one of these. With "wait" requests that are there come to their ends first, and new ones wait;
        with "keep" they go on with the new weights, with "abort" they end. Returns what answers call the weights
        (RequestOutput.weight_version). All workers or none: InvalidArgument with what does not fit."""
        with closing(self._admin()) as admin:
            return admin.update_weights(model_path, weight_version, mode)

    def update_weights_from_tensor(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: str = "", mode: str = "wait"
    ) -> str:
        """The same with a checkpoint's tensors, such as a trainer's state_dict().items(), which go to the workers as a
        stream."""
        with closing(self._admin()) as admin:
            return admin.stream_weights(named_tensors, weight_version, mode)

    def update_weights_from_ipc(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: str = "", mode: str = "wait"
    ) -> str:
        """The same for workers of this host and user, which read the tensors themselves: those on GPUs where they are
        (CUDA IPC), others in shared memory. They stay as they are until this returns."""
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
        """Has every rank of every worker join a process group of torch.distributed ("nccl" or "gloo") whose TCPStore
        listens there, from rank_offset on. Returns how many ranks of workers there are when all members are in it: the
        trainer, which is rank 0, joins meanwhile (WeightsUpdateGroup does all of it)."""
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
        """As update_weights_from_tensor() with tensors that the trainer broadcasts in that group, in this order, while
        this waits. Unavailable if they do not all come within timeout_s: the old weights stay, the group does not."""
        content = BroadcastContent(group_name=group_name, timeout_ms=round(timeout_s * 1000))
        with closing(self._admin()) as admin:
            heads = tensor_headers(names, dtypes, shapes)
            return admin.broadcast_weights(heads, content, weight_version, mode)

    def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> None:
        """Workers leave it."""
        with closing(self._admin()) as admin:
            admin.destroy_weights_update_group(group_name)

    def sleep(self, level: int = 1, mode: str = "keep") -> int:
        """Has all workers give the memory of their devices to others: the KV, and the weights, which move to host
        memory (level 1) or are lost and read again at wake_up() (level 2). Requests that are there wait ("keep"), end
        ("abort"), or come to their ends first ("wait"); new ones wait. Returns how many wait or have ended."""
        with closing(self._admin()) as admin:
            return admin.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> list[str]:
        """Takes it again: "weights", "kv_cache", or, if nothing is said, all. When nothing is asleep any more,
        generation goes on. Returns what still is. ResourceExhausted if others have the memory: to be asked again."""
        with closing(self._admin()) as admin:
            return admin.wake_up(tags or ())

    def is_sleeping(self) -> bool:
        return any(one.role == admin_pb2.ROLE_SCHEDULER and one.asleep for one in self.status())

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> int:
        """Has every worker load the adapter (LoRA) in that folder, which is one of theirs: absolute, or relative to
        their lora_folders. From then on `name` is a model. `replace`: puts it in the place of one of that name. Returns
        how many workers have it."""
        with closing(self._admin()) as admin:
            return admin.load_adapter(name, path, replace=replace)

    def unload_adapter(self, name: str) -> int:
        """`name` is no model any more. Returns how many sequences still go through it, to their ends."""
        with closing(self._admin()) as admin:
            return admin.unload_adapter(name)

    def adapters(self) -> list[admin_pb2.Adapter]:
        """Those that there are, with where they are in use."""
        with closing(self._admin()) as admin:
            return admin.adapters()

    def _admin(self) -> AdminClient:
        """Looked up for each call: a frontend that was started anew has another port and key."""
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

    def _stream(self, call: InferenceCall[T]) -> Iterator[T]:
        messages = call.on(self._inference)
        try:
            with translated_errors():
                yield from map(call.read, messages)
        finally:
            messages.cancel()  # leaving the loop early frees the blocks; a resumable stream goes on

    def _collected(
        self,
        asked: Sequence[InferenceCall[Message]],
        prompts: Sequence[object],
        timeout_s: float | None,
        on_done: OnDone,
    ) -> list[RequestOutput]:
        """Sends all calls at once; returns their results in order."""
        streams = [call.on(self._inference, timeout_s) for call in asked]
        found = []
        try:
            with translated_errors():
                for stream, prompt in zip(streams, prompts, strict=True):
                    found.append(collect(stream, prompt))
                    if on_done is not None:
                        on_done(found[-1])
        finally:
            for stream in streams:  # what is not read behind an error would be held for long
                stream.cancel()
        return found
