"""A worker loads the adapters that its scheduler orders during steps, and reports them when it attaches again."""

from __future__ import annotations

from pathlib import Path

from quire.services.worker.lora.peft import peft_folder
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.attach.test_service import PROMPT, Make, Start, finish, scheduler, start
from tests.services.worker.lora import peft_folders
from tests.services.worker.plans import New, PaperScheduler
from tests.services.worker.scripted_scheduler import ScriptedScheduler

__all__ = ["scheduler", "start"]


async def test_an_adapter_is_loaded_used_and_reported(
    start: Start, scheduler: ScriptedScheduler, checkpoint: Make, tmp_path: Path
) -> None:
    saved = peft_folders.save(checkpoint("llama"), tmp_path / "a", seed=1)
    digest = peft_folder.read("x", saved.folder).digest()
    worker = start(lora_folders=[str(tmp_path)], max_loras=3)
    session, hello = await scheduler.attached(epoch=1)
    assert (hello.lora.max_adapters, list(hello.lora.names)) == (3, [])
    await session.load_adapter(pb.LoadAdapter(order_id=1, name="x", path="nothing"))
    await session.load_adapter(pb.LoadAdapter(order_id=2, name="x", path="a"))
    refused, loaded = await session.adapter_loaded(), await session.adapter_loaded()
    assert (refused.order_id, refused.error.code) == (1, finish_pb2.ERROR_CODE_INVALID_ARGUMENT)
    assert (loaded.order_id, loaded.digest, loaded.HasField("error")) == (2, digest, False)
    paper = PaperScheduler(4, 128, epoch=1)
    await session.plan(paper.plan([New(0, PROMPT, adapter="x", adapter_digest=digest)], {0: 6}))
    assert not (await session.result()).failures
    session.close()
    again, hello = await scheduler.attached(epoch=2)
    assert (list(hello.lora.names), hello.lora.digests) == (["x"], digest)
    assert list(hello.lora.paths) == [str(saved.folder.resolve())]
    await again.unload_adapter(pb.UnloadAdapter(name="x", digest=digest))
    paper = PaperScheduler(4, 128, epoch=2)
    await again.plan(paper.plan([New(0, PROMPT, adapter="x", adapter_digest=digest)], {0: 6}))
    assert "does not exist on this worker" in (await again.result()).failures[0].error.message
    await finish(worker, again)


async def test_without_folders_none_is_loaded(start: Start, scheduler: ScriptedScheduler) -> None:
    worker = start()
    session, hello = await scheduler.attached(epoch=1)
    assert hello.lora.max_adapters == 0
    await session.load_adapter(pb.LoadAdapter(order_id=7, name="x", path="a"))
    refused = await session.adapter_loaded()
    assert (refused.order_id, refused.error.code) == (7, finish_pb2.ERROR_CODE_FAILED_PRECONDITION)
    assert "lora_folders" in refused.error.message
    await finish(worker, session)
