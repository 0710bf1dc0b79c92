"""What makes two services serve the same model: its name, its config.json, its vocabulary."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shared.errors import InvalidArgument
from shared.models.text_part import text_part
from shared.pb.common.v1 import model_pb2 as pb


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; of a model that also sees or hears, its text part's."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise InvalidArgument(
            f"model {str(folder)!r} is not a Hugging Face folder: no config.json", field="model"
        ) from None
    except OSError as error:
        raise InvalidArgument(f"model: cannot read {path}: {error.strerror}", field="model") from None
    except ValueError as error:  # nor text, perhaps
        raise InvalidArgument(f"model: {path} is not JSON: {error}", field="model") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"model: {path} holds no JSON object", field="model")
    return text_part(config)


def class_names(config: dict[str, Any]) -> tuple[str, ...]:
    """Of a model that classifies whole sequences; transformers leaves them out where there are two without names."""
    if not any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        return ()
    named = config.get("id2label")
    if named is None:
        return tuple(f"LABEL_{number}" for number in range(config.get("num_labels") or 2))
    if not isinstance(named, dict) or sorted(named) != sorted(map(str, range(len(named)))) or not named:
        raise InvalidArgument(f"config.json: id2label is {named!r}: names by number are needed", field="model")
    return tuple(str(named[str(number)]) for number in range(len(named)))


def fingerprint(config: dict[str, Any]) -> str:
    """SHA-256 of the configuration with sorted keys and no white space."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def identity(folder: Path, served_name: str = "") -> pb.ModelIdentity:
    config = read_config(folder)
    name = served_name or folder.resolve().name
    return pb.ModelIdentity(name=name, fingerprint=fingerprint(config), vocab_size=config["vocab_size"])


def mismatch(ours: pb.ModelIdentity, theirs: pb.ModelIdentity, us: str, them: str) -> str:
    """What differs, naming both sides; empty if nothing does."""
    rows = [(f, getattr(ours, f), getattr(theirs, f)) for f in ("name", "vocab_size", "fingerprint")]
    return "; ".join(f"model.{f}: {us} has {a!r}, {them} has {b!r}" for f, a, b in rows if a != b)
