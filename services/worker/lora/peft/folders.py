"""Folders that a worker may load adapters from at run time, as its operator has configured."""

from __future__ import annotations

from collections.abc import Sequence

from quire.services.worker.host.allowed_folders import AllowedFolders
from quire.services.worker.lora.peft import peft_folder
from quire.services.worker.lora.peft.peft_folder import PeftFolder
from quire.shared.errors import InvalidArgument


class AdapterFolders:
    """Folders that adapters may be read from at run time. Thread-safe."""

    def __init__(self, roots: Sequence[str], max_rank: int, most_bytes: int = peft_folder.MAX_WEIGHT_BYTES) -> None:
        self._allowed = AllowedFolders(roots)
        self._max_rank, self._most_bytes = max_rank, most_bytes

    def read(self, name: str, path: str) -> PeftFolder:
        """Reads the adapter at `path`, absolute or relative to one of the folders.

        Raises InvalidArgument, for a path outside of the folders with the same text whether it exists or not.
        """
        place = self._allowed.find(path)
        if place is None:
            text = f"lora_path: {path!r} is not in a folder of lora_folders"
            raise InvalidArgument(text, field="lora_path")
        for file in (peft_folder.CONFIG, peft_folder.WEIGHTS):
            if not self._allowed.has(place / file):
                text = f"lora_path: {path!r} has a {file} that links to a place outside of lora_folders"
                raise InvalidArgument(text, field="lora_path")
        return peft_folder.read(name, place, self._max_rank, self._most_bytes)
