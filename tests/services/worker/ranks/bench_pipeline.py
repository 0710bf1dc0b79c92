"""What steps under way gain where layers are shared out among stages.

python -m tests.services.worker.ranks.bench_pipeline: decode steps of made-up weights, half of the sequences each; with
one step under way a stage waits for the other. Several rounds by turns, the median of each. With --stage-ms each stage
sleeps as long besides: what a machine shows that has no processors to spare.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from quire.services.worker.building.rank_processes.start import build_part
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.replica.replica import Replica
from quire.shared.settings import WorkerSettings
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_sharding import RankedRig, ranked
from tests.services.worker.replica_internals import current_model_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def run(rig: RankedRig, depth: int, num_steps: int) -> float:
    """Milliseconds per step."""
    flights: deque[Any] = deque()
    begun = time.perf_counter()
    for step in range(num_steps):
        flights.append(rig.launch(rig.scheduler.plan(micro_batch=step % 2)))
        if len(flights) == depth:
            rig.scheduler.take(rig.finish(flights.popleft()))
    while flights:
        rig.scheduler.take(rig.finish(flights.popleft()))
    return (time.perf_counter() - begun) / num_steps * 1e3


def build_sleepy(settings: WorkerSettings, placement: RankPlacement, seconds: float) -> RankReplica:
    part = build_part(settings, placement)
    slow_down(part.replica, seconds)
    return part


def slow_down(replica: Replica, seconds: float) -> None:
    """Makes the layers of a stage take `seconds` longer."""
    model: Any = current_model_of(replica)
    for name in ("first_layers", "last_layers"):
        compute = getattr(model, name)

        def slowly(*arguments: Any, compute: Any = compute) -> Any:
            time.sleep(seconds)
            return compute(*arguments)

        setattr(model, name, slowly)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage-ms", type=float, default=0.0)
    parser.add_argument("--hidden-size", type=int, default=LLAMA["hidden_size"])
    asked = parser.parse_args()
    size = asked.hidden_size
    config = {**LLAMA, "hidden_size": size, "intermediate_size": 4 * size, "head_dim": size // 8}
    block_size = 16 if asked.device == "cpu" else 64
    settings = {
        "device": asked.device,
        "load_format": "dummy",
        "dtype": "bfloat16" if asked.device == "cuda" else "float32",
        "block_size": block_size,
        "num_blocks": asked.rows * (8 + asked.steps * asked.rounds * 2 // block_size) + 1,
        "max_num_seqs": asked.rows,
        "attention_backend": "auto",
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        build = functools.partial(build_sleepy, seconds=asked.stage_ms / 1e3)
        with ranked(Path(folder), size=1, stages=2, record_logits=False, build=build, **settings) as rig:
            slow_down(rig.replica, asked.stage_ms / 1e3)
            for number in (0, 1):
                new = [New(slot, [1, 2, 3]) for slot in range(number, asked.rows, 2)]
                rig.scheduler.take(
                    rig.execute(rig.scheduler.plan(new, {one.slot: 3 for one in new}, micro_batch=number))
                )
            found: dict[int, list[float]] = {1: [], 3: []}
            for _ in range(asked.rounds):
                for depth, times in found.items():
                    times.append(run(rig, depth, asked.steps))
            for depth, times in found.items():
                print(f"{depth} steps under way: {statistics.median(times):.2f} ms a step of {asked.rows // 2} rows")


if __name__ == "__main__":
    main()
