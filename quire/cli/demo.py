"""`quire demo`: starts a cluster, runs two chats, asks about a picture, prints the status, and shuts down."""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quire.cli.chat import answer
from quire.cli.status import table
from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from quire.flags.setting_flags import human_int
from quire.params import SamplingParams
from quire.shared.settings import SERVICES

if TYPE_CHECKING:
    from PIL import Image

QUESTIONS = ("Hello! Who are you?", "What is 23 + 45?")
ABOUT_PICTURE = "What is in the picture?"
SIDE = 96  # pixels of the picture
ROWS = 12  # in which the terminal shows it
PAPER, INK = (255, 255, 255), (255, 255, 0)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=human_int, default=1, help="worker processes")


def run(arguments: argparse.Namespace) -> int:
    """Starts a cluster with the bundled model, asks one question over gRPC and two over HTTP, the second about a
    picture, and prints the status table."""
    begin = time.monotonic()
    print("starting a frontend, a scheduler and a worker on the CPU, with the bundled model ...", flush=True)
    quiet = {service: {"log_level": "warning"} for service in SERVICES}
    options = ClusterOptions(workers=arguments.workers, http_port=0, grpc_port=0, settings=quiet)
    with Cluster(options) as cluster:
        print(f"ready after {time.monotonic() - begin:.1f} s: http={cluster.http_address} grpc={cluster.grpc_address}")
        with Client(cluster.grpc_address) as client:
            print(f"\ngRPC> {QUESTIONS[0]}")
            answer(client, [{"role": "user", "content": QUESTIONS[0]}], SamplingParams(temperature=0, max_tokens=64))
            print(f"\nOpenAI HTTP> {QUESTIONS[1]}")
            for text in stream_over_http(cluster.http_address, QUESTIONS[1]):
                print(text, end="", flush=True)
            picture = drawn_picture()
            print(f"\n\n{as_blocks(picture, coloured=sys.stdout.isatty())}")
            print(f"OpenAI HTTP> [picture] {ABOUT_PICTURE}")
            for text in stream_over_http(cluster.http_address, with_picture(picture, ABOUT_PICTURE)):
                print(text, end="", flush=True)
            print(f"\n\n{table(client.status())}\n\ndraining ...", flush=True)
    print(f"done after {time.monotonic() - begin:.1f} s")
    return 0


def drawn_picture() -> Image.Image:
    """Draws a circle."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (SIDE, SIDE), PAPER)
    ImageDraw.Draw(picture).ellipse((SIDE // 4, SIDE // 4, 3 * SIDE // 4, 3 * SIDE // 4), fill=INK)
    return picture


def as_blocks(picture: Image.Image, *, coloured: bool) -> str:
    """Returns the picture as lines of block characters, two for each of ROWS x ROWS points; the paper stays empty.
    `coloured`: with 24-bit colour codes of terminals."""
    small = picture.convert("RGB").resize((ROWS, ROWS))
    pixels = small.tobytes()
    points = [tuple(pixels[at : at + 3]) for at in range(0, len(pixels), 3)]
    blocks = [_block(point, coloured=coloured) for point in points]
    return "\n".join("".join(blocks[row * ROWS : (row + 1) * ROWS]).rstrip() for row in range(ROWS))


def _block(point: tuple[int, ...], *, coloured: bool) -> str:
    """Returns the two characters of a point."""
    if sum(PAPER) - sum(point) < sum(PAPER) // 8:
        return "  "
    red, green, blue = point
    return f"\x1b[38;2;{red};{green};{blue}m██\x1b[0m" if coloured else "██"


def with_picture(picture: Image.Image, question: str) -> list[dict[str, Any]]:
    """Returns the content of a message with a picture, as a data URL, in front of a question."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]


def stream_over_http(address: str, content: str | list[dict[str, Any]]) -> Iterator[str]:
    """Yields the answer's text as it arrives, from /v1/chat/completions with only the standard library."""
    body = {
        "model": "quire-tiny",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"].get("content") or ""
