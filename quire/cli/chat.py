"""`quire chat [TEXT]`: a single question, or a conversation until Ctrl-D."""

from __future__ import annotations

import argparse

from quire.cli.connection import add_address, client_of
from quire.cli.sampling import add_sampling, params_of
from quire.client import Client
from quire.params import SamplingParams


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the question, the system message, and the flags of address and sampling."""
    parser.add_argument("text", nargs="?", default="", metavar="TEXT", help="one question; left out: a conversation")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    add_address(parser)
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answers one question, or reads questions until end of file; the conversation is sent whole with each question.
    Returns the exit status 0."""
    turns = [{"role": "system", "content": arguments.system}] if arguments.system else []
    params = params_of(arguments)
    with client_of(arguments) as client:
        if arguments.text:
            turns.append({"role": "user", "content": arguments.text})
            answer(client, turns, params)
            return 0
        while (text := _read()) is not None:
            if not text.strip():
                continue
            turns.append({"role": "user", "content": text})
            turns.append({"role": "assistant", "content": answer(client, turns, params)})
    return 0


def answer(client: Client, turns: list[dict[str, str]], params: SamplingParams) -> str:
    """Prints the answer as it arrives; returns it."""
    parts = []
    for delta in client.stream_chat(turns, params):
        print(delta.text, end="", flush=True)
        parts.append(delta.text)
    print()
    return "".join(parts)


def _read() -> str | None:
    """Reads a line from the terminal; None at the end of input."""
    try:
        return input("> ")
    except EOFError:
        return None
