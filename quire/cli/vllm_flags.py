"""Flags that vLLM's users type and that `quire up` does not have: each says what to do instead."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

# Flag -> what to do instead; "" where nothing has to be done.
INSTEAD = {
    "--allowed-origins": "--cors-origins",
    "--decode-context-parallel-size": "every rank has all KV (--context-parallel-size)",
    "--disable-log-requests": "",
    "--download-dir": "set HF_HOME",
    "--enable-chunked-prefill": "",
    "--enable-expert-parallel": "--expert-parallel",
    "--enable-lora": "",
    "--enable-log-requests": "",
    "--enable-request-id-headers": "",
    "--enforce-eager": "--no-cuda-graphs",
    "--guided-decoding-backend": "--structured-output-backend",
    "--hf-token": "set HF_TOKEN",
    "--kv-transfer-config": "there are no KV connectors",
    "--lora-modules": "--lora NAME=FOLDER,NAME=FOLDER",
    "--max-seq-len-to-capture": "",
    "--middleware": "the HTTP server takes no code of others; put a proxy in front",
    "--no-enable-log-requests": "",
    "--prefill-context-parallel-size": "--context-parallel-size",
    "--ssl-ca-certs": "--client-tls cert=FILE,key=FILE,ca=FILE,clients=require",
    "--ssl-certfile": "--client-tls cert=FILE,key=FILE",
    "--ssl-keyfile": "--client-tls cert=FILE,key=FILE",
    "--structured-outputs-config": "--structured-output-backend",
    "--swap-space": "--kv-offloading-size GIB",
    "--task": "",
    "--tokenizer": "the model's folder has its tokenizer",
    "--tokenizer-mode": "",
    "--trust-remote-code": "code of a checkpoint is never run",
    "--uvicorn-log-level": "--log-level",
}
SWITCHES = frozenset({  # that take no value
    "--disable-log-requests",
    "--enable-chunked-prefill",
    "--enable-expert-parallel",
    "--enable-log-requests",
    "--enable-lora",
    "--enable-request-id-headers",
    "--enforce-eager",
    "--no-enable-log-requests",
    "--trust-remote-code",
})  # fmt: skip


def add(parser: argparse.ArgumentParser) -> None:
    """Out of the help, which lists what there is."""
    taken = {flag for action in parser._actions for flag in action.option_strings}
    for flag in INSTEAD.keys() - taken:
        values = 0 if flag in SWITCHES else None  # "?" would take the model's name for a switch's value
        parser.add_argument(flag, nargs=values, action=_Elsewhere, help=argparse.SUPPRESS, default=argparse.SUPPRESS)


class _Elsewhere(argparse.Action):
    """Refuses by name, unless nothing has to be done."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or ""
        instead = INSTEAD[flag]
        if instead:
            parser.error(f"{flag} is vLLM's; here: {instead}")
