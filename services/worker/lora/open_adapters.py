"""Opens a worker's adapters from its settings."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.kernels import Ops
from quire.services.worker.device.device import Device
from quire.services.worker.device.staging import staging_for
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.lora.adapters import AdapterManager
from quire.services.worker.lora.linear_adapters import AdapterCapacity
from quire.services.worker.lora.no_adapters import StepAdapters
from quire.services.worker.lora.peft import peft_folder
from quire.services.worker.lora.peft.folders import AdapterFolders
from quire.services.worker.lora.peft.peft_folder import DamagedAdapter, PeftFolder
from quire.services.worker.lora.peft.peft_scales import refusal
from quire.services.worker.lora.peft.reader import AdapterReader
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger
from quire.shared.models import model_identity
from quire.shared.settings import WorkerSettings

log = logger("worker.lora")


def open_adapters(
    settings: WorkerSettings, ops: Ops, dtype: torch.dtype, device: Device, wanted: WorkerLimits
) -> AdapterManager | None:
    """Reads the adapters of the settings before the model's layers are built; returns None if none are set and none can
    be loaded. Raises InvalidArgument for settings that exclude adapters, and for adapters that cannot be served; skips
    damaged files."""
    if not (settings.lora or settings.lora_folders or settings.lora_modules_to_save):
        return None
    served = model_identity.identity(Path(settings.model), settings.served_model_name).name
    reason = (
        f"{served!r} is the name of the model; choose another one"
        if served in settings.lora
        else f"lora_folders is not supported with tensor_parallel_size {settings.tensor_parallel_size}: adapters can "
        "only be loaded at start (lora)"
        if settings.tensor_parallel_size > 1 and settings.lora_folders
        else f"lora_folders is not supported with context_parallel_size {settings.context_parallel_size}: adapters can "
        "only be loaded at start (lora)"
        if settings.context_parallel_size > 1 and settings.lora_folders
        else f"adapters are not supported with pipeline_parallel_size {settings.pipeline_parallel_size}"
        if settings.pipeline_parallel_size > 1
        else "adapters are not supported with batch_invariant"
        if settings.batch_invariant
        else "lora_modules_to_save reserves memory for adapters of lora_folders, which is empty"
        if settings.lora_modules_to_save and not settings.lora_folders
        else ""
    )
    if reason:
        raise InvalidArgument(f"lora: {reason}", field="lora")
    most_bytes = peft_folder.max_weight_bytes(Path(settings.model))
    folders = _readable(settings, most_bytes)
    if not folders and not settings.lora_folders:
        return None
    for folder in folders if settings.tensor_parallel_size > 1 else ():
        if any(pair.magnitude is not None for pair in folder.modules.values()):
            text = f"use_dora is not supported with tensor_parallel_size {settings.tensor_parallel_size}"
            raise refusal(folder.name, text)
    capacity = AdapterCapacity(settings.max_loras if settings.lora_folders else 0, settings.max_lora_rank)
    whole = settings.lora_modules_to_save
    return AdapterManager(
        folders, ops, dtype, device.torch_device, wanted, staging=staging_for(device), capacity=capacity, whole=whole
    )


def _readable(settings: WorkerSettings, most_bytes: int) -> list[PeftFolder]:
    """Reads the adapters of `lora` by ascending names. Skips one whose file is damaged, so that the model and the other
    adapters can be served; any other fault is one of the settings and raises InvalidArgument."""
    folders = []
    for name, folder in sorted(settings.lora.items()):
        try:
            folders.append(peft_folder.read(name, Path(folder), settings.max_lora_rank, most_bytes))
        except DamagedAdapter as error:
            log.warning("skipped an adapter whose file is damaged", adapter=name, error=error.message)
    return folders


def damaged_adapter_names(settings: WorkerSettings, adapters: StepAdapters) -> list[str]:
    """Returns the names of `lora` that the worker does not serve because their files are damaged, ascending."""
    loaded = {adapter.id.name for adapter in adapters.loaded()}
    return sorted(settings.lora.keys() - loaded)


def adapter_reader(settings: WorkerSettings) -> AdapterReader:
    """Returns the reader of adapters that are loaded at run time, with its cache in host memory; without lora_folders
    it reads none."""
    most_bytes = peft_folder.max_weight_bytes(Path(settings.model)) if settings.lora_folders else 0
    folders = AdapterFolders(settings.lora_folders, settings.max_lora_rank, most_bytes)
    return AdapterReader(folders, settings.max_cpu_loras or settings.max_loras)
