"""Fingerprint of a model's weights from samples of its files: milliseconds for gigabytes, where a full read takes as
long as loading.

Samples of a file: size, beginning and pieces at equal distances; of a tensor: two pieces if the file gives its
position, or its checksum if there is one. A trained, quantized, converted or edited checkpoint gets another
fingerprint; a few changed numbers inside a large tensor may go unnoticed. File names are ignored, the distribution of
tensors over files is not.
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

from quire.services.worker.models.loading import weight_files
from quire.services.worker.models.loading.safetensors_layout import stored_tensors
from quire.shared.errors import QuireError
from quire.shared.gguf.header import read_header
from quire.shared.logs import logger
from quire.shared.settings import WorkerSettings

log = logger("worker.build")

NUM_SAMPLES = 64  # samples of a file
SAMPLE_BYTES = 4096
HEAD_BYTES = 1 << 20  # small files are read whole
TENSOR_BYTES = 256
NUM_READERS = 4
GATHERED = 1024  # samples read at a time
DENSES = "*_Dense"  # sentence-transformers subfolders


def weights_digest_of(settings: WorkerSettings) -> bytes:
    """Returns the digest (32 bytes) of the weights a worker with these settings starts with.

    Empty if it cannot be computed; the loader then reports the reason.
    """
    if settings.load_format == "dummy":
        source = f"dummy {settings.seed}"
    else:
        digest = folder_digest(Path(settings.model))
        if not digest:
            return b""
        source = digest.hex()
    return hashlib.sha256(json.dumps([source, settings.quantization]).encode()).digest()


def folder_digest(folder: Path) -> bytes:
    """Returns the digest of a folder's weights (32 bytes); empty if there are no readable weights."""
    try:
        paths = [*weight_files.paths(folder)]
        for pattern in weight_files.FILES:
            paths += sorted(folder.glob(f"{DENSES}/{pattern}"))
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="samples") as readers:
            return hashlib.sha256(b"".join(readers.map(_file_digest, paths))).digest()
    except (OSError, ValueError, QuireError, zipfile.BadZipFile) as error:
        log.debug("cannot sample the weights", folder=str(folder), reason=error)
        return b""


def _file_digest(path: Path) -> bytes:
    """Returns the digest of a file's size, checksums, beginning and samples (32 bytes). Raises ValueError for tensors
    outside of the file."""
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
    """Yields the content of the samples (start, length), GATHERED of them at a time; samples are cut at the end of the
    file.

    A mixture of experts has 40,000 of them; one read each would release the GIL as often, while other threads compete
    for it.
    """
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
    """Returns the checksums that torch stores for each tensor, in hexadecimal; empty for other files."""
    if path.suffix not in (".bin", ".pt") or not zipfile.is_zipfile(path):
        return ""
    with zipfile.ZipFile(path) as parts:
        return " ".join(f"{part.CRC:08x}" for part in parts.infolist())


def _tensors(path: Path, file: int) -> Iterator[tuple[int, int]]:
    """Yields start and size in bytes of each tensor, for safetensors and GGUF files; nothing for others."""
    if path.suffix == ".gguf":
        for place in read_header(path).tensors.values():
            yield place.start, place.num_bytes
    elif path.suffix == ".safetensors":
        yield from sorted((one.start, one.num_bytes) for one in stored_tensors(path, file).values())
