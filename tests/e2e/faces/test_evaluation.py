"""The bundled model's known answers through a real cluster: an end-to-end check of all services."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from quire.cluster import Cluster


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_bundled_model_knows_its_answers(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "tools.evals", "--address", cluster.grpc_address, "--per-size", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    score = json.loads(done.stdout)
    assert score["all"]["items"] > 150
    assert score["all"]["right"] >= 0.98


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_bundled_model_knows_what_is_in_pictures(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "tools.evals", "--address", cluster.grpc_address, "--skills", "pictures"]
    done = subprocess.run([*command, "--per-size", "6", "--json"], capture_output=True, text=True, check=True)
    score = json.loads(done.stdout)
    shapes = [row for name, row in score.items() if name.startswith("picture_shapes/")]
    assert len(shapes) >= 6
    assert sum(row["right"] * row["items"] for row in shapes) / sum(row["items"] for row in shapes) >= 0.4
