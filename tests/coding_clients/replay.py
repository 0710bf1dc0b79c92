"""Replay of a conversation: each turn is sent as its client sends it, with the answers so far spliced in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.coding_clients import chat, messages, responses
from tests.coding_clients.events import Answered, events_of

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
CHANGING = "$CHANGING"  # in texts: replaced by a different word in each turn
Reader = Callable[[list[dict[str, Any]]], Answered]


@dataclass(frozen=True)
class Dialect:
    """Dialect of one API: field of the conversation, readers of streams and whole answers, and messages that clients
    send back."""

    conversation: str
    stream: Reader
    whole: Callable[[dict[str, Any]], Answered]
    results: Callable[[Answered, Iterator[Any]], list[dict[str, Any]]]


DIALECTS: Mapping[str, Dialect] = {
    "/v1/messages": Dialect("messages", messages.read_stream, messages.read_whole, messages.results),
    "/v1/responses": Dialect("input", responses.read_stream, responses.read_whole, responses.results),
    "/v1/chat/completions": Dialect("messages", chat.read_stream, chat.read_whole, chat.results),
}


@dataclass
class Replay:
    """Replay in progress, and the answers so far."""

    session: dict[str, Any]
    changes: Mapping[str, Any]  # to every body
    salt: str = ""  # of the words that change
    conversation: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answered] = field(default_factory=list)
    num_turns: int = 0

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.session["path"].partition("?")[0]]

    async def run(self, http: httpx.AsyncClient) -> list[Answered]:
        """Sends all turns; raises AssertionError for an answer that is not 200 or not well-formed."""
        results = self._results()
        for turn in self.session["turns"]:
            self.num_turns += 1
            if turn.get("beside"):
                await self._ask(http, turn, turn[self.dialect.conversation])
                continue
            self.conversation += turn.get("add", [])
            answered = await self._ask(http, turn, self.conversation)
            if answered is None:
                continue
            self.answers.append(answered)
            self.conversation += answered.spliced
            self.conversation += self.dialect.results(answered, results)
        return self.answers

    def _results(self) -> Iterator[Any]:
        """Yields the results of tools, repeatedly."""
        while True:
            yield from self.session["results"]

    async def _ask(
        self, http: httpx.AsyncClient, turn: Mapping[str, Any], conversation: list[dict[str, Any]]
    ) -> Answered | None:
        path = turn.get("path", self.session["path"])
        body = {**self.session["body"], **turn.get("set", {}), **self.changes}
        body = {name: value for name, value in body.items() if name not in turn.get("unset", ())}
        body[self.dialect.conversation] = conversation
        answer = await http.post(path, json=self._changed(body), headers=self.session["headers"])
        assert answer.status_code == 200, f"turn {self.num_turns}: {answer.text}"
        if "count_tokens" in path or "input_tokens" in path:
            assert answer.json()["input_tokens"] > 0
            return None
        if body.get("stream"):
            assert answer.headers["content-type"].startswith("text/event-stream")
            return self.dialect.stream(events_of(answer.text))
        return self.dialect.whole(answer.json())

    def _changed(self, body: dict[str, Any]) -> dict[str, Any]:
        word = hashlib.sha256(f"{self.salt}{self.num_turns}".encode()).hexdigest()[:5]
        changed: dict[str, Any] = json.loads(json.dumps(body).replace(CHANGING, word))
        return changed


def load(name: str) -> dict[str, Any]:
    session: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return session


async def replay(name: str, http: httpx.AsyncClient, *, salt: str = "", **changes: Any) -> list[Answered]:
    """Replays the conversation `name` and returns its answers.

    `changes`: fields of every body; `salt`: varies the words that differ in each turn.
    """
    return await Replay(load(name), changes, salt).run(http)
