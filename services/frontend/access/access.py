"""Authenticates calls by API key and checks what the key permits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from quire.services.frontend.access.account import Account
from quire.services.frontend.access.api_key import ApiKey, digest
from quire.services.frontend.access.sources import KeySource
from quire.services.frontend.request.request import Request
from quire.shared.errors import PermissionDenied, QuireError, Unauthenticated
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.rpc.guard import bearer

AUTHORIZATION, API_KEY = b"authorization", b"x-api-key"
KV_PRIORITY_ORDER = ("low", "normal", "high")
MISSING = "no API key: send `authorization: Bearer KEY` or `x-api-key: KEY`"


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller: its API key and that key's account."""

    key: ApiKey
    account: Account

    @property
    def tenant(self) -> str:
        return self.key.tenant

    def authorize(self, request: Request, model: str) -> Request:
        """Checks the key's permissions, counts the request under its rate limits, and returns the request with the
        key's tenant and a tenant-specific cache salt, so that response times reveal nothing about other tenants'
        prompts. `model`: the served name of the requested model. Raises PermissionDenied, ResourceExhausted."""
        self._check_model(model)
        self._check_priorities(request)
        self.account.admit_request(self.key)
        salt = hashlib.sha256(f"{self.tenant}\0{request.cache_salt}".encode()).hexdigest()
        return replace(request, tenant=self.tenant, cache_salt=salt)

    def _check_model(self, model: str) -> None:
        """Raises PermissionDenied unless the key may request the model; a key without a list may request all."""
        if self.key.models and model not in self.key.models:
            raise PermissionDenied(f"model: the API key {self.key.name} does not permit {model!r}", field="model")

    def _check_priorities(self, request: Request) -> None:
        """Raises PermissionDenied if the request is more urgent, or keeps its KV blocks longer, than the key allows."""
        most_urgent, highest = self.key.most_urgent_priority, self.key.highest_kv_priority
        if most_urgent is not None and request.priority < most_urgent:
            text = (
                f"priority: the API key {self.key.name} permits priorities of at least {most_urgent}, got "
                f"{request.priority}"
            )
            raise PermissionDenied(text, field="priority")
        if request.kv_priority in KV_PRIORITY_ORDER and KV_PRIORITY_ORDER.index(
            request.kv_priority
        ) > KV_PRIORITY_ORDER.index(highest):
            text = f"kv_priority: the API key {self.key.name} permits at most {highest!r}"
            raise PermissionDenied(text, field="kv_priority")


class Access:
    """The API keys of all sources, and the account of each key. Without sources, every call is accepted and names its
    own tenant."""

    def __init__(self, sources: Iterable[KeySource], metrics: FrontendMetrics, clock: Callable[[], float]) -> None:
        self.sources = tuple(sources)
        self._metrics = metrics
        self._clock = clock
        self.accounts: dict[str, Account] = {}  # by key name, so that a replaced key keeps its account

    @property
    def allows_anonymous(self) -> bool:
        """Whether no key source is configured."""
        return not self.sources

    @property
    def has_several_tenants(self) -> bool:
        """Whether keys of more than one tenant exist; reads the keys anew at each call."""
        tenants = (key.tenant for source in self.sources for key in source.keys().values())
        first = next(tenants, None)
        return any(tenant != first for tenant in tenants)

    def tenant_from_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Returns the tenant of an HTTP call before it is admitted; empty if its key is unknown."""
        if self.allows_anonymous:
            return ""
        presented = _presented_key(*_key_headers(headers))
        key = self._find(digest(presented)) if presented else None
        return "" if key is None else key.tenant

    def tenant_from_metadata(self, metadata: dict[str, str | bytes]) -> str:
        """Returns the tenant of a gRPC call before it is admitted; empty if its key is unknown."""
        return self.tenant_from_headers((name.encode(), _bytes(value)) for name, value in metadata.items())

    def find_caller(self, name: str, tenant: str) -> Caller | None:
        """Returns the caller for work that was started earlier with the key called `name`, or without a key if empty;
        None if no keys are configured. Raises PermissionDenied if that key no longer exists."""
        if not name and self.allows_anonymous:
            return None
        keys = (key for source in self.sources for key in source.keys().values())
        key = next((key for key in keys if key.name == name and key.tenant == tenant), None)
        if key is None:
            used = f"the API key {name}" if name else "no API key"
            raise PermissionDenied(
                f"the batch or stream was started with {used}, which is no longer valid; start it again with a valid "
                "key"
            )
        return self._owner(key)

    def authenticate(self, authorization: bytes, api_key: bytes) -> Caller | None:
        """Returns the caller for the values of the two headers; None if no keys are configured. Raises Unauthenticated
        for a missing or unknown key, and counts it."""
        if self.allows_anonymous:
            return None
        presented = _presented_key(authorization, api_key)
        if not presented:
            self._metrics.access_refusals["missing"].inc()
            raise Unauthenticated(MISSING)
        key = self._find(digest(presented))
        if key is None:
            self._metrics.access_refusals["unknown"].inc()
            raise Unauthenticated("unknown API key; send one of the configured keys")
        return self._owner(key)

    def _owner(self, key: ApiKey) -> Caller:
        """Returns the caller for a key. Its account is created at first use and kept by name, so that a replaced key
        keeps its usage."""
        if key.name not in self.accounts:
            self.accounts[key.name] = Account(key, self._clock, time.time)
        return Caller(key, self.accounts[key.name])

    def caller_from_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller | None:
        """Returns the caller of an HTTP call; header names are lower-case. A header that occurs twice is ignored."""
        return self.authenticate(*_key_headers(headers))

    def caller_from_metadata(self, metadata: dict[str, str | bytes]) -> Caller | None:
        """Returns the caller of a gRPC call, from metadata with unique names (`metadata_of`)."""
        return self.authenticate(_bytes(metadata.get("authorization", b"")), _bytes(metadata.get("x-api-key", b"")))

    def rejection(self, metadata: dict[str, str | bytes]) -> QuireError | None:
        """Returns the Unauthenticated error that rejects a gRPC call with this metadata, or None; never raises it."""
        try:
            self.caller_from_metadata(metadata)
        except Unauthenticated as error:
            return error
        return None

    def _find(self, hashed: bytes) -> ApiKey | None:
        """Returns the key with this hash. The duration depends on the hash alone and reveals nothing about similar
        keys."""
        return next((key for source in self.sources if (key := source.keys().get(hashed))), None)


def _key_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Returns the values of the `authorization` and the API-key header; empty for one that is missing or occurs
    twice."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in (AUTHORIZATION, API_KEY):
            found[name] = b"" if name in found else value
    return found.get(AUTHORIZATION, b""), found.get(API_KEY, b"")


def _presented_key(authorization: bytes, api_key: bytes) -> bytes:
    return api_key or bearer({"authorization": authorization})


def _bytes(value: str | bytes) -> bytes:
    return value.encode("latin-1", "replace") if isinstance(value, str) else value
