"""Finds models by their name on a hub (ORG/NAME): in the local cache, otherwise by download.

Uses huggingface_hub and its environment variables: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument, QuireError, Unavailable
from quire.shared.gguf import folder as gguf
from quire.shared.logs import logger

log = logger("model_hub")

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TEXTS = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # configuration and tokenizer
WEIGHTS, OLDER_WEIGHTS = ".safetensors", ".bin"
SECOND_COPIES = ("consolidated",)  # second copy of all weights
INDEX, OLDER_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
PART = re.compile(r"-\d+-of-\d+\.")


def find(model: str, revision: str = "", *, weights: bool) -> Path:
    """Returns the folder of a model given as a folder, a GGUF file or a name on a hub; with or without `weights`.
    Raises QuireError if there is none."""
    folder = Path(model).expanduser()
    if gguf.is_file(folder):
        return gguf.as_folder(folder)
    if folder.exists() or NAME.fullmatch(model) is None:
        return folder
    return _snapshot(model, revision, weights)


def cached_folder(model: str, revision: str = "") -> Path | None:
    """Returns the folder of `model` as far as it is on this machine, complete or not; downloads nothing."""
    folder = Path(model).expanduser()
    if gguf.is_file(folder):
        return gguf.as_folder(folder)
    if folder.exists() or NAME.fullmatch(model) is None:
        return folder
    try:
        import huggingface_hub as hub
    except ImportError:
        return None
    known = hub.try_to_load_from_cache(model, "config.json", revision=revision or None)
    return Path(known).parent if isinstance(known, str) else None


def served_name(model: str, folder: Path) -> str:
    """Returns the default name of a model that was found in `folder`; empty: the folder's name."""
    given = Path(model).expanduser()
    return "" if given == folder or gguf.is_file(given) else model


def _snapshot(name: str, revision: str, weights: bool) -> Path:
    """Returns the folder of a hub model: the cached one if it is complete, else after a download. Raises
    InvalidArgument if there is no such model or no huggingface_hub, Unavailable if the download fails."""
    try:
        import huggingface_hub as hub
    except ImportError:
        raise InvalidArgument(
            f"model: {name!r} is not a folder, and huggingface_hub is not installed to download it", field="model"
        ) from None
    at = revision or None
    known = cached_folder(name, revision)
    if known is not None and is_complete(known, weights=weights):
        return known
    files = _attempt(name, lambda: hub.HfApi().list_repo_files(name, revision=at))
    wanted = [*_wanted(files, weights)]
    log.info("downloading", model=name, files=len(wanted))
    return Path(_attempt(name, lambda: hub.snapshot_download(name, revision=at, allow_patterns=wanted)))


def _wanted(files: Iterable[str], weights: bool) -> Iterable[str]:
    """Yields the files to download: texts and configuration, and with `weights` the safetensors, or PyTorch's files
    if there are none; subfolders and second copies are left out."""
    top = [file for file in files if "/" not in file and not file.startswith(SECOND_COPIES)]
    yield from (file for file in top if file.endswith(TEXTS))
    if weights:
        newer = [file for file in top if file.endswith(WEIGHTS)]
        yield from newer or (file for file in top if _is_older_weights(file))


def is_complete(folder: Path, *, weights: bool) -> bool:
    """Returns whether the folder has all files that its own index names; without `weights`, whether it has a
    tokenizer.json."""
    if not weights:
        return (folder / "tokenizer.json").exists()
    for index in (folder / INDEX, folder / OLDER_INDEX):
        if index.exists():
            return all((folder / name).exists() for name in set(json.loads(index.read_text())["weight_map"].values()))
    weight_files = [file.name for file in folder.iterdir() if file.suffix == WEIGHTS or _is_older_weights(file.name)]
    if not weight_files:
        return any(file.suffix == gguf.SUFFIX for file in folder.iterdir())
    return not any(PART.search(name) for name in weight_files)  # parts without an index are incomplete


def _is_older_weights(file: str) -> bool:
    """Whether a file holds weights in PyTorch's older format, rather than training state."""
    return file.startswith("pytorch_model") and file.endswith(OLDER_WEIGHTS)


def _attempt(name: str, work: Callable[[], Any]) -> Any:
    """Runs `work` and converts huggingface_hub's errors to one line that names the model."""
    from huggingface_hub import errors

    try:
        return work()
    except errors.GatedRepoError:
        text = f"model: {name} is gated: accept its terms on the hub and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        raise InvalidArgument(f"revision: {name} has no such branch, tag or commit", field="revision") from None
    except errors.RepositoryNotFoundError:
        text = f"model: there is neither a folder nor, for this HF_TOKEN, a model on the hub called {name!r}"
    except errors.OfflineModeIsEnabled:
        text = f"model: {name} has not been downloaded yet, and HF_HUB_OFFLINE is set"
    except (OSError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        raise Unavailable(f"model: {name} cannot be downloaded: {_first_line(error)}") from None
    except Exception as error:
        if isinstance(error, QuireError):
            raise
        raise Unavailable(f"model: {name} cannot be downloaded: {_first_line(error)}") from None
    raise InvalidArgument(text, field="model")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
