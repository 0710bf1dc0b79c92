"""Weights that a trainer broadcasts over NCCL, which allows one member per GPU; needs two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire import Client, SamplingParams, WeightsUpdateGroup
from quire.shared.errors import InvalidArgument, Unavailable
from tests.e2e.conftest import running_cluster
from tests.e2e.operations.mismatched_tensors import with_odd
from tests.e2e.operations.test_weights import NORM, PROMPT, folder_of, shake

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def client() -> Iterator[Client]:
    """Client of a worker on the first GPU; the trainer uses the second."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    torch.cuda.set_device(1)
    worker = {"device": "cuda", "dtype": "float32", "num_blocks": 400}
    with running_cluster(redis="none", worker=worker) as cluster, Client(cluster.grpc_address) as connected:
        yield connected


def test_worker_receives_a_broadcast_and_outlives_a_stopped_trainer(client: Client, tmp_path: Path) -> None:
    tensors = load_file(next(folder_of(tmp_path / "step-1", shake(1)).glob("*.safetensors")))
    (before,) = client.generate(PROMPT, GREEDY)
    client.update_weights_from_tensor(tensors.items(), "streamed")
    (wanted,) = client.generate(PROMPT, GREEDY)
    assert wanted.outputs[0].token_ids != before.outputs[0].token_ids
    with WeightsUpdateGroup(client) as group:
        with pytest.raises(InvalidArgument, match=NORM):
            group.update({**tensors, NORM: torch.zeros(3)}.items())
        assert group.update(tensors.items(), "broadcast") == "broadcast"
        (after,) = client.generate(PROMPT, GREEDY)
        assert (after.weight_version, after.cached_tokens) == ("broadcast", 0)
        assert after.outputs[0].token_ids == wanted.outputs[0].token_ids
        group.timeout_s = 5.0
        less = with_odd(dict(tensors), [*tensors][-1], lambda _: None)
        with pytest.raises(Unavailable, match="was not received within 5 s"):
            group.update(less.items(), "never")
    assert client.generate(PROMPT, GREEDY)[0].outputs == after.outputs
    assert client.update_weights_from_tensor(tensors.items(), "streamed again") == "streamed again"
