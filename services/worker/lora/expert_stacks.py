"""Adapters of experts whose weights are one parameter for all (PEFT's target_parameters, as transformers 5 has them).

PEFT keeps A and B of all experts in one matrix each: A [num_experts * rank, n], expert after expert, and B [m, rank *
num_experts], where the experts take turns. The names do not say which parameter it is (one of two has `base_layer`
behind the module's); the sizes tell. Since 0.19, n is a parameter's last dimension and m the one before, of most models
inputs and outputs; before it was the other way round. Where both are the same, the version that wrote the file decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.services.worker.lora.peft.peft_folder import DOWN, GATE_UP, ExpertStack, LowRank
from quire.services.worker.lora.peft.peft_scales import refusal

LAST_DIMENSION_SINCE = (0, 19)  # PEFT's first version of which A is multiplied with a parameter's last dimension


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Of a layer's experts in the checkpoint."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    inputs_first: bool = False  # in transformers' parameters

    def parameter_of(self, stack: ExpertStack, adapter: str) -> str:
        """Raises InvalidArgument where it is none of the two."""
        have, sizes = {stack.a.size(1), stack.b.size(0)}, self._sizes()
        found = next((parameter for parameter in sizes if set(sizes[parameter]) == have), None)
        if found is None:
            want = " or ".join(f"{parameter} {list(shape)}" for parameter, shape in sizes.items())
            text = f"{stack.name} is for weights of shape {[stack.b.size(0), stack.a.size(1)]}, the model's have {want}"
            raise refusal(adapter, text)
        rank, _ = stack.scales[found]
        if stack.a.size(0) != rank * self.num_experts or stack.b.size(1) != rank * self.num_experts:
            shapes = f"{list(stack.a.shape)} and {list(stack.b.shape)}"
            text = f"{stack.name} has shapes {shapes} for {found}, r is {rank} for {self.num_experts} experts"
            raise refusal(adapter, text)
        self._reads_inputs(stack, found, adapter)
        return found

    def pairs(self, stack: ExpertStack, expert: int, adapter: str) -> list[LowRank]:
        """Of the expert's gate and up, or of its down."""
        parameter = self.parameter_of(stack, adapter)
        rank, scale = stack.scales[parameter]
        a = stack.a[expert * rank : (expert + 1) * rank]
        b = stack.b.unflatten(1, (rank, self.num_experts))[:, :, expert]
        down, up = (a, b) if self._reads_inputs(stack, parameter, adapter) else (b.t(), a.t())
        outputs = up.float() * scale
        parts: Sequence[Tensor] = outputs.chunk(2) if parameter == GATE_UP else (outputs,)
        return [LowRank(down.float(), part) for part in parts]

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs."""
        size = self.intermediate_size
        return {GATE_UP: (2 * size, self.hidden_size), DOWN: (self.hidden_size, size)}

    def _reads_inputs(self, stack: ExpertStack, parameter: str, adapter: str) -> bool:
        """Whether A does, as B otherwise."""
        outputs, inputs = self._sizes()[parameter]
        if outputs != inputs:
            return stack.a.size(1) == inputs
        numbers = re.match(r"(\d+)\.(\d+)", stack.version)
        if numbers is None:
            text = f"peft_version is {stack.version!r}: versions differ in square weights like those of {stack.name}"
            raise refusal(adapter, text)
        return (tuple(map(int, numbers.groups())) >= LAST_DIMENSION_SINCE) != self.inputs_first
