"""Estimated step costs, compared with counts of transformers on the same models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from quire.services.worker.device.peaks import peak_of
from quire.services.worker.device.step_timer import Timings
from quire.services.worker.step.result import StepResult
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.metrics.worker import Peak, StepCost, WorkerMetrics
from tests.services.worker import checkpoints
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import runner_of
from tests.services.worker.rig import Rig

PROMPT = list(range(5, 25))


def costs(folder: Path) -> list[StepCost]:
    """Returns the costs of a prompt of 20 tokens and of two following steps."""
    rig = Rig(folder)
    found: list[StepCost] = []
    launch = runner_of(rig.replica).launch

    def watched(inputs: StepInputs, new_blocks: object) -> object:
        found.append(rig.replica.cost_model.cost_of(inputs))
        return launch(inputs, new_blocks)

    runner_of(rig.replica).launch = watched
    rig.step([New(0, PROMPT)], {0: len(PROMPT)})
    rig.step()
    rig.step()
    return found


@pytest.mark.parametrize("family", ["llama", "granite", "olmo2", "glm4"])
def test_a_dense_model_takes_two_operations_for_each_weight_and_token(family: str, tmp_path: Path) -> None:
    made = checkpoints.make(family, tmp_path)
    config = made.model.config
    head = made.model.get_output_embeddings().weight.numel()
    embeddings = {id(p) for n, p in made.model.named_parameters() if "embed" in n or "wte" in n or "wpe" in n}
    of_head = id(made.model.get_output_embeddings().weight)
    dense = sum(p.numel() for p in made.model.parameters() if p.dim() > 1 and id(p) not in {*embeddings, of_head})
    first, second, _ = costs(made.folder)
    heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None)
    attention = 4 * heads * (head_dim or config.hidden_size // heads) * config.num_hidden_layers
    assert first.flops == 2 * (20 * dense + head) + attention * sum(range(1, 21))
    assert second.flops == 2 * (dense + head) + attention * 21
    assert first.weight_bytes == second.weight_bytes == (dense + head) * 4
    assert first.kv_written_bytes == 20 * second.kv_written_bytes
    assert second.kv_read_bytes == 21 * second.kv_written_bytes


def test_a_window_bounds_what_is_read(tmp_path: Path) -> None:
    made = checkpoints.make("cohere2", tmp_path)
    _, second, third = costs(made.folder)
    layers = made.model.config.num_hidden_layers
    assert second.kv_read_bytes == second.kv_written_bytes * (21 + 9) / 2
    assert third.kv_read_bytes - second.kv_read_bytes == second.kv_written_bytes / layers * (layers / 2)


def test_a_chunk_bounds_what_is_read(tmp_path: Path) -> None:
    """Of positions 20 and 21, chunks of 9 contain two and three; three of four layers have chunked attention."""
    made = checkpoints.make("llama4", tmp_path)
    first, second, third = costs(made.folder)
    assert first.kv_read_bytes == second.kv_written_bytes * 20
    assert second.kv_read_bytes == second.kv_written_bytes * (21 + 3 * 3) / 4
    assert third.kv_read_bytes == second.kv_written_bytes * (22 + 3 * 4) / 4
    attention = (third.flops - second.flops) / (1 + 3)  # per pair of tokens and layer
    head = 2 * made.model.get_output_embeddings().weight.numel()
    weights = second.flops - head - attention * (21 + 3 * 3)
    in_chunks = 2 * sum(range(1, 10)) + 1 + 2
    assert first.flops == pytest.approx(20 * weights + head + attention * (sum(range(1, 21)) + 3 * in_chunks))


def test_a_layer_may_keep_keys_and_values_and_a_state(tmp_path: Path) -> None:
    made = checkpoints.make("falcon-h1", tmp_path)
    config = made.model.config
    first, second, third = costs(made.folder)
    of_token = 2 * config.num_key_value_heads * config.head_dim * 4 * config.num_hidden_layers
    inputs = (config.mamba_d_conv - 1) * (config.mamba_d_ssm + 2 * config.mamba_n_groups * config.mamba_d_state)
    of_states = (inputs + config.mamba_d_ssm * config.mamba_d_state) * 4 * config.num_hidden_layers
    assert first.kv_written_bytes == 20 * of_token + of_states
    assert second.kv_written_bytes == of_token + of_states
    assert second.kv_read_bytes == 21 * of_token + of_states
    assert third.kv_read_bytes == 22 * of_token + of_states


def test_a_token_takes_some_of_the_experts_and_a_prompt_reads_nearly_all(tmp_path: Path) -> None:
    made = checkpoints.make("mixtral", tmp_path)
    first, second, _ = costs(made.folder)
    routed = sum(p.numel() for n, p in made.model.named_parameters() if ".experts." in n)
    others = second.weight_bytes / 4 - routed * 2 / 4  # each token uses two of four
    assert first.weight_bytes / 4 == pytest.approx(others + routed, rel=1e-3)
    assert first.flops < 2 * 20 * (others + routed)


def test_utilization() -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    metrics.set_peak(Peak(flops=1000.0, bytes=500.0))
    timings = Timings(0, 400_000, 100_000)
    result = StepResult(1, 1, np.zeros(1, np.int32), None, None, [], wait_us=0, timings=timings)
    metrics.observe_step(result, 1, StepCost(250.0, 60.0, 30.0, 10.0))
    values = {sample.name: sample.value for family in metrics.registry.collect() for sample in family.samples}
    assert values["quire_worker_model_flops_utilisation"] == 0.5
    assert values["quire_worker_model_bandwidth_utilisation"] == 0.4
    assert values["quire_worker_step_busy_seconds_total"] == 0.5


def test_devices_are_known_by_their_names() -> None:
    assert peak_of("NVIDIA H200").bytes == 4.8e12
    assert peak_of("NVIDIA H100 PCIe").flops < peak_of("NVIDIA H100 80GB HBM3").flops
    assert peak_of("cpu").flops == 0
