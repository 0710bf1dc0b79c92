"""Reads sentence-transformers folders: modules.json and its companions, which define how a model's vectors are
computed.

Frontends read the prompts that precede texts, workers the modules after the transformer. A folder without
modules.json is a plain transformers folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument
from quire.shared.models import late_interaction, page_retrieval
from quire.shared.models.late_interaction import LateInteraction

# pooling_mode_... of Pooling -> name used here
MODES = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean_tokens": "weighted",
    "lasttoken": "last",
}
NAMED_MODES = {"cls": "cls", "mean": "mean", "max": "max", "mean_sqrt_len_tokens": "mean_sqrt"} | {
    "weightedmean": "weighted",
    "lasttoken": "last",
}
ACTIVATIONS = {"Tanh": "tanh", "Identity": "none", "ReLU": "relu", "GELU": "gelu"}
FOLDER_NAMES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A projection after pooling."""

    folder: str  # relative to the model's folder
    in_features: int
    out_features: int
    bias: bool
    activation: str  # one of ACTIVATIONS' values
    tensors: str = "linear"  # name of weight and bias; another one is that of tensors among the model's own


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """Settings of a sentence-transformers model."""

    modes: tuple[str, ...]  # pooling modes, whose vectors are concatenated
    denses: tuple[DenseModule, ...] = ()
    normalizes: bool = False
    max_seq_length: int = 0  # tokens; 0: the model's own
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)  # name -> prefix of texts
    default_prompt: str = ""  # name of the default prompt; empty: none
    late: LateInteraction | None = None  # set if texts are compared token by token


def has_identity_score_activation(config: dict[str, Any]) -> bool:
    """Whether a cross-encoder's config.json selects no activation for its scores; otherwise a sigmoid is applied."""
    section = config.get("sentence_transformers")
    newer = section.get("activation_fn") if isinstance(section, dict) else None
    named = newer or config.get("sbert_ce_default_activation_function") or ""
    return str(named).rpartition(".")[2] == "Identity"


def read_sentence_model(folder: Path) -> SentenceModel | None:
    """Returns the settings in a sentence-transformers or ColBERT folder; None for any other folder. Raises
    InvalidArgument for unsupported modules."""
    listed = _read(folder / "modules.json")
    if listed is None:
        return _colbert(folder) or _pages(folder)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise _refusal("modules.json", "a list of modules is needed")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in listed]
    paths = [str(module.get("path", "")) for module in listed]
    is_late = kinds[:2] == ["Transformer", "Dense"]
    if not (is_late or kinds[:2] == ["Transformer", "Pooling"]) or {*kinds[2:]} - {"Dense", "Normalize"}:
        text = f"its modules are {', '.join(kinds)}; supported: Transformer, Pooling or Dense, then Dense and Normalize"
        raise _refusal("modules.json", text)
    if "Dense" in kinds[2:] and "Normalize" in kinds[2:-1]:
        raise _refusal("modules.json", "a module after Normalize is not supported")
    if paths[0]:
        raise _refusal("modules.json", f"its transformer must be in the folder itself, not in {paths[0]!r}")
    text_form = next((found for name in FOLDER_NAMES if (found := _object(folder / name))), {})
    named = _object(folder / "config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (named.get("prompts") or {}).items()}
    denses = tuple(_dense(folder, path) for kind, path in zip(kinds, paths, strict=True) if kind == "Dense")
    return SentenceModel(
        ("all",) if is_late else _modes(_object(folder / paths[1] / "config.json")),
        denses,
        is_late or "Normalize" in kinds,
        int(text_form.get("max_seq_length") or 0),
        bool(text_form.get("do_lower_case")),
        prompts,
        str(named.get("default_prompt_name") or ""),
        late_interaction.from_pylate_config(named) if is_late else None,
    )


def _colbert(folder: Path) -> SentenceModel | None:
    """Reads a ColBERT folder, whose projection is among the model's own tensors; None if the folder has no
    artifact.metadata. Raises InvalidArgument for malformed values."""
    found = _read(folder / "artifact.metadata")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise _refusal("artifact.metadata", "an object is needed")
    size = _object(folder / "config.json").get("hidden_size")
    if not isinstance(size, int) or not isinstance(found.get("dim"), int):
        raise _refusal("artifact.metadata", f"dim is {found.get('dim')!r}, hidden_size {size!r}; integers are needed")
    dense = DenseModule("", size, found["dim"], False, "none")
    return SentenceModel(("all",), (dense,), normalizes=True, late=late_interaction.from_colbert_metadata(found))


def _pages(folder: Path) -> SentenceModel | None:
    """Reads a folder of a retrieval model of pages, whose projection is among the model's own tensors; None for another
    model."""
    config = _object(folder / "config.json")
    family = page_retrieval.page_model(config)
    if family is None:
        return None
    name, hidden_size, size = page_retrieval.projection(config)
    dense = DenseModule("", hidden_size, size, True, "none", name)
    texts = page_retrieval.page_texts(folder, family)
    return SentenceModel(("all",), (dense,), normalizes=True, late=late_interaction.of_pages(texts))


def _modes(config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the pooling modes in the order in which sentence-transformers concatenates their vectors."""
    if config.get("include_prompt") is False:
        raise _refusal("Pooling", "include_prompt is false, but prompts are always pooled with their texts")
    named = config.get("pooling_mode")
    if named is not None:
        if named not in NAMED_MODES:
            raise _refusal("Pooling", f"pooling_mode is {named!r}; supported: {', '.join(NAMED_MODES)}")
        return (NAMED_MODES[named],)
    modes = tuple(mode for name, mode in MODES.items() if config.get(f"pooling_mode_{name}"))
    if not modes:
        raise _refusal("Pooling", "no pooling_mode_... is true")
    return modes


def _dense(folder: Path, path: str) -> DenseModule:
    """Reads a Dense module's config.json. Raises InvalidArgument for an unsupported activation."""
    config = _object(folder / path / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise _refusal("Dense", f"activation_function is {activation!r}; supported: {', '.join(ACTIVATIONS)}")
    return DenseModule(
        path,
        int(config["in_features"]),
        int(config["out_features"]),
        bool(config.get("bias", True)),
        ACTIVATIONS[activation],
    )


def _object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file does not exist."""
    found = _read(path)
    if found is not None and not isinstance(found, dict):
        raise _refusal(path.name, "an object is needed")
    return found or {}


def _read(path: Path) -> Any:
    """Returns the parsed JSON file; None if it does not exist. Raises InvalidArgument for malformed JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidArgument(f"model: {path} is not JSON: {error}", field="model") from None


def _refusal(where: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"model: {where} (sentence-transformers): {reason}", field="model")
