"""Checks of settings that encoder-decoder models exclude."""

from __future__ import annotations

from quire.shared.errors import InvalidArgument
from quire.shared.settings import WorkerSettings


def check(settings: WorkerSettings) -> None:
    """Raises InvalidArgument, naming the first of them, for settings that are not supported for encoder-decoder
    models."""
    asked = {
        "speculative_config": bool(settings.speculative_config),
        "lora": bool(settings.lora),
        "lora_folders": bool(settings.lora_folders),
        "kv_offloading_size": settings.kv_offloading_size > 0,
        "pipeline_parallel_size": settings.pipeline_parallel_size > 1,
        "context_parallel_size": settings.context_parallel_size > 1,
        "language_model_only": settings.language_model_only,
        "role": settings.role == "encode",
    }
    for name, is_asked in asked.items():
        if is_asked:
            text = f"{name}: not supported for encoder-decoder models; leave it out"
            raise InvalidArgument(text, field=name)
