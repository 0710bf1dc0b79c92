"""The keys of a frontend: who shows which, and what that allows."""

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
KV_PRIORITY_ORDER = ("low", "normal", "high")  # KV priorities
MISSING = "no API key: send `authorization: Bearer KEY` or `x-api-key: KEY`"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who has shown a key that is good."""

    key: ApiKey
    account: Account

    @property
    def tenant(self) -> str:
        return self.key.tenant

    def authorize(self, request: Request, model: str) -> Request:
        """The request as this caller's, whatever it says itself: its tenant, and prefixes that no other tenant's
        requests find, so that nobody learns from how long an answer takes what others have asked. Takes one request
        from the account. `model`: the first name of the one that it asks for. PermissionDenied, ResourceExhausted."""
        self._check_model(model)
        self._check_priorities(request)
        self.account.admit_request(self.key)
        salt = hashlib.sha256(f"{self.tenant}\0{request.cache_salt}".encode()).hexdigest()
        return replace(request, tenant=self.tenant, cache_salt=salt)

    def _check_model(self, model: str) -> None:
        if self.key.models and model not in self.key.models:
            raise PermissionDenied(f"model: the API key {self.key.name} is not for {model!r}", field="model")

    def _check_priorities(self, request: Request) -> None:
        most_urgent, highest = self.key.most_urgent_priority, self.key.highest_kv_priority
        if most_urgent is not None and request.priority < most_urgent:
            text = f"priority: the API key {self.key.name} may ask for {most_urgent} and more, not {request.priority}"
            raise PermissionDenied(text, field="priority")
        if request.kv_priority in KV_PRIORITY_ORDER and KV_PRIORITY_ORDER.index(
            request.kv_priority
        ) > KV_PRIORITY_ORDER.index(highest):
            text = f"kv_priority: the API key {self.key.name} may ask for {highest!r} at most"
            raise PermissionDenied(text, field="kv_priority")


class Access:
    """Without sources everybody may ask, and says itself for which tenant."""

    def __init__(self, sources: Iterable[KeySource], metrics: FrontendMetrics, clock: Callable[[], float]) -> None:
        self.sources = tuple(sources)
        self._metrics = metrics
        self._clock = clock
        self.accounts: dict[str, Account] = {}  # by the key's name: a new key of the same name goes on with it

    @property
    def allows_anonymous(self) -> bool:
        """There are no keys to show."""
        return not self.sources

    @property
    def has_several_tenants(self) -> bool:
        """Keys of more than one tenant are good."""
        tenants = (key.tenant for source in self.sources for key in source.keys().values())
        first = next(tenants, None)
        return any(tenant != first for tenant in tenants)

    def tenant_from_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The tenant of an HTTP call before it is let in; empty where its key is not good."""
        if self.allows_anonymous:
            return ""
        shown = _shown(*_key_headers(headers))
        key = self._find(digest(shown)) if shown else None
        return "" if key is None else key.tenant

    def tenant_from_metadata(self, metadata: dict[str, str | bytes]) -> str:
        """The same of a gRPC call."""
        return self.tenant_from_headers((name.encode(), _bytes(value)) for name, value in metadata.items())

    def find_caller(self, name: str, tenant: str) -> Caller | None:
        """Who goes on with a tenant's work that was begun with the key of that name, or with none if it is empty; None
        where there were no keys and are none. Raises PermissionDenied if that would not let in any more."""
        if not name and self.allows_anonymous:
            return None
        keys = (key for source in self.sources for key in source.keys().values())
        key = next((key for key in keys if key.name == name and key.tenant == tenant), None)
        if key is None:
            shown = f"the API key {name}" if name else "no API key"
            raise PermissionDenied(f"this was begun with {shown}, which is not good any more")
        return self._owner(key)

    def authenticate(self, authorization: bytes, api_key: bytes) -> Caller | None:
        """By the values of the two headers; None where there are no keys. Raises Unauthenticated."""
        if self.allows_anonymous:
            return None
        shown = _shown(authorization, api_key)
        if not shown:
            self._metrics.access_refusals["missing"].inc()
            raise Unauthenticated(MISSING)
        key = self._find(digest(shown))
        if key is None:
            self._metrics.access_refusals["unknown"].inc()
            raise Unauthenticated("this API key is not known here")
        return self._owner(key)

    def _owner(self, key: ApiKey) -> Caller:
        if key.name not in self.accounts:
            self.accounts[key.name] = Account(key, self._clock, time.time)
        return Caller(key, self.accounts[key.name])

    def caller_from_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller | None:
        """Of an HTTP call, names in lower case. Who sends one of them twice shows neither."""
        return self.authenticate(*_key_headers(headers))

    def caller_from_metadata(self, metadata: dict[str, str | bytes]) -> Caller | None:
        """Of a gRPC call, whose names come once (`metadata_of`)."""
        return self.authenticate(_bytes(metadata.get("authorization", b"")), _bytes(metadata.get("x-api-key", b"")))

    def check(self, metadata: dict[str, str | bytes]) -> QuireError | None:
        """Why a gRPC call may not pass."""
        try:
            self.caller_from_metadata(metadata)
        except Unauthenticated as error:
            return error
        return None

    def _find(self, hashed: bytes) -> ApiKey | None:
        """How long it takes depends on the hash alone, which tells nothing about keys that are near."""
        return next((key for source in self.sources if (key := source.keys().get(hashed))), None)


def _key_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in (AUTHORIZATION, API_KEY):
            found[name] = b"" if name in found else value
    return found.get(AUTHORIZATION, b""), found.get(API_KEY, b"")


def _shown(authorization: bytes, api_key: bytes) -> bytes:
    return api_key or bearer({"authorization": authorization})


def _bytes(value: str | bytes) -> bytes:
    return value.encode("latin-1", "replace") if isinstance(value, str) else value
