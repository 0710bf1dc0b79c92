"""Steps before the first request: the largest ones, to measure memory, and trial steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.runner.model_runner import ModelRunner
from quire.services.worker.sampling.vocabulary.columns import COSTLY
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.drafts.drafted_states import StateLags
from quire.services.worker.step.slots import NO_BLOCKS
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.errors import InvalidArgument, QuireError

TRIAL_TOKENS = 8


def run_largest_steps(runner: ModelRunner, limits: WorkerLimits, kept_drafts: int = 0) -> None:
    """Runs one prompt that fills a step, then a decode of every slot, with the sampling parameters that need the most
    memory, and waits for both.

    KV goes to the null block; all slots are admitted to the heads before and released afterwards. `kept_drafts`: drafts
    kept per slot by recurrent layers, which then allocate their memory.
    """
    for slot in range(limits.max_num_seqs):
        runner.heads.admit(slot, SlotAdmission(sampling=COSTLY))
    for num_rows, count in ((1, min(limits.max_num_batched_tokens, limits.max_model_len)), (limits.max_num_seqs, 1)):
        inputs = _inputs(num_rows, count, limits)
        if kept_drafts:
            none_lag = StateLags(np.zeros(num_rows, dtype=np.int32), kept_drafts, limits.block_size)
            inputs = replace(inputs, lags=none_lag)
        launch = runner.launch(inputs, NO_BLOCKS)
        runner.launch_pending_heads(np.arange(num_rows))
        launch.wait()
    for slot in range(limits.max_num_seqs):
        runner.heads.release(slot)


def _inputs(num_rows: int, count: int, limits: WorkerLimits) -> StepInputs:
    """Builds inputs of `num_rows` sequences with `count` tokens each."""
    slots = np.arange(num_rows)
    positions = np.tile(np.arange(count, dtype=np.int32), num_rows)
    query_start = np.arange(num_rows + 1, dtype=np.int32) * count
    return StepInputs(
        slots=slots,
        token_ids=np.zeros(num_rows * count, dtype=np.int32),
        positions=positions,
        slot_mapping=np.tile(positions % limits.block_size, limits.num_groups),
        query_start=query_start,
        seq_lens=np.full(num_rows, count, dtype=np.int32),
        num_blocks=-(-count // limits.block_size),
        prev_sampled_tokens=positions[:0],
        prev_sampled_slots=slots[:0],
        sampling_slots=slots,
        sampling_tokens=query_start[1:] - 1,
        sample_positions=np.full(num_rows, count, dtype=np.int32),
        rows_changed=True,
    )


def run_trial_steps(runner: ModelRunner, limits: WorkerLimits) -> None:
    """Runs a short prompt and a decode, so that a model class of transformers that does not work here fails at start,
    not at the first request.

    Raises InvalidArgument with the first line of that class's error; errors of this project are passed through.
    """
    short = replace(limits, max_num_batched_tokens=min(TRIAL_TOKENS, limits.block_size), max_num_seqs=1)
    try:
        run_largest_steps(runner, short)
    except QuireError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        text = f"model: its code fails with our attention at a first step: {type(error).__name__}: {reason}"
        raise InvalidArgument(f"{text} (transformers)", field="model") from error
