"""From where a worker takes adapters while it runs: folders that its operator has named, and what lies in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from services.worker.lora import peft_folder
from services.worker.lora.peft_folder import PeftFolder
from shared.errors import InvalidArgument


class AdapterFolders:
    """Links are followed before it is decided where a path lies. Any thread may call."""

    def __init__(self, roots: Sequence[str], max_rank: int, most_bytes: int = peft_folder.MOST_BYTES) -> None:
        self._roots = [Path(os.path.realpath(root)) for root in roots]
        self._max_rank, self._most_bytes = max_rank, most_bytes

    def read(self, name: str, path: str) -> PeftFolder:
        """`path`: absolute, or relative to one of the folders. Raises InvalidArgument, with the same text whether
        something is there or not where the path leads out of them."""
        places = [Path(os.path.realpath(root / path)) for root in self._roots]  # the same for an absolute one
        inside = [place for place in places if self._has(place)]
        if not inside:
            text = f"lora_path: {path!r} is not in a folder that this worker takes adapters from (lora_folders)"
            raise InvalidArgument(text, field="lora_path")
        place = next((place for place in inside if place.is_dir()), inside[0])
        for file in (peft_folder.CONFIG, peft_folder.WEIGHTS):
            if not self._has(Path(os.path.realpath(place / file))):
                text = f"lora_path: {path!r} has a {file} that lies outside of lora_folders"
                raise InvalidArgument(text, field="lora_path")
        return peft_folder.read(name, place, self._max_rank, self._most_bytes)

    def _has(self, place: Path) -> bool:
        return any(place.is_relative_to(root) for root in self._roots)
