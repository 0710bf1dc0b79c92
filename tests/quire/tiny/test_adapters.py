"""The shipped adapters: small, and readable as the worker reads them."""

from __future__ import annotations

import pytest

from quire.bundled import ADAPTERS
from services.worker.lora import peft_folder


@pytest.mark.parametrize("name", ["json", "pirate"])
def test_an_adapter_is_small_and_of_all_of_attention(name: str) -> None:
    folder = ADAPTERS / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000
    modules = peft_folder.read(name, folder).modules
    assert {module.rpartition(".")[2] for module in modules} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(modules) == 8 * 4
