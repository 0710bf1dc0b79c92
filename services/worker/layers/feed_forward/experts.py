"""Mixture-of-experts layer: a router, routed experts, an optional shared expert.

Outrageously Large Neural Networks (arXiv 1701.06538); shared experts as in DeepSeekMoE (arXiv 2401.06066).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from quire.services.worker.layers.feed_forward.dispatch import ExpertDispatch
from quire.services.worker.layers.feed_forward.expert_placement import ExpertPlacement
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.sharding import WHOLE, portion, shifted
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.reference.low_rank import ExpertAdditions
    from quire.services.worker.layers.norm.rms_norm import RMSNorm
    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement, Loadable
    from quire.services.worker.lora.expert_adapters import ExpertAdapters, ExpertShapes
    from quire.services.worker.models.config.experts_config import ExpertNames, ExpertsConfig
    from quire.services.worker.models.single_row import RowKernels


class Experts:
    """Stacked weights of this rank's experts, loaded from one checkpoint tensor per expert or one for all.

    A rank has whole experts (expert parallelism) or a part of the intermediate features of all.
    """

    takes_adapters: ClassVar[bool] = True
    inputs_first: ClassVar[bool] = False  # input features come first in stacked parameters of transformers

    def __init__(self, name: str, hidden_size: int, config: ExpertsConfig, place: LayerPlacement) -> None:
        self._name, self._names, self._gate = name, config.names, config.activation
        self._ops = place.ops
        self._total = config.intermediate_size
        self._num_experts, self._whole = config.num_experts, place.shard.whole_experts
        self._spare = place.shard.spare_experts
        self.here, self._features = place.shard.experts(config.num_experts, self._total)
        count, size = len(self.here), len(self._features)
        self._gate_up: Tensor = place.empty(count, 2 * size, hidden_size)
        self._down: Tensor = place.empty(count, hidden_size, size)
        self.packed: Any = None  # packed by the ops once loaded
        # Adapter weights; None: no adapters.
        self.adapters: ExpertAdapters | None = None
        if place.adapters is not None and self.takes_adapters:
            self.adapters = place.adapters.for_experts(self._adapted_shapes(hidden_size))

    def _adapted_shapes(self, hidden_size: int) -> ExpertShapes:
        """Returns names and sizes of the expert projections to which adapters may add."""
        from quire.services.worker.lora.expert_adapters import ExpertShapes
        from quire.services.worker.lora.expert_stacks import ExpertSizes

        called = self._name.replace(f".{self._names.module}.", ".mlp.")  # name of all such layers in transformers 5
        return ExpertShapes(
            modules=(self._name, called),
            projections=[self._modules(expert) for expert in range(self._num_experts)],
            sizes=ExpertSizes(self._num_experts, hidden_size, self._total, self.inputs_first),
            here=self.here,
            features=self._features,
        )

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        """Yields gate, up and down tensors of each expert on this rank, by their names in the checkpoint."""
        for expert, gate_up, down in zip(self.here, self._gate_up, self._down, strict=True):
            gate, up = (portion(part, 0, (self._features,), self._total) for part in gate_up.chunk(2))
            down_part = portion(down, 1, (self._features,), self._total)
            yield from zip(self._part_names(expert), (gate, up, down_part), strict=True)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        """Stacked gate_up and down tensors of all experts that checkpoints may have in place of one tensor per
        expert, in Qwen3-VL-MoE's with input features first."""
        from quire.services.worker.layers.placement import Alternative

        parts = [self._part_names(expert) for expert in self.here]
        gates_and_ups = tuple(name for gate, up, _ in parts for name in (gate, up))
        return {
            f"{self._name}.gate_up_proj": Alternative(
                self._all_gates_and_ups(), gates_and_ups, self._all_gates_and_ups(inputs_first=True)
            ),
            f"{self._name}.down_proj": Alternative(
                self._all_downs(), tuple(down for _, _, down in parts), self._all_downs(inputs_first=True)
            ),
        }

    def _all_gates_and_ups(self, *, inputs_first: bool = False) -> Destination:
        """Returns the destination of a stacked tensor [num_experts, 2 * size, hidden_size], an expert's gates before
        its ups; with `inputs_first` the last two dimensions are exchanged."""
        both, tensor = (self._features, shifted(self._features, self._total)), self._gate_up
        if inputs_first:
            return self._stacked_destination(tensor.transpose(1, 2), 2, both, 2 * self._total)
        return self._stacked_destination(tensor, 1, both, 2 * self._total)

    def _all_downs(self, *, inputs_first: bool = False) -> Destination:
        """Returns the destination of a stacked tensor [num_experts, hidden_size, size]; with `inputs_first` the last
        two dimensions are exchanged."""
        if inputs_first:
            return self._stacked_destination(self._down.transpose(1, 2), 1, (self._features,), self._total)
        return self._stacked_destination(self._down, 2, (self._features,), self._total)

    def _stacked_destination(self, tensor: Tensor, dim: int, taken: tuple[range, ...], total: int) -> Destination:
        """Returns the destination of a stacked tensor [num_experts, ...] in `tensor`.

        Reads whole experts, or of each expert the ranges `taken` along `dim`, whose whole size is `total`.
        """
        if self._whole:
            return portion(tensor, 0, (self.here,), self._num_experts)
        return portion(tensor, dim, taken, total)

    @property
    def absent(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors of experts on other ranks."""
        others = (expert for expert in range(self._num_experts) if expert not in self.here)
        return tuple(name for expert in others for name in self._part_names(expert))

    def _part_names(self, expert: int) -> tuple[str, str, str]:
        gate, up, down = self._modules(expert)
        return f"{gate}.weight", f"{up}.weight", f"{down}.weight"

    def _modules(self, expert: int) -> tuple[str, str, str]:
        """Returns the checkpoint names of an expert's gate, up and down projections, without ".weight"."""
        names: ExpertNames = self._names
        one = f"{self._name}.{expert}"
        return f"{one}.{names.gate}", f"{one}.{names.up}", f"{one}.{names.down}"

    def finish(self) -> None:
        """Packs the loaded weights for the kernels and frees them."""
        self._pack(self._gate_up, self._down)
        del self._gate_up, self._down

    def _pack(self, *weights: Tensor) -> None:
        """Packs weights (and biases) for the kernels, with room for copies of other ranks' experts."""
        if self._spare:
            import torch  # lazy: families are also read without torch

            weights = tuple(torch.cat((each, each.new_zeros(self._spare, *each.shape[1:]))) for each in weights)
        self.packed = self._ops.prepare_experts(*weights, gate=self._gate)


class ScoreCorrectionBias:
    """Float32 bias of the experts' scores, used for choosing them only, to balance their load (arXiv 2408.15664)."""

    def __init__(self, name: str, num_experts: int, place: LayerPlacement) -> None:
        self._name = f"{name}.e_score_correction_bias"
        self.values: Tensor = place.empty(num_experts).float()

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield self._name, self.values

    def finish(self) -> None:
        """Does nothing: used as it is, in float32."""


def shared_expert_placement(place: LayerPlacement) -> LayerPlacement:
    """Returns the placement of a shared expert: sharded, or whole if rows are dispatched."""
    return replace(place, shard=WHOLE) if place.shard.dispatches else place


class SparseMLP:
    """Mixture-of-experts layer: weighted sum of each token's best experts, plus an optional shared expert."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        config: ExpertsConfig,
        place: LayerPlacement,
        experts: Experts | None = None,
        *,
        shared: MLP | None = None,
    ) -> None:
        """Builds router, experts and shared expert without weights.

        `name`: of the module in the checkpoint; `experts`: replaces the default layout; `shared`: a shared expert built
        elsewhere with shared_expert_placement(). Raises InvalidArgument for quantization at load.
        """
        if place.quantization != "none":
            raise InvalidArgument(
                f"quantization: {place.quantization} is supported for dense layers only, and this model has experts",
                field="quantization",
            )
        self._routing, self._ops, self._shard = config.routing, place.ops, place.shard
        self._reduce_results = True
        router = Projection(f"{name}.{config.names.router}", config.num_experts)
        self.router = Linear([router], hidden_size, config.router_bias, place)
        self.experts = experts or Experts(f"{name}.experts", hidden_size, config, place)
        self._score_bias = (
            ScoreCorrectionBias(router.name, config.num_experts, place) if config.score_correction_bias else None
        )
        self._shared = shared
        self._shared_gate: Linear | None = None
        if config.shared_intermediate_size and shared is None:
            shared_name = f"{name}.{config.names.shared}"
            size, of_shared = config.shared_intermediate_size, shared_expert_placement(place)
            self._shared = MLP(shared_name, hidden_size, size, False, of_shared, reduce_results=False)
            if config.shared_is_gated:
                self._shared_gate = Linear([Projection(f"{shared_name}_gate", 1)], hidden_size, False, place)
        # With expert parallelism.
        self.places = (
            ExpertPlacement(config.num_experts, place.shard, place.device) if place.shard.whole_experts else None
        )
        self._dispatch: ExpertDispatch | None = None
        if place.shard.dispatches:
            assert self.places is not None, "experts are whole"
            self._dispatch = ExpertDispatch(place.shard, self.places)
        # Token counts of the experts, int64 [num_experts], set by the model before the first step.
        self.load: Tensor | None = None

    @property
    def _parts(self) -> Iterator[Loadable]:
        yield self.router
        yield self.experts
        if self._score_bias is not None:
            yield self._score_bias
        if self._shared is not None:
            yield self._shared
        if self._shared_gate is not None:
            yield self._shared_gate

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        """Stacked tensors of all experts, by name, in place of one per expert."""
        return self.experts.alternatives

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer without dispatch: x [num_tokens, hidden_size] -> the same shape, all-reduced unless deferred.

        Adds the tokens of each expert to `load`.
        """
        rows, ids, weights = self._routed(x)
        shared = None if self._shared is None else self._shared_part(self._shared, x)
        gate = None if self._shared_gate is None else self._shared_gate(x)
        ids, load = self._local_ids(ids)
        output: Tensor = self._ops.experts(
            rows, ids, weights, self.experts.packed, shared, gate, load, self._expert_additions
        )
        return self._shard.collectives.all_reduce(output) if self._reduce_results else output

    def defer_all_reduce(self, *, deferred: bool = True) -> None:
        """Leaves the output a rank's partial sum (`deferred`), or makes it the whole sum again."""
        self._reduce_results = not deferred

    @property
    def dispatches(self) -> bool:
        """Whether rows are sent to the ranks of their experts; callers then use forward_dispatched()."""
        return self._dispatch is not None

    def forward_dispatched(self, attended: Tensor, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Runs attention's all-reduce, the norm and the layer, with rows dispatched to the ranks of their experts.

        attended [num_tokens, hidden_size]: this rank's partial sum of attention; `norm` accepts partial sums. Returns
        the update of the residual, including attention's sum unless it was added already. In CUDA graphs runs the norm
        and the layer without dispatch.
        """
        dispatch, num_tokens = self._dispatch, len(attended)
        assert dispatch is not None
        if not dispatch.is_supported(attended):
            return self(norm(attended, residual))
        attended = dispatch.reduce_scatter_rows(attended)
        x = norm.after_all_reduce(attended, dispatch.own(residual))
        rows, ids, weights = self._routed(x)
        choices = dispatch.gather_choices(ids, weights, num_tokens)
        places, _ = self._local_ids(choices.ids)
        added = dispatch.run_experts(rows, choices, places, self._run_experts).add_(attended)
        if self._shared is not None:
            shared = self._shared(x).float()
            added += shared if self._shared_gate is None else shared * self._shared_gate(x).float().sigmoid()
        return dispatch.all_gather_rows(added.to(x.dtype), num_tokens)

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the experts' inputs [num_tokens, hidden_size] and, [num_tokens, top_k] each, chosen experts and their
        weights."""
        bias = None if self._score_bias is None else self._score_bias.values
        return x, *self._ops.route(self.router(x), self._routing, bias)

    def _run_experts(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Runs this rank's experts on dispatched rows; `ids` are local indices."""
        output: Tensor = self._ops.experts(rows, ids, weights, self.experts.packed)
        return output

    def _shared_part(self, shared: MLP, x: Tensor) -> Tensor:
        """Returns this rank's partial sum of the shared expert: from a part of its features or, with dispatch, for its
        own rows."""
        if self._dispatch is None:
            return shared(x)
        own, part = self._dispatch.own_rows(len(x)), x.new_zeros(x.shape)
        if own:
            part[own.start : own.stop] = shared(x[own.start : own.stop])
        return part

    @property
    def _expert_additions(self) -> ExpertAdditions | None:
        """Adapter weights of the experts in the current step; None without any."""
        return None if self.experts.adapters is None else self.experts.adapters.added

    def _local_ids(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Maps expert ids to local indices (-1 for other ranks' experts); also returns the token counter that the
        kernel has to update.

        With whole experts every rank counts the tokens of all experts here and returns None for the counter.
        """
        if self.places is None:
            return ids, self.load
        if self.load is not None:
            chosen = ids.flatten().long()
            self.load.scatter_add_(0, chosen, chosen.new_ones(()).expand_as(chosen))
        return self.places.places_of(ids), None

    def run_row(self, kernels: RowKernels, residual: Tensor, norm: RMSNorm) -> None:
        """Adds the layer's output for the normalized `residual` to it in place; for steps of one token.

        Uses fused kernels, except in steps with adapters on experts.
        """
        if self._expert_additions is not None:
            residual.add_(self(norm(residual)))
            return
        logits = kernels.linear(residual, self.router, norm=norm)
        kernels.experts(residual, norm, logits, routing=self._routing, packed=self.experts.packed, load=self.load)
