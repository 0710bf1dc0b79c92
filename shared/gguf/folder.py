"""Converts a GGUF file to a model folder: config, tokenizer and chat template as files, and links to the weights,
which stay in place."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument
from quire.shared.gguf import tokenizer
from quire.shared.gguf.config import config_of
from quire.shared.gguf.header import Header, read_header
from quire.shared.logs import logger

log = logger("gguf")

SUFFIX = ".gguf"
LAYOUT = 2  # version of the written files; part of the cache key
PARTS = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
MAX_PARTS = 512
SPLIT_COUNT = "split.count"


def is_file(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def as_folder(path: Path) -> Path:
    """Returns the model folder of a GGUF file, created once per path, size and modification time. Raises
    InvalidArgument for an unusable file."""
    status, path = path.stat(), path.resolve()
    key = f"{LAYOUT} {path} {status.st_size} {status.st_mtime_ns}"
    folder = _cache() / hashlib.sha256(key.encode()).hexdigest()[:32] / model_name(path)
    parts = all_parts(path)
    if not folder.is_dir():
        _write(folder, path, _files(parts))
    return folder


def model_name(path: Path) -> str:
    """Returns the file's name without suffix and part number."""
    parts = PARTS.fullmatch(path.stem)
    return parts[1] if parts else path.stem


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "quire" / "gguf"


def all_parts(path: Path) -> list[Path]:
    """Returns all part files of the model that `path` belongs to, in order; the path itself if its name is not that
    of a part. Raises InvalidArgument if some are missing or there are too many."""
    found = PARTS.fullmatch(path.stem)
    if not found:
        return [path]
    count = int(found[3])
    if not 1 <= count <= MAX_PARTS:
        raise InvalidArgument(f"model: {path}: it is one of {count} parts; at most {MAX_PARTS} are read", field="model")
    files = [path.with_name(f"{found[1]}-{number:05}-of-{found[3]}{SUFFIX}") for number in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InvalidArgument(f"model: {path}: the part {missing[0]} is missing from its folder", field="model")
    return files


def _files(parts: list[Path]) -> dict[str, Any]:
    """Returns the folder's files by name: a JSON object to write, or a path to link to."""
    first = read_header(parts[0])
    header = Header(first.path, first.metadata, _tensors(parts, first))
    config = config_of(header)
    words = tokenizer.vocabulary(header, config["vocab_size"])
    generation = tokenizer.generation_config(words)
    return {
        "config.json": config,
        "tokenizer.json": tokenizer.tokenizer_json(words),
        "tokenizer_config.json": tokenizer.tokenizer_config(words),
        **({"generation_config.json": generation} if generation else {}),
        **{part.name: part for part in parts},
    }


def _tensors(parts: list[Path], first: Header) -> Mapping[str, Any]:
    """Returns the tensors of all parts by name. Raises InvalidArgument if the first part's count differs from the
    number of files."""
    tensors = dict(first.tensors)
    count = first.metadata.get(SPLIT_COUNT, 1)
    if count not in (0, len(parts)):
        raise first.refusal(f"{SPLIT_COUNT} is {count}, by its name it is one of {len(parts)}")
    for part in parts[1:]:
        tensors |= read_header(part).tensors
    return tensors


def _write(folder: Path, path: Path, files: Mapping[str, Any]) -> None:
    """Creates the folder with `files` (JSON objects to write, paths to link to) atomically, also when other
    processes do the same. Raises InvalidArgument if it cannot be written."""
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent.parent))
        try:
            inner = scratch / folder.name
            inner.mkdir()
            for name, content in files.items():
                if isinstance(content, Path):
                    (inner / name).symlink_to(content)
                else:
                    (inner / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
            _place(scratch, folder.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        reason = (
            f"cannot write its config and tokenizer to {folder}: {error.strerror}; set XDG_CACHE_HOME to another folder"
        )
        raise InvalidArgument(f"model: {path}: {reason}", field="model") from None
    log.info("GGUF file opened", file=str(path), folder=str(folder), dtype=files["config.json"]["dtype"])


def _place(scratch: Path, wanted: Path) -> None:
    """Renames the folder `scratch` to `wanted`, unless another process has created that meanwhile; raises other
    OSErrors."""
    try:
        scratch.rename(wanted)
    except OSError:
        if not wanted.is_dir():  # otherwise another process has created the same folder
            raise
