"""Sources of API keys: one in the environment, a file that is reloaded when it changes, or Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import yaml

from quire.services.frontend.access.api_key import ApiKey, Digest, digest, parse_key
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger
from quire.shared.prefix_index import redis_error
from quire.shared.process.supervision import cancellable_sleep
from quire.shared.security.private_file import PrivateFile, UnusableFile

log = logger("access")

Keys = Mapping[Digest, ApiKey]

RELOAD_S = 2.0
MAX_FILE_BYTES = 8 * 2**20
DEFAULT_KEY_NAME = "default"  # the name of the key in the environment


class KeySource(Protocol):
    """Provides the API keys that are valid at present, by the SHA-256 of the key."""

    def keys(self) -> Keys: ...


class SingleKey:
    """Source of the one key from the settings, shared by all clients."""

    def __init__(self, secret: str) -> None:
        self._keys = {digest(secret.encode()): ApiKey.model_validate({"name": DEFAULT_KEY_NAME})}

    def keys(self) -> Keys:
        return self._keys


class KeyFile:
    """A YAML file with a list `keys:`; each entry has the fields of ApiKey and either `key` (the key itself) or
    `sha256` (its hash, 64 hexadecimal digits). While the file is unusable, the last valid keys stay."""

    def __init__(self, path: str, on_error: Callable[[], None]) -> None:
        """Loads the file. Raises InvalidArgument if it is unusable."""
        self._path = path
        self._file = PrivateFile(path, "api_keys", self._read, max_bytes=MAX_FILE_BYTES, on_error=on_error)

    def keys(self) -> Keys:
        return self._file.held

    def _read(self, content: bytes) -> Keys:
        """Returns the keys of the file's content by hash. Raises UnusableFile, without quoting the content, or
        InvalidArgument for a field of an entry."""
        try:
            document = yaml.safe_load(content.decode())
        except UnicodeDecodeError:
            raise UnusableFile("cannot read it as text") from None
        except yaml.YAMLError:  # its message would quote the file
            raise UnusableFile("it is not YAML") from None
        entries = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise UnusableFile("it must have a list `keys:`, which may be [] to reject every call")
        keys: dict[Digest, ApiKey] = {}
        for number, entry in enumerate(entries, 1):
            hashed, key = self._entry(entry, f"entry {number}")
            if hashed in keys:
                raise UnusableFile(f"entry {number} repeats the key of {keys[hashed].name}; remove one of them")
            keys[hashed] = key
        return keys

    def _entry(self, entry: Any, where: str) -> tuple[Digest, ApiKey]:
        """Returns the hash and the key of one entry. `where`: its place, for errors. Raises UnusableFile,
        InvalidArgument."""
        if not isinstance(entry, dict):
            raise UnusableFile(f"{where}: must be a mapping")
        values = dict(entry)
        secret, hashed = values.pop("key", None), values.pop("sha256", None)
        if (secret is None) == (hashed is None):
            raise UnusableFile(f"{where}: must have exactly one of `key` and `sha256`")
        key = parse_key(values, f"api_keys: {self._path!r}: {where}")
        return digest(str(secret).encode()) if hashed is None else self._hash(str(hashed), where), key

    def _hash(self, text: str, where: str) -> Digest:
        """Returns the SHA-256 that `text` holds in hexadecimal. `where`: entry of the file, for the error. Raises
        UnusableFile for anything but 64 hexadecimal digits."""
        try:
            found = bytes.fromhex(text)
        except ValueError:
            found = b""
        if len(found) != len(digest(b"")):
            raise UnusableFile(f"{where}: sha256 must be 64 hexadecimal digits")
        return found


class RedisKeys:
    """Keys in the Redis hash NAMESPACE:api_keys: SHA-256 in hexadecimal -> the fields of ApiKey as JSON. Malformed
    entries are skipped. While Redis is unavailable the last keys stay; before the first successful read no call is
    accepted."""

    def __init__(self, redis: Any, namespace: str, on_error: Callable[[], None], reload_s: float = RELOAD_S) -> None:
        self._redis = redis
        self._name = f"{namespace}:api_keys"
        self._on_error = on_error
        self._reload_s = reload_s
        self._keys: Keys = {}

    def keys(self) -> Keys:
        return self._keys

    async def run(self) -> None:
        """Reloads the keys in intervals until cancelled."""
        while True:
            await self.reload()
            await cancellable_sleep(self._reload_s)

    async def close(self) -> None:
        await self._redis.aclose()

    async def reload(self) -> None:
        """Replaces the keys by those in Redis. Keeps the present ones if Redis is unavailable, with a warning and a
        call of `on_error`."""
        try:
            found = await self._redis.hgetall(self._name)
        except (redis_error(), OSError) as error:
            log.warning("cannot reload API keys; keeping the present ones", reason=type(error).__name__)
            self._on_error()
            return
        self._keys = dict(self._readable(found))

    def _readable(self, found: Mapping[bytes, bytes]) -> Iterator[tuple[Digest, ApiKey]]:
        """Yields the valid entries. Malformed ones are skipped and logged: one bad entry must not keep revoked keys
        valid."""
        malformed = 0
        for hashed, value in found.items():
            try:
                yield bytes.fromhex(_text(hashed)), parse_key(json.loads(value), f"api_keys: {self._name}")
            except (ValueError, RecursionError, InvalidArgument):
                malformed += 1
        if malformed:
            log.warning("skipped malformed API key entries", count=malformed, hash=self._name)
            self._on_error()


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")
