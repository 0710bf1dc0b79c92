"""Measures the tokens per second of one frontend process, and the cost of a token.

python -m tests.services.frontend.load.throughput [--streams 64] [--tokens 2000] [--step-ms 1]

Three processes: a scripted scheduler that gives every stream a token per step, the frontend, and a client that reads
all streams over gRPC and then over server-sent events. CPU is that of the frontend process, so that the figure holds on
a busy machine; tokens/s is limited by the slowest process, and by the step time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from quire.services.frontend.tokenizer.encoder import INLINE_CHARACTERS
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.test_process import START
from tests.services.frontend.tiny_folder import CORPUS, write_folder


def play_scheduler(pipe: Connection, step_s: float) -> None:
    async def play() -> None:
        words = list(range(300, 360))
        script = ScriptedScheduler(
            lambda sequence: words[len(sequence.tokens) % 60], step_s=step_s, max_model_len=100_000
        )
        async with scheduler(script):
            pipe.send(script.address)
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

    uvloop.run(play())


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100  # utime + stime in ticks of 10 ms


async def over_grpc(address: str, streams: int, tokens: int, *, final_only: bool = False) -> int:
    """Reads all streams and returns the number of messages."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def one() -> int:
            request = pb.GenerateRequest(text="hello")
            request.sampling.max_tokens = tokens
            request.sampling.ignore_eos = True
            request.options.final_only = final_only
            got = [len(m.token_ids) async for m in stub.Generate(request)]
            assert sum(got) == tokens
            return len(got)

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


async def over_sse(address: str, streams: int, tokens: int) -> int:
    """Reads all streams and returns the number of events.

    It counts bytes on a plain socket: an HTTP library would be the bottleneck.
    """
    host, _, port = address.rpartition(":")
    body = json.dumps({"prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"

    async def one() -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        count = 0
        while chunk := await reader.read(1 << 16):
            count += chunk.count(b"data: ")
        writer.close()
        return count - 1  # [DONE]

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


async def measure(name: str, run: Callable[[], Awaitable[int]], pid: int, total: int) -> None:
    cpu, start = cpu_s(pid), time.perf_counter()
    messages = await run()
    wall, cpu = time.perf_counter() - start, cpu_s(pid) - cpu
    print(
        f"{name}: {total / wall:,.0f} tokens/s, {messages / wall:,.0f} messages/s; frontend CPU {cpu / wall:.0%}, "
        f"{cpu / total * 1e6:.1f} µs a token, {cpu / messages * 1e6:.1f} µs a message",
        flush=True,
    )


def print_tokenizer_speed(folder: Path) -> None:
    tokenizer = Tokenizer(folder, threads=1)
    text = (" ".join(CORPUS) * 10)[:INLINE_CHARACTERS]
    start = time.perf_counter()
    for _ in range(50):
        tokenizer.encode_inline(text, add_special_tokens=True)
    print(f"tokenizing {INLINE_CHARACTERS} characters: {(time.perf_counter() - start) / 50 * 1e6:.0f} µs")


def run_clients(settings: dict[str, Any], streams: int, tokens: int) -> None:
    command = [sys.executable, "-c", START, json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as frontend:
        assert frontend.stdout is not None
        where = dict(part.split("=") for part in frontend.stdout.readline().split()[2:])
        total = streams * tokens

        async def both() -> None:
            await over_grpc(where["grpc"], streams, 50)
            await measure("gRPC", lambda: over_grpc(where["grpc"], streams, tokens), frontend.pid, total)
            whole = partial(over_grpc, where["grpc"], streams, tokens, final_only=True)
            await measure("gRPC, final_only", whole, frontend.pid, total)
            await measure("SSE", lambda: over_sse(where["http"], streams, tokens), frontend.pid, total)

        uvloop.run(both())
        frontend.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, default=1.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_folder(Path(scratch) / "tiny")
        print_tokenizer_speed(folder)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        script = multiprocessing.get_context("spawn").Process(target=play_scheduler, args=(theirs, asked.step_ms / 1e3))
        script.start()
        settings = {"model": str(folder), "schedulers": [ours.recv()], "grpc_port": 0, "http_port": 0}
        try:
            run_clients(settings, asked.streams, asked.tokens)
        finally:
            ours.send(None)
            script.join()


if __name__ == "__main__":
    main()
