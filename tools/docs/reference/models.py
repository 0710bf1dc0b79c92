"""Reference page of the models with native implementations."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping

from quire.services.worker.models.registry import ARCHITECTURES, ENCODERS
from tools.docs.reference.markdown import cell, code, table

HEAD = """# Supported models

`quire up MODEL` takes a Hugging Face folder, a GGUF file, or the name `ORG/NAME` of a model on a hub. `quire doctor
MODEL` says whether a model can be served, and which shape of messages its chat template reads.

Decoders in this table run with Quire's own code. Every other decoder that the installed `transformers` knows runs with
its code and Quire's paged attention (`--model-impl transformers`). Models that take pictures,
video or sound are on [Pictures](../models/pictures.md) and [Sound](../models/audio.md); those of other families serve
their text part alone. The decoders of T5 and BART come with [their encoders](../models/encoder-decoder.md).
"""


def page() -> str:
    encoders = "Encoders give embeddings, classes and scores."
    return f"{HEAD}\n## Decoders\n\n{_table(ARCHITECTURES)}\n## Encoders\n\n{encoders}\n\n{_table(ENCODERS)}"


def _table(models: Mapping[str, str]) -> str:
    return table(("Name", "Family"), ((code(name), _family(path)) for name, path in sorted(models.items())))


def _family(path: str) -> str:
    """Returns the first sentence of the docstring of the module at `path`."""
    module = importlib.import_module(path.partition(":")[0])
    first = (inspect.getdoc(module) or "").split("\n\n")[0]
    return cell(first)
