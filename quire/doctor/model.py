"""Checks the model: complete folder, supported architecture, enough memory."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from quire import bundled
from quire.doctor.finding import Finding, error, ok, run_check, warning
from quire.doctor.machine import GIB, available_memory
from quire.shared.models import model_hub, model_identity

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")


def check(model: str, revision: str, device: str) -> Iterator[Finding]:
    """Checks the model: a folder, a GGUF file or ORG/NAME; empty: the bundled one."""
    folder = model_hub.cached_folder(model, revision) if model else bundled.FOLDER
    if folder is None:
        advice = "`quire up` downloads it from HF_ENDPOINT to HF_HOME, which needs free space"
        yield warning("model", f"{model} is not on this machine yet", advice)
        return
    advice = "choose a supported architecture (docs: Supported models)"
    if not folder.exists():
        advice = "name a folder, a GGUF file, or ORG/NAME of a hub; without MODEL the bundled model is checked"
    yield from run_check("model", lambda: _architecture(folder), advice)
    if folder.is_dir():
        yield _tokenizer(folder)
        advice = "correct the template, or name another one with --chat-template"
        yield from run_check("chat template", lambda: _chat_template(folder), advice)
        yield _weights(folder, device)


def _architecture(folder: Path) -> Iterator[Finding]:
    config = model_identity.read_config(folder)
    importlib.import_module("quire.services.worker.models.registry").check_config(config)
    yield ok("model", f"{folder}: {', '.join(config.get('architectures', ['?']))}")


def _tokenizer(folder: Path) -> Finding:
    """Returns an error without tokenizer.json, and a warning without chat template."""
    if not (folder / "tokenizer.json").is_file():
        return error(
            "tokenizer",
            f"{folder} has no tokenizer.json",
            "write it with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers",
        )
    if (folder / "chat_template.jinja").is_file() or _names_template(folder / "tokenizer_config.json"):
        return ok("tokenizer", "tokenizer.json and a chat template")
    advice = "completions work; for chats give a template with --chat-template"
    return warning("tokenizer", "tokenizer.json, but no chat template", advice)


def _chat_template(folder: Path) -> Iterator[Finding]:
    """Reports, for each template, how messages are rendered differently from transformers."""
    try:
        shapes = importlib.import_module("quire.services.frontend.tokenizer.template_shapes")
    except ModuleNotFoundError:  # an image for workers only
        return
    found = shapes.shapes_of_folder(folder)
    for name, shape in found.items():
        yield ok("chat template", f"{name}: messages {shape.describe()}")


def _names_template(path: Path) -> bool:
    return path.is_file() and '"chat_template"' in path.read_text()


def _weights(folder: Path, device: str) -> Finding:
    """Returns an error for missing weight files, and a warning if they exceed the available memory on the CPU."""
    files = [file for pattern in WEIGHTS for file in folder.glob(pattern)]
    if not model_hub.is_complete(folder, weights=True):
        found = f"{len(files)} file{'s' * (len(files) != 1)} in {folder}, some files are missing"
        return error("weights", found, "download the missing ones, or measure with random weights: --load-format dummy")
    size = sum(file.stat().st_size for file in files)
    found = f"{size / GIB:.2f} GiB in {len(files)} file{'s' * (len(files) != 1)}"
    if device == "cpu" and size > available_memory():
        return warning(
            "weights", found, "the weights exceed the available memory: use a smaller model or a larger machine"
        )
    return ok("weights", found)
