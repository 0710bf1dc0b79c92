"""Page of the models that have code of their own."""

from __future__ import annotations

import importlib
import inspect

from quire.services.worker.models.registry import ARCHITECTURES, ENCODERS
from tools.docs.reference.markdown import cell, code, table

HEAD = """# Supported models

`quire up MODEL` takes a Hugging Face folder, a GGUF file, or the name `ORG/NAME` of a model on a hub. `quire doctor MODEL`
says whether a model can be served, and what its chat template, tool parser and reasoning parser are.

Decoders in this table run with Quire's own code. Every other decoder that the installed `transformers` knows runs with its
code and Quire's paged attention (`--model-impl transformers`). Models that take pictures, video or sound serve their text
part alone.
"""


def page() -> str:
    decoders = table(("Architecture", "Family"), ((code(name), _family(path)) for name, path in sorted(ARCHITECTURES.items())))
    encoders = table(("Encoder", "Family"), ((code(name), _family(path)) for name, path in sorted(ENCODERS.items())))
    return f"{HEAD}\n## Decoders\n\n{decoders}\n## Encoders\n\nEncoders give embeddings, classes and scores.\n\n{encoders}"


def _family(path: str) -> str:
    """Returns the first sentence of the docstring of the module at `path`."""
    module = importlib.import_module(path.partition(":")[0])
    first = (inspect.getdoc(module) or "").split("\n\n")[0]
    return cell(first)
