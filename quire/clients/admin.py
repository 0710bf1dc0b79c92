"""Client for a cluster's admin service, which is found automatically on the frontend's machine."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.rpc_errors import translated_errors
from quire.shared.errors import InvalidArgument, Unavailable
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.admin.v1 import admin_pb2_grpc
from quire.shared.pb.common.v1.weights_stream_pb2 import BroadcastContent, TensorHead
from quire.shared.rpc import admin_credentials
from quire.shared.rpc.admin_credentials import AdminCredentials
from quire.shared.rpc.channel import connect_blocking
from quire.shared.security.tls_files import NO_TLS, Tls
from quire.shared.settings.base import LOOPBACK
from quire.weights import memory as weights_memory
from quire.weights import stream as weights_stream

RESET_TIMEOUT_S = 60.0
PAUSE_TIMEOUT_S = 65.0  # a frontend waits a minute for its schedulers
UPDATE_TIMEOUT_S = 3600.0  # requests may finish first, and workers read the weights
LOAD_TIMEOUT_S = 70.0  # the same, and the frontend must list the adapter
PAUSE_MODES = {"keep": pb.PAUSE_MODE_KEEP, "abort": pb.PAUSE_MODE_ABORT, "wait": pb.PAUSE_MODE_WAIT}
ANSWER_TIMEOUT_S = 2.0


class AdminClient:
    """Blocking admin calls; close it."""

    def __init__(self, found: AdminCredentials, tls: Tls) -> None:
        """Opens a channel to the admin service; `tls` is only used for other machines, since the admin port of this
        one is on loopback without TLS."""
        is_here = found.address.rpartition(":")[0] in LOOPBACK
        self._channel = connect_blocking(found.address, NO_TLS if is_here else tls)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {found.key}"),)

    def status(self, timeout_s: float) -> list[pb.ServiceStatus]:
        with translated_errors():
            answer = self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s, metadata=self._metadata)
            return list(answer.services)

    def reset_prefix_cache(self, *, preempt_running: bool) -> int:
        """Empties the prefix caches and returns the number of blocks whose contents were discarded.
        `preempt_running` preempts running sequences, so that the reset cannot fail."""
        request = pb.ResetPrefixCacheRequest(preempt_running=preempt_running)
        with translated_errors():
            answer = self._stub.ResetPrefixCache(request, timeout=RESET_TIMEOUT_S, metadata=self._metadata)
            return int(answer.num_blocks)

    def pause_generation(self, mode: str) -> int:
        """Pauses generation; returns the number of aborted sequences for mode abort, otherwise of those that are
        kept."""
        request = pb.PauseGenerationRequest(mode=_mode(mode))
        with translated_errors():
            answer = self._stub.PauseGeneration(request, timeout=PAUSE_TIMEOUT_S, metadata=self._metadata)
            return int(answer.num_aborted if request.mode == pb.PAUSE_MODE_ABORT else answer.num_kept)

    def resume_generation(self) -> None:
        request = pb.ResumeGenerationRequest()
        with translated_errors():
            self._stub.ResumeGeneration(request, timeout=RESET_TIMEOUT_S, metadata=self._metadata)

    def update_weights(self, path: str, weight_version: str, mode: str) -> str:
        """Loads a checkpoint from a folder of the workers and returns the version that answers report."""
        request = pb.UpdateWeightsRequest(path=path, weight_version=weight_version, mode=_mode(mode))
        with translated_errors():
            answer = self._stub.UpdateWeights(request, timeout=UPDATE_TIMEOUT_S, metadata=self._metadata)
            return str(answer.weight_version)

    def stream_weights(self, named_tensors: Iterable[tuple[str, Any]], weight_version: str, mode: str) -> str:
        begin = pb.UpdateWeightsRequest(weight_version=weight_version, mode=_mode(mode))
        return self._send_weights(weights_stream.messages(begin, named_tensors))

    def share_weights(self, named_tensors: Iterable[tuple[str, Any]], weight_version: str, mode: str) -> str:
        begin = pb.UpdateWeightsRequest(weight_version=weight_version, mode=_mode(mode))
        with weights_memory.messages(begin, named_tensors) as messages:
            return self._send_weights(messages)

    def _send_weights(self, messages: Iterator[pb.StreamWeightsRequest]) -> str:
        with translated_errors():
            answer = self._stub.StreamWeights(messages, timeout=UPDATE_TIMEOUT_S, metadata=self._metadata)
            return str(answer.updated.weight_version)

    def init_weights_update_group(self, request: pb.InitWeightsUpdateGroupRequest) -> int:
        with translated_errors():
            answer = self._stub.InitWeightsUpdateGroup(request, timeout=UPDATE_TIMEOUT_S, metadata=self._metadata)
            return int(answer.num_ranks)

    def broadcast_weights(
        self, heads: list[TensorHead], content: BroadcastContent, weight_version: str, mode: str
    ) -> str:
        """Announces tensors that a process group broadcasts; returns the new version after all workers have received
        them."""
        begin = pb.UpdateWeightsRequest(weight_version=weight_version, mode=_mode(mode))
        return self._send_weights(weights_stream.broadcast_messages(begin, heads, content))

    def destroy_weights_update_group(self, group_name: str) -> None:
        request = pb.DestroyWeightsUpdateGroupRequest(group_name=group_name)
        with translated_errors():
            self._stub.DestroyWeightsUpdateGroup(request, timeout=UPDATE_TIMEOUT_S, metadata=self._metadata)

    def sleep(self, level: int, mode: str) -> int:
        """Puts all workers to sleep; returns the number of aborted sequences for mode abort, otherwise of those that
        are kept."""
        request = pb.SleepRequest(level=level, mode=_mode(mode))
        with translated_errors():
            answer = self._stub.Sleep(request, timeout=UPDATE_TIMEOUT_S, metadata=self._metadata)
            return int(answer.num_aborted if request.mode == pb.PAUSE_MODE_ABORT else answer.num_kept)

    def wake_up(self, tags: Sequence[str]) -> list[str]:
        request = pb.WakeUpRequest(tags=tags)
        with translated_errors():
            return list(self._stub.WakeUp(request, timeout=UPDATE_TIMEOUT_S, metadata=self._metadata).asleep)

    def load_adapter(self, name: str, path: str, *, replace: bool) -> int:
        """Loads an adapter from a folder of the workers, replacing one of that name if `replace`; returns the number
        of workers."""
        request = pb.LoadAdapterRequest(name=name, path=path, replace=replace)
        with translated_errors():
            answer = self._stub.LoadAdapter(request, timeout=LOAD_TIMEOUT_S, metadata=self._metadata)
            return int(answer.num_workers)

    def unload_adapter(self, name: str) -> int:
        """Unloads an adapter and returns the number of sequences that still use it."""
        request = pb.UnloadAdapterRequest(name=name)
        with translated_errors():
            answer = self._stub.UnloadAdapter(request, timeout=RESET_TIMEOUT_S, metadata=self._metadata)
            return int(answer.num_sequences)

    def adapters(self) -> list[pb.Adapter]:
        with translated_errors():
            request = pb.ListAdaptersRequest()
            return list(self._stub.ListAdapters(request, timeout=RESET_TIMEOUT_S, metadata=self._metadata).adapters)

    def close(self) -> None:
        self._channel.close()


def _mode(mode: str) -> pb.PauseMode:
    if mode not in PAUSE_MODES:
        raise InvalidArgument(f"mode: must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", field="mode")
    return PAUSE_MODES[mode]


def admin_of(grpc_address: str, admin_address: str, admin_key_file: str) -> AdminCredentials:
    """Returns the given credentials, or those that the frontend at `grpc_address` has published for this user's
    commands. Raises InvalidArgument if only one of address and key is given, Unavailable if there are none."""
    if admin_address or admin_key_file:
        if not (admin_address and admin_key_file):
            raise InvalidArgument(
                "admin_address and admin_key_file must be given together, or neither", field="admin_address"
            )
        return AdminCredentials(admin_address, _key(admin_key_file))
    found = admin_credentials.find(grpc_address)
    if found is None:
        _check_answers(grpc_address)
        raise Unavailable(
            f"the frontend at {grpc_address} was not started by this user on this machine: name its admin service "
            "(--admin-address) and a file with its key (--admin-key-file)"
        )
    return found


def _check_answers(address: str) -> None:
    """Raises Unavailable with a remedy if no TCP connection to the address succeeds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"no cluster answers at {address} ({reason}); `quire up` starts one, --address names another"
        raise Unavailable(message) from None


def _key(path: str) -> str:
    """Reads the admin key, the file's first word; raises InvalidArgument if the file cannot be read or is empty."""
    try:
        lines = Path(path).read_text().split()
    except OSError as error:
        raise InvalidArgument(
            f"admin_key_file: cannot read {path!r}: {error.strerror}", field="admin_key_file"
        ) from None
    if not lines:
        raise InvalidArgument(f"admin_key_file: {path!r} is empty", field="admin_key_file")
    return lines[0]
