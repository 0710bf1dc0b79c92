"""Registry of quantization methods by their name in config.json. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.quantization import awq, bitsandbytes, compressed_tensors, fp8, gptq
from quire.services.worker.layers.quantization.fields import SECTION, Fields
from quire.services.worker.layers.quantization.port import CheckpointQuantization

READERS: dict[str, Callable[[Fields], CheckpointQuantization]] = {
    awq.METHOD: awq.read,
    bitsandbytes.METHOD: bitsandbytes.read,
    compressed_tensors.METHOD: compressed_tensors.read,
    fp8.METHOD: fp8.read,
    gptq.METHOD: gptq.read,
}


def read_quantization(config: ConfigFile) -> CheckpointQuantization | None:
    """Reads `quantization_config` with the reader of its method; None if there is none.

    Raises InvalidArgument for unknown methods and unsupported values.
    """
    section = config.section(SECTION)
    if section is None or not section.values:
        return None
    fields = Fields(section.values)
    return READERS[fields.one_of("quant_method", tuple(READERS))](fields)
