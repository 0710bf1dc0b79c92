"""Files of a checkpoint: which files of a folder hold its weights, and whether they can be read."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from quire.shared.errors import InvalidArgument

INDEX = "model.safetensors.index.json"
OLDER_INDEX = "pytorch_model.bin.index.json"
WHOLE = ("model.safetensors", "pytorch_model.bin")  # a model in one file; other files are ignored
SECOND_COPY = "consolidated"  # prefix of Mistral's own copy of the same weights
# Preferred formats first; the last is the file of Medusa heads.
FILES = ("*.safetensors", "pytorch_model*.bin", "*.gguf", "medusa_lm_head.pt")
LFS_POINTER = b"version https://git-lfs."
MOST_INDEX_BYTES = 64 << 20


def paths(folder: Path) -> list[Path]:
    """Returns the weight files of a folder, in order: those of its index, else a single-file model, else all of the
    preferred format. Raises InvalidArgument without any, and for an invalid index."""
    for index in (folder / INDEX, folder / OLDER_INDEX):
        if index.exists():
            return [folder / name for name in _names_in(index)]
    for pattern in FILES:
        paths = sorted(folder.glob(pattern))
        whole = [path for path in paths if path.name in WHOLE]
        parts = [path for path in paths if not path.name.startswith(SECOND_COPY)]
        if paths:
            return whole or parts or paths
    raise InvalidArgument(f"model: {folder} contains none of {', '.join(FILES)}", field="model")


def check(path: Path) -> None:
    """Raises InvalidArgument for files that cannot be opened, are not regular (pipes) or are pointers of Git LFS."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidArgument(f"model: {path} is not a regular file", field="model")
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError as error:
        raise InvalidArgument(f"model: cannot read {path}: {error.strerror}", field="model") from None
    if is_pointer:
        text = (
            f"model: cannot read {path}: it is a pointer of Git LFS, not a file of weights; run `git lfs pull` in "
            "its folder"
        )
        raise InvalidArgument(text, field="model")


def _names_in(index: Path) -> list[str]:
    """Returns the file names in an index, sorted. Raises InvalidArgument if it is invalid or names other folders."""
    try:
        if index.stat().st_size > MOST_INDEX_BYTES:
            raise InvalidArgument(f"model: {index} has more than {MOST_INDEX_BYTES} bytes", field="model")
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except OSError as error:
        raise InvalidArgument(f"model: cannot read {index}: {error.strerror}", field="model") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = repr(error)[:200]
        raise InvalidArgument(f"model: {index} is not an index with a weight_map: {reason}", field="model") from None
    wrong = next((name for name in names if not isinstance(name, str) or not _is_file_name(name)), None)
    if wrong is not None:
        text = f"{index} names {repr(wrong)[:80]}: only files of its own folder are read"
        raise InvalidArgument(f"model: {text}", field="model")
    return names


def _is_file_name(name: str) -> bool:
    return Path(name).name == name and name not in ("", "..")
