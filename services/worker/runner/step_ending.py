"""End of a step after its layers: logits, sampling, other heads, copies to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from quire.kernels.reference.low_rank import AdaptedRows
from quire.services.worker.device.staging import Staging
from quire.services.worker.device.step_timer import StepTimer
from quire.services.worker.graphs.recorded_steps import ReadyStep
from quire.services.worker.graphs.recordings import Recordings
from quire.services.worker.heads.heads import Heads, StepHeads
from quire.services.worker.heads.port import HeadLaunch
from quire.services.worker.lora.no_adapters import StepAdapters
from quire.services.worker.runner.component import StepContext
from quire.services.worker.runner.output import Launch, RunnerOutput
from quire.services.worker.runner.step_batches import Uploaded
from quire.services.worker.sampling.sampler import SampledTokens
from quire.services.worker.step.slot_memory import SlotMemory
from quire.services.worker.step.step_inputs import StepInputs

EndStep = Callable[[Tensor | None], Launch]  # launches the heads on the hidden states (None: no tokens)


class StageLaunch(Protocol):
    """Launched step of a runner or of one pipeline stage; wait() returns its results (Launch, PendingStep,
    NonSamplingStep)."""

    @property
    def heads_launched(self) -> bool: ...

    def await_remote_stages(self) -> None: ...

    def wait(self) -> RunnerOutput: ...


class LogitsModel(Protocol):
    """Model as far as step endings use it: maps hidden states to logits."""

    def logits(self, hidden: Tensor, *adapted: AdaptedRows) -> Tensor: ...


class StepEnding:
    """Launches what follows the layers of a step: output head, sampler, other heads, and the copies to the host."""

    def __init__(
        self,
        model: LogitsModel,
        heads: Heads,
        memory: SlotMemory,
        *,
        staging: Staging,
        timer: StepTimer,
        adapters: StepAdapters,
        context: StepContext,
        recordings: Recordings,
    ) -> None:
        self.model = model
        self._heads, self._memory, self._staging, self._timer = heads, memory, staging, timer
        self._adapters, self._context, self._recordings = adapters, context, recordings
        self._none_sampled = SampledTokens(memory.last_tokens[:0], None)

    def end(
        self,
        inputs: StepInputs,
        up: Uploaded | None,
        step_heads: StepHeads,
        hidden: Tensor | None,
        marks: list[Any] | None,
    ) -> Launch:
        """Launches the heads on the hidden states `hidden` of the wanted tokens (None: the step has none) and starts
        the copies of their results.

        `up`: None for recorded steps of a pipeline whose sampling is recorded separately. Stores the sampled tokens as
        the slots' last tokens.
        """
        self._timer.mark(marks)
        sampled, endings = self._none_sampled, []
        if hidden is not None:
            if inputs.num_samples:
                sampled = self._sampled(inputs, up, step_heads, hidden)
            if step_heads.rows:
                endings = step_heads.launch(hidden, inputs.num_samples, self._staging)
        return Launch(self._timer, marks, self._staging, sampled, drafts=inputs.drafts, endings=endings)

    def end_recorded(
        self, step: ReadyStep, inputs: StepInputs, step_heads: StepHeads, marks: list[Any] | None
    ) -> Launch:
        """Replays a recording up to the logits, samples from them, launches the other heads and starts the copies of
        their results."""
        logits = step.forward()
        self._timer.mark(marks)
        sampled = self._chosen(step, logits, inputs)
        endings: list[HeadLaunch] = []
        if step_heads.rows and step.hidden is not None:
            endings = step_heads.launch_all(step.hidden, self._staging)
        return Launch(self._timer, marks, self._staging, sampled, drafts=inputs.drafts, endings=endings)

    def _sampled(self, inputs: StepInputs, up: Uploaded | None, step_heads: StepHeads, hidden: Tensor) -> SampledTokens:
        """Computes logits and samples a token for each row whose successor is wanted; arguments as in end().

        Replays a recorded output head if no other head runs and there is one. `hidden` may hold all tokens of the step
        or begin with the sampled ones, as `step_heads` requires.
        """
        if not step_heads.rows and self._recordings.samples is not None:
            step = self._recordings.samples.prepare(inputs, hidden)
            return self._chosen(step, step.forward(), inputs)
        assert up is not None, "recordings take steps whose samples others take"
        if step_heads.rows:
            hidden = (
                hidden.index_select(0, up.sampling_tokens)
                if step_heads.reads_all_tokens
                else hidden[: inputs.num_samples]
            )
        logits = self.model.logits(hidden, *self._adapters.logit_rows)
        slots, positions = up.sampling_slots, up.sample_positions
        sampled = self._heads.sampling.launch(logits, inputs, self._memory, slots=slots, positions=positions)
        self._context.agree(sampled, self._memory)
        return sampled

    def _chosen(self, step: ReadyStep, logits: Tensor, inputs: StepInputs) -> SampledTokens:
        """Samples from a recording's logits [num_rows or num_samples, vocab_size].

        Replays the recorded sampling if each row has one sample and the sampling parameters allow it; else launches the
        sampler on the sampled rows.
        """
        if not inputs.num_samples:
            return self._none_sampled
        one_each = inputs.num_samples == inputs.num_rows if step.of_rows else inputs.drafts is None
        sampling = self._heads.sampling
        plain = sampling.plain(inputs.sampling_slots) if one_each else None
        if plain is not None:
            plain.mask(logits)
            sampled = plain.record_choice(step.choose(plain.choice))
        else:
            slots, positions, rows = self._staging.upload(
                [inputs.sampling_slots, inputs.sample_positions, inputs.sampling_tokens]
            )
            wanted = logits.index_select(0, rows) if step.of_rows else logits
            sampled = sampling.launch(wanted, inputs, self._memory, slots=slots, positions=positions)
        self._context.agree(sampled, self._memory)
        return sampled
