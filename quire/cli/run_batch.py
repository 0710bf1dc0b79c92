"""`quire run-batch -i FILE -o FILE`: sends the requests in a file to a cluster, skipping those already answered."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO

from quire.cli.batch_calls import BatchCalls
from quire.flags.setting_flags import human_int
from quire.shared import batch_lines
from quire.shared.batch_lines import BatchLine
from quire.shared.errors import InvalidArgument

URL_VARIABLE = "QUIRE_URL"
DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "QUIRE_API_KEY"
PROGRESS_S = 0.5
MAX_REPORTED = 5  # invalid lines named in the error


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the input and output files, the server or model, and the limits."""
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests, one a line, in OpenAI's batch format"
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers; requests that it already has an answer to are not sent again",
    )
    parser.add_argument("--url", default="", metavar="URL", help=f"base URL of a frontend (or {URL_VARIABLE})")
    parser.add_argument(
        "--model",
        default="",
        metavar="MODEL",
        help="start a cluster with this model for the batch, and stop it afterwards",
    )
    parser.add_argument("--concurrency", type=human_int, default=64, metavar="N", help="requests in flight")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="time limit of one request")
    parser.add_argument("--retry-failed", action="store_true", help="send requests again that failed before")
    parser.add_argument("--quiet", action="store_true", help="print no progress")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if every line was answered, 1 if some failed: the output says which, and why."""
    source, target = Path(arguments.input_file), Path(arguments.output_file)
    lines = _read(source)
    done = _resume(target, again=arguments.retry_failed)
    todo = [line for line in lines if line.custom_id not in done]
    with _address(arguments) as url:
        progress = BatchProgress(len(lines), done, quiet=arguments.quiet)
        with (
            closing(BatchCalls(url, os.environ.get(KEY_VARIABLE, ""), arguments.timeout)) as calls,
            target.open("ab") as out,
            ThreadPoolExecutor(max(1, arguments.concurrency)) as pool,
        ):
            _answer_all(todo, calls, pool, out, progress)
    progress.end()
    return 1 if progress.counts["failed"] else 0


def _read(source: Path) -> list[BatchLine]:
    """Reads the requests. Raises InvalidArgument that names the first invalid lines."""
    try:
        with source.open("rb") as file:
            _, wrong = batch_lines.check_file(file, batch_lines.ENDPOINTS)
        if wrong:
            more = f"\nand {len(wrong) - MAX_REPORTED} more" if len(wrong) > MAX_REPORTED else ""
            raise InvalidArgument(f"{source}: " + "\n".join(one.message for one in wrong[:MAX_REPORTED]) + more)
        with source.open("rb") as file:
            return [batch_lines.parse_line(number, line) for number, line in batch_lines.numbered_lines(file)]
    except OSError as error:
        raise InvalidArgument(f"cannot read {source}: {error.strerror}", field="input_file") from None


def _resume(target: Path, *, again: bool) -> dict[str, str]:
    """Returns earlier outcomes by custom_id. Removes a torn last line and, with `again`, failed lines."""
    if not target.exists():
        return {}
    kept: dict[str, str] = {}
    end = 0
    with target.open("rb") as file:
        found = [*batch_lines.read_output(file)]
    for answer, end in found:  # noqa: B007 (the last one is wanted)
        kept[str(answer.get("custom_id"))] = "failed" if answer.get("error") else "completed"
    os.truncate(target, end)
    if again and "failed" in kept.values():
        kept = {custom_id: how for custom_id, how in kept.items() if how == "completed"}
        _drop_failed(target)
    return kept


def _drop_failed(target: Path) -> None:
    """Removes failed lines from the output file, atomically, so that they are asked again."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    with target.open("rb") as file, scratch.open("wb") as out:
        for line in file:
            if next(batch_lines.read_output([line]))[0].get("error") is None:
                out.write(line)
    os.replace(scratch, target)


@contextmanager
def _address(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields the URL of the HTTP API: the given one, or that of a cluster that runs `--model` meanwhile."""
    if not arguments.model:
        yield arguments.url or os.environ.get(URL_VARIABLE, "") or DEFAULT_URL
        return
    from quire.cluster import Cluster, ClusterOptions

    with Cluster(ClusterOptions(model=arguments.model, http_port=0, grpc_port=0), log=sys.stderr) as cluster:
        yield f"http://{cluster.http_address}"


def _answer_all(
    todo: list[BatchLine], calls: BatchCalls, pool: ThreadPoolExecutor, out: BinaryIO, progress: BatchProgress
) -> None:
    """Sends the requests; each answer is on disk before it is counted. Ctrl-C starts no further requests."""
    pending = [pool.submit(_answer, line, calls) for line in todo]
    try:
        for future in as_completed(pending):
            written, is_good = future.result()
            out.write(written)
            out.flush()
            progress.count("completed" if is_good else "failed")
    except BaseException:
        calls.stop()
        for future in pending:
            future.cancel()
        raise


def _answer(line: BatchLine, calls: BatchCalls) -> tuple[bytes, bool]:
    status, request_id, body = calls.post(line.url, line.body)
    answer_id = f"batch_req_{uuid.uuid4().hex}"
    return batch_lines.output_line(answer_id, line.custom_id, status, request_id, body), status // 100 == 2


class BatchProgress:
    """Progress on standard error: one line that is overwritten on a terminal, a single line at the end otherwise."""

    def __init__(
        self, total: int, before: dict[str, str], *, quiet: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._quiet = quiet
        self._clock = clock
        self._began_s = clock()
        self._told_s = 0.0
        self._num_before = len(before)
        self._lock = threading.Lock()
        self.counts = Counter(before.values())

    def count(self, how: str) -> None:
        """Counts an answer as `how`, from any thread, and prints the progress at most every PROGRESS_S on a
        terminal."""
        with self._lock:
            self.counts[how] += 1
            now = self._clock()
            if not self._quiet and sys.stderr.isatty() and now - self._told_s > PROGRESS_S:
                self._told_s = now
                print(f"\r{self.line()}", end="", file=sys.stderr, flush=True)

    def line(self) -> str:
        """Returns the progress as text; the rate leaves out lines that had been answered before."""
        num_done = self.counts.total()
        rate = (num_done - self._num_before) / max(1e-3, self._clock() - self._began_s)
        failed = f", {self.counts['failed']} failed" if self.counts["failed"] else ""
        before = f", {self._num_before} of them before" if self._num_before else ""
        return f"{num_done} of {self._total} answered{before}{failed}, {rate:.1f} a second"

    def end(self) -> None:
        if not self._quiet:
            start = "\r" if sys.stderr.isatty() else ""
            print(f"{start}{self.line()}", file=sys.stderr)
