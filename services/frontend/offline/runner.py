"""Runner of batches: claims unowned ones, answers them line by line, and resumes interrupted ones."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from quire.services.frontend.access.access import Access
from quire.services.frontend.offline import line_validation
from quire.services.frontend.offline.batch import Batch
from quire.services.frontend.offline.batches import BatchStore
from quire.services.frontend.offline.files import FileStore
from quire.services.frontend.offline.internal_client import InternalClient, InternalReply
from quire.shared import batch_lines
from quire.shared.batch_lines import BatchLine
from quire.shared.errors import NotFound, PermissionDenied
from quire.shared.logs import logger
from quire.shared.metrics.batches import BatchMetrics
from quire.shared.process.supervision import Tasks

log = logger("batches")

POLL_S = 1.0
MAX_RUNNING_BATCHES = 8  # per frontend
CHUNK = 32  # lines read together
CHUNK_BYTES = 1 << 20
LONGEST_WAIT_S = 30.0
KINDS = ("output", "error")


@dataclass(frozen=True, slots=True)
class BatchDependencies:
    """Dependencies of running batches."""

    files: FileStore
    batches: BatchStore
    calls: InternalClient
    access: Access
    line_slots: asyncio.Semaphore  # limits the lines in progress of all batches of this frontend
    validation_slots: asyncio.Semaphore  # limits the validation processes
    metrics: BatchMetrics
    poll_s: float = POLL_S


class BatchRunner:
    """Loop that claims batches that no frontend runs."""

    def __init__(self, dependencies: BatchDependencies, is_leaving: Callable[[], bool]) -> None:
        self._dependencies = dependencies
        self._batches = dependencies.batches
        self._is_leaving = is_leaving
        self._wakeup = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}

    def notify(self) -> None:
        """Wakes the loop for a new batch."""
        self._wakeup.set()

    async def run(self) -> None:
        """Claims unfinished batches in intervals, or earlier after `notify`, until it is cancelled; it then cancels
        the running batches and waits for them."""
        tasks = Tasks()
        try:
            while True:
                self._running = {key: task for key, task in self._running.items() if not task.done()}
                for batch in await asyncio.to_thread(self._batches.unfinished):
                    if self._is_free(batch):
                        self._running[batch.id] = tasks.start(f"batch {batch.id}", self._claim(batch.id))
                self._wakeup.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._dependencies.poll_s):
                        await self._wakeup.wait()
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _is_free(self, batch: Batch) -> bool:
        """Returns whether this process may claim the batch now: it is unfinished and not running here, a slot is
        free, and the frontend does not drain."""
        busy = batch.id in self._running or len(self._running) >= MAX_RUNNING_BATCHES
        return not (busy or batch.has_ended or self._is_leaving())

    async def _claim(self, batch_id: str) -> None:
        """Runs a batch to its end if its lock is free; does nothing if another process holds the lock or the batch
        has ended."""
        lock = await asyncio.to_thread(self._batches.try_lock, batch_id)
        if lock is None:
            return
        with lock:
            batch = await asyncio.to_thread(self._batches.find, batch_id)
            if batch is not None and not batch.has_ended:
                await BatchRun(batch, self._dependencies).run()
                self.notify()


class BatchRun:
    """Run of one batch, from its current state to its end."""

    def __init__(self, batch: Batch, dependencies: BatchDependencies) -> None:
        self._batch = batch
        self._files, self._batches = dependencies.files, dependencies.batches
        self._calls, self._access = dependencies.calls, dependencies.access
        self._line_slots, self._validation_slots = dependencies.line_slots, dependencies.validation_slots
        self._metrics = dependencies.metrics
        self._writing = asyncio.Lock()
        self._poll_s = dependencies.poll_s
        self._saved_s = 0.0

    async def run(self) -> None:
        """Validates the batch unless that is done, answers the lines that have no answer yet, and stores the result
        files. An unreadable input file or an invalid line ends the batch as failed."""
        log.info("batch", id=self._batch.id, status=self._batch.status, endpoint=self._batch.endpoint)
        try:
            source = await asyncio.to_thread(self._files.path, self._batch.input_file_id, self._batch.tenant)
        except NotFound as error:
            await self._fail([{"code": "file_not_found", "message": error.message, "line": None, "param": None}])
            return
        if self._batch.status == "validating" and not await self._validate(source):
            return
        done = {kind: await asyncio.to_thread(self._batches.answered_lines, self._batch.id, kind) for kind in KINDS}
        await self._set_status("in_progress", completed=len(done["output"]), failed=len(done["error"]))
        ending = await self._answer_all(source, frozenset(done["output"] + done["error"]))
        await self._finish(ending)

    async def _validate(self, source: Path) -> bool:
        """Checks all lines in a child process, in one of the validation slots. Returns whether they are valid and
        sets the batch's total; otherwise the batch fails with the lines' errors."""
        async with self._validation_slots:
            total, errors = await _validate_lines(source, self._batch.endpoint)
        if not errors:
            self._batch = self._batch.with_status("in_progress", int(time.time()), total=total)
            return True
        await self._fail(errors)
        return False

    async def _answer_all(self, source: Path, done: frozenset[int]) -> str:
        """Answers the lines that are not in `done`, several at once, and returns the batch's final status:
        completed, or the reason why the rest stays unanswered, such as cancelled or expired."""
        ending = "completed"
        with source.open("rb") as file:
            portions = portions_of(batch_lines.numbered_lines(file))
            async with asyncio.TaskGroup() as group:
                while ending == "completed" and (chunk := await asyncio.to_thread(next, portions, None)):
                    for number, line in chunk:
                        if number in done:
                            continue
                        if (ending := await self._begin(number, line, group)) != "completed":
                            break
        return ending

    async def _begin(self, number: int, line: bytes, group: asyncio.TaskGroup) -> str:
        """Starts a line once a slot is free, unless the batch is to end by then; returns the batch's final status.

        The slot belongs to the task and is released also if the task is cancelled before its first step.
        """
        await self._line_slots.acquire()
        with ExitStack() as resources:
            resources.callback(self._line_slots.release)
            if (ending := await self._ending()) == "completed":
                task = group.create_task(self._answer(batch_lines.parse_line(number, line)))
                task_resources = resources.pop_all()
                task.add_done_callback(lambda _: task_resources.close())
        return ending

    async def _ending(self) -> str:
        """Returns cancelled or expired if the batch is to end early, otherwise completed."""
        if await asyncio.to_thread(self._batches.is_cancelled, self._batch.id):
            return "cancelled"
        return "expired" if time.time() > self._batch.expires_at else "completed"

    async def _answer(self, line: BatchLine) -> None:
        """Answers one line and appends it to the output file (status 2xx) or the error file. The batch's counts are
        updated, and saved once in an interval."""
        answer_id = f"batch_req_{self._batch.id.removeprefix('batch_')}_{line.number}"
        reply = await self._ask(line, answer_id)
        is_good = reply.status // 100 == 2
        written = batch_lines.output_line(answer_id, line.custom_id, reply.status, reply.request_id, reply.body)
        path = self._batches.answers_path(self._batch.id, "output" if is_good else "error")
        async with self._writing:
            await asyncio.to_thread(_append, path, written)
            self._metrics.requests["completed" if is_good else "failed"].inc()
            batch = self._batch
            self._batch = replace(batch, completed=batch.completed + is_good, failed=batch.failed + (not is_good))
            if time.monotonic() - self._saved_s > self._poll_s:
                self._saved_s = time.monotonic()
                await asyncio.to_thread(self._batches.save, self._batch)

    async def _ask(self, line: BatchLine, answer_id: str) -> InternalReply:
        """Sends the line's call, again and again while the server is overloaded or unavailable and the batch has not
        ended. A revoked key gives a reply with status 401."""
        while True:
            try:
                caller = self._access.find_caller(self._batch.key, self._batch.tenant)
            except PermissionDenied as error:  # checked for each line: a key may be revoked meanwhile
                return InternalReply(401, answer_id, 0, {"error": {"message": error.message}})
            reply = await self._calls.post(line.url, line.body, answer_id, caller, self._batch.tenant)
            if reply.status not in batch_lines.RETRYABLE_STATUSES or await self._ending() != "completed":
                return reply
            await asyncio.sleep(min(reply.retry_after_s, LONGEST_WAIT_S))

    async def _finish(self, ending: str) -> None:
        """Stores the answers as files and sets the final status.

        Answers exist under both names until the status is saved, so that none is lost if finishing has to be repeated.
        """
        await self._set_status("finalizing")
        stored = {kind: await asyncio.to_thread(self._keep, kind) for kind in KINDS}
        await self._set_status(ending, output_file_id=stored["output"], error_file_id=stored["error"])
        await asyncio.to_thread(self._batches.delete_answers, self._batch.id)

    def _keep(self, kind: str) -> str | None:
        """Stores the answers of one kind as a file of the tenant, through a hard link, and returns its id; None if
        there are none."""
        answers = self._batches.answers_path(self._batch.id, kind)
        if not answers.stat().st_size:
            return None
        link = self._files.temp_path()
        os.link(answers, link)
        return self._files.store(link, self._batch.tenant, f"{self._batch.id}_{kind}.jsonl", "batch_output").id

    async def _fail(self, errors: list[dict[str, object]]) -> None:
        await self._set_status("failed", errors=errors)

    async def _set_status(self, status: str, **changes: object) -> None:
        """Sets the status with its timestamp and further fields, and saves the batch; a final status is counted and
        logged."""
        self._batch = self._batch.with_status(status, int(time.time()), **changes)
        await asyncio.to_thread(self._batches.save, self._batch)
        if self._batch.has_ended:
            batch = self._batch
            self._metrics.ended[status].inc()
            log.info("batch", id=batch.id, status=status, completed=batch.completed, failed=batch.failed)


async def _validate_lines(source: Path, endpoint: str) -> tuple[int, list[dict[str, object]]]:
    """Checks the file in a child process, which is killed if this coroutine is cancelled. Returns the number of
    lines and their errors; a crash of the process gives 0 and one error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", line_validation.__name__, str(source), endpoint, stdin=DEVNULL, stdout=PIPE
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        error: dict[str, object] = {
            "code": "server_error",
            "message": "its lines could not be validated",
            "line": None,
            "param": None,
        }
        return 0, [error]
    result = json.loads(output)
    return result["total"], result["errors"]


def portions_of(
    lines: Iterator[tuple[int, bytes]], max_lines: int = CHUNK, max_bytes: int = CHUNK_BYTES
) -> Iterator[list[tuple[int, bytes]]]:
    """Yields portions with limits of lines and bytes; a single longer line is a portion too."""
    portion, num_bytes = list[tuple[int, bytes]](), 0
    for number, line in lines:
        if portion and (len(portion) == max_lines or num_bytes + len(line) > max_bytes):
            yield portion
            portion, num_bytes = [], 0
        portion.append((number, line))
        num_bytes += len(line)
    if portion:
        yield portion


def _append(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line)
