"""Public Python API of Quire: `from quire import LLM, AsyncLLM, Client, SamplingParams`."""

from __future__ import annotations

from quire import interrupts  # noqa: F401  # first: until then Ctrl-C prints what is being imported

# isort: split
import importlib
from typing import TYPE_CHECKING, Any

from quire.shared.version import VERSION as __version__

if TYPE_CHECKING:
    from quire.async_client import AsyncClient
    from quire.async_llm import AsyncLLM
    from quire.client import Client
    from quire.engine import LLMEngine
    from quire.llm import LLM
    from quire.offline.lora import LoRARequest
    from quire.outputs import CompletionOutput, Delta, RequestOutput, ToolCall
    from quire.params import BeamSearch, RepetitionDetection, SamplingParams, StructuredOutput
    from quire.shared.security.tls_files import Tls
    from quire.shared.transcription.transcript import Transcript
    from quire.weights_group import WeightsUpdateGroup

_HOMES = {
    "LLM": "quire.llm",
    "AsyncLLM": "quire.async_llm",
    "LLMEngine": "quire.engine",
    "LoRARequest": "quire.offline.lora",
    "Client": "quire.client",
    "AsyncClient": "quire.async_client",
    "BeamSearch": "quire.params",
    "RepetitionDetection": "quire.params",
    "SamplingParams": "quire.params",
    "StructuredOutput": "quire.params",
    "Tls": "quire.shared.security.tls_files",
    "RequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "Delta": "quire.outputs",
    "ToolCall": "quire.outputs",
    "Transcript": "quire.shared.transcription.transcript",
    "WeightsUpdateGroup": "quire.weights_group",
}

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLM",
    "BeamSearch",
    "Client",
    "CompletionOutput",
    "Delta",
    "LLMEngine",
    "LoRARequest",
    "RepetitionDetection",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "Tls",
    "ToolCall",
    "Transcript",
    "WeightsUpdateGroup",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Imports names on first use, so that `import quire` is cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
