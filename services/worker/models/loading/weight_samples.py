"""Which weights a model's folder holds, told from samples of its files: milliseconds for some gigabytes, where reading
all of them takes as long as loading does.

Of every file its size, its beginning and pieces at equal distances; of every tensor two pieces more where the file says
where it lies, or its checksum where there is one. So a checkpoint that was trained on, quantized, converted or edited
is another one; a few numbers in the middle of a large tensor may change unseen. What files are called does not count,
but how the tensors are shared out among them does.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from quire.services.worker.models.loading.loader import FILES, files
from quire.services.worker.models.loading.safetensors_layout import stored_tensors
from quire.shared.errors import QuireError
from quire.shared.gguf.header import read_header
from quire.shared.logs import logger
from quire.shared.settings import WorkerSettings

log = logger("worker.build")

NUM_SAMPLES = 64  # of a file
SAMPLE_BYTES = 4096
HEAD_BYTES = 1 << 20  # all of a small one
TENSOR_BYTES = 256
NUM_READERS = 4
GATHERED = 1024  # samples at a time
DENSES = "*_Dense"  # folders of sentence-transformers, below the model's


def weights_digest_of(settings: WorkerSettings) -> bytes:
    """Of what a worker with these settings computes with at its start, 32 bytes; empty where nothing can be said: then
    the loader says why."""
    if settings.load_format == "dummy":
        told = f"dummy {settings.seed}"
    else:
        found = folder_digest(Path(settings.model))
        if not found:
            return b""
        told = found.hex()
    return hashlib.sha256(json.dumps([told, settings.quantization]).encode()).digest()


def folder_digest(folder: Path) -> bytes:
    """32 bytes; empty where there are no weights that can be read."""
    try:
        paths = [*files(folder)]
        for pattern in FILES:
            paths += sorted(folder.glob(f"{DENSES}/{pattern}"))
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="samples") as readers:
            return hashlib.sha256(b"".join(readers.map(_file_digest, paths))).digest()
    except (OSError, ValueError, QuireError, zipfile.BadZipFile) as error:
        log.debug("no samples of the weights", folder=str(folder), reason=error)
        return b""


def _file_digest(path: Path) -> bytes:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(f"{size} {_checksums(path)}\n".encode())
        digest.update(os.pread(file.fileno(), HEAD_BYTES, 0))
        last = max(0, size - SAMPLE_BYTES)
        samples = [(last * sample // (NUM_SAMPLES - 1), SAMPLE_BYTES) for sample in range(NUM_SAMPLES)]
        for start, num_bytes in _tensors(path, file.fileno()):
            if start < 0 or not 0 <= num_bytes <= size - start:
                raise ValueError(f"{path} has {size} bytes, and a tensor of {num_bytes} at {start}")
            for place in (num_bytes // 2, max(0, num_bytes - TENSOR_BYTES)):
                samples.append((start + place, min(TENSOR_BYTES, num_bytes - place)))
        for taken in _gathered(file.fileno(), size, samples):
            digest.update(taken)
    return digest.digest()


def _gathered(file: int, size: int, samples: list[tuple[int, int]]) -> Iterator[memoryview]:
    """What lies at these places, (start, length): a mixture of experts has 40,000 of them, and one read for each lets
    go of the interpreter as often, beside threads that want it."""
    if not size:
        return
    content = mmap.mmap(file, size, access=mmap.ACCESS_READ)
    content.madvise(mmap.MADV_RANDOM)
    whole = np.frombuffer(content, np.uint8)
    for begin in range(0, len(samples), GATHERED):
        starts, lengths = np.array(samples[begin : begin + GATHERED], np.int64).T
        lengths = np.minimum(lengths, size - starts)
        before = np.cumsum(lengths) - lengths
        places = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
        yield whole.take(places).data


def _checksums(path: Path) -> str:
    """Those that torch writes of each tensor."""
    if path.suffix not in (".bin", ".pt") or not zipfile.is_zipfile(path):
        return ""
    with zipfile.ZipFile(path) as parts:
        return " ".join(f"{part.CRC:08x}" for part in parts.infolist())


def _tensors(path: Path, file: int) -> Iterator[tuple[int, int]]:
    """Where they begin, and how many bytes they have, in a file that says so."""
    if path.suffix == ".gguf":
        for place in read_header(path).tensors.values():
            yield place.start, place.num_bytes
    elif path.suffix == ".safetensors":
        yield from sorted((one.start, one.num_bytes) for one in stored_tensors(path, file).values())
