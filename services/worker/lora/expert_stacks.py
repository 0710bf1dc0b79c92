"""Adapters of experts whose weights are one stacked parameter (PEFT's target_parameters, as in transformers 5).

PEFT stores A and B of all experts in one matrix each: A [num_experts * rank, n], expert after expert, and B [m, rank *
num_experts] with the experts interleaved. Names do not tell which of the two parameters it is (one of them has
`base_layer` after the module's name); sizes do. Since PEFT 0.19, n is a parameter's last dimension and m the one
before, inputs and outputs of most models; before it was the other way round. If both are equal, the version that wrote
the file decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.services.worker.lora.peft.peft_folder import DOWN, GATE_UP, ExpertStack, LowRank
from quire.services.worker.lora.peft.peft_scales import refusal

LAST_DIMENSION_SINCE = (0, 19)  # first PEFT version whose A multiplies a parameter's last dimension


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a layer's experts in the checkpoint, by which the two stacked parameters are distinguished."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    inputs_first: bool = False  # dimension order of transformers' parameters

    def parameter_of(self, stack: ExpertStack, adapter: str) -> str:
        """Returns the parameter (GATE_UP or DOWN) that the stack adapts, by its sizes. Raises InvalidArgument if it is
        neither of the two or has another rank than its configuration; `adapter`: name for the message."""
        dimensions, sizes = {stack.a.size(1), stack.b.size(0)}, self._sizes()
        matching = next((parameter for parameter in sizes if set(sizes[parameter]) == dimensions), None)
        if matching is None:
            expected = " or ".join(f"{parameter} {list(shape)}" for parameter, shape in sizes.items())
            actual = [stack.b.size(0), stack.a.size(1)]
            text = f"{stack.name} is for weights of shape {actual}, the model's have {expected}"
            raise refusal(adapter, text)
        rank, _ = stack.scales[matching]
        if stack.a.size(0) != rank * self.num_experts or stack.b.size(1) != rank * self.num_experts:
            shapes = f"{list(stack.a.shape)} and {list(stack.b.shape)}"
            text = f"{stack.name} has shapes {shapes} for {matching}, r is {rank} for {self.num_experts} experts"
            raise refusal(adapter, text)
        self._reads_inputs(stack, matching, adapter)
        return matching

    def pairs(self, stack: ExpertStack, expert: int, adapter: str) -> list[LowRank]:
        """Returns the additions of one expert, scaled, in float32: two for its gate and up projections, or one for its
        down projection."""
        parameter = self.parameter_of(stack, adapter)
        rank, scale = stack.scales[parameter]
        a = stack.a[expert * rank : (expert + 1) * rank]
        b = stack.b.unflatten(1, (rank, self.num_experts))[:, :, expert]
        down, up = (a, b) if self._reads_inputs(stack, parameter, adapter) else (b.t(), a.t())
        outputs = up.float() * scale
        parts: Sequence[Tensor] = outputs.chunk(2) if parameter == GATE_UP else (outputs,)
        return [LowRank(down.float(), part) for part in parts]

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Returns outputs and inputs by parameter."""
        size = self.intermediate_size
        return {GATE_UP: (2 * size, self.hidden_size), DOWN: (self.hidden_size, size)}

    def _reads_inputs(self, stack: ExpertStack, parameter: str, adapter: str) -> bool:
        """Returns whether A multiplies the inputs; otherwise B does. For square weights the PEFT version decides;
        raises InvalidArgument if that is unknown."""
        outputs, inputs = self._sizes()[parameter]
        if outputs != inputs:
            return stack.a.size(1) == inputs
        numbers = re.match(r"(\d+)\.(\d+)", stack.version)
        if numbers is None:
            text = f"peft_version is {stack.version!r}: versions differ in square weights like those of {stack.name}"
            raise refusal(adapter, text)
        return (tuple(map(int, numbers.groups())) >= LAST_DIMENSION_SINCE) != self.inputs_first
