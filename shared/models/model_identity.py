"""Model identity: services serve the same model if name, config.json and vocabulary are equal."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument
from quire.shared.models.text_part import text_part
from quire.shared.pb.common.v1 import model_pb2 as pb

MAX_CONFIG_BYTES = 16 << 20  # the largest published ones, with class names, have some hundred thousand
MISSING = (
    "does not exist; give the path of a folder in Hugging Face's format or of a .gguf file, or leave it out for the "
    "bundled model"
)
MOST_VOCABULARY = 1 << 24


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json; for a multimodal model its text part. Raises InvalidArgument that names the file."""
    path = folder / "config.json"
    try:
        config = json.loads(_text(path))
    except FileNotFoundError:
        reason = "is not a Hugging Face folder: no config.json" if folder.exists() else MISSING
        raise InvalidArgument(f"model {str(folder)!r} {reason}", field="model") from None
    except OSError as error:
        raise InvalidArgument(f"model: cannot read {path}: {error.strerror}", field="model") from None
    except RecursionError:
        raise InvalidArgument(f"model: {path} is nested too deeply", field="model") from None
    except ValueError as error:  # malformed JSON, or not UTF-8
        raise InvalidArgument(f"model: {path} is not JSON: {error}", field="model") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"model: {path} is not a JSON object", field="model")
    return text_part(config)


def _text(path: Path) -> str:
    """Reads a file. Raises InvalidArgument for a large file, and for one that is not regular, whose reading could
    block."""
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise InvalidArgument(f"model: {path} is not a regular file", field="model")
    if found.st_size > MAX_CONFIG_BYTES:
        text = f"model: {path} has {found.st_size} bytes; at most {MAX_CONFIG_BYTES} are read"
        raise InvalidArgument(text, field="model")
    return path.read_text()


def class_names(config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the class names of a sequence classifier, by number, LABEL_0 and so on if they are unnamed; empty for
    other models. Raises InvalidArgument for malformed names."""
    if not any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        return ()
    named = config.get("id2label")
    if named is None:
        return tuple(f"LABEL_{number}" for number in range(config.get("num_labels") or 2))
    if not isinstance(named, dict) or sorted(named) != sorted(map(str, range(len(named)))) or not named:
        raise InvalidArgument(f"config.json: id2label is {named!r}: names by number are needed", field="model")
    return tuple(str(named[str(number)]) for number in range(len(named)))


def fingerprint(config: dict[str, Any]) -> str:
    """Returns the SHA-256 of the configuration with sorted keys and without whitespace."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def identity(folder: Path, served_name: str = "") -> pb.ModelIdentity:
    """Returns the identity of the model in a folder; its name is that of the folder by default. Raises
    InvalidArgument for an unreadable config.json or an invalid vocab_size."""
    config = read_config(folder)
    name = served_name or folder.resolve().name
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or not 1 <= vocab_size <= MOST_VOCABULARY:
        text = (
            f"config.json: vocab_size is {str(vocab_size)[:80]}: a whole number from 1 to {MOST_VOCABULARY} is needed"
        )
        raise InvalidArgument(text, field="model")
    return pb.ModelIdentity(name=name, fingerprint=fingerprint(config), vocab_size=vocab_size)


def mismatch(ours: pb.ModelIdentity, theirs: pb.ModelIdentity, us: str, them: str) -> str:
    """Returns the differences, naming both sides; empty if there are none."""
    rows = [(f, getattr(ours, f), getattr(theirs, f)) for f in ("name", "vocab_size", "fingerprint")]
    return "; ".join(f"model.{f}: {us} has {a!r}, {them} has {b!r}" for f, a, b in rows if a != b)
