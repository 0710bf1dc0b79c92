"""Routing and experts on the compiled library. Meaning, shapes and dtypes: kernels/reference/experts.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels import reference
from quire.kernels.cpu.functions import aligned, dense
from quire.kernels.cpu.native import DTYPES, LIBRARY, calls
from quire.kernels.reference.experts import ExpertsWeight
from quire.kernels.reference.low_rank import ExpertAdditions
from quire.kernels.routing import MOST_EXPERTS, SILU, Gate, Routing

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Expert weights in tiles (linear.h), with the arguments of the call precomputed."""

    dtype: torch.dtype
    code: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gate: Gate
    gate_up: int
    gate_up_bias: int | None
    down: int
    down_bias: int | None
    owners: tuple[Tensor | None, ...]  # keep the memory of the pointers alive

    @property
    def by_expert(self) -> tuple[Tensor, ...]:
        """Weights by expert as in quire.kernels.reference.ExpertsWeight; tiles as bytes."""
        kept = (owner for owner in self.owners if owner is not None)
        return tuple(owner.view(self.num_experts, -1) for owner in kept)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Routes logits [num_tokens, num_experts] to int32 experts and float32 weights, [num_tokens, top_k] each, best
    first. Other dtypes use the reference."""
    code = DTYPES.get(logits.dtype)
    if code is None:
        return reference.route(logits, routing, bias)
    rows, num_experts = logits.shape
    assert num_experts <= MOST_EXPERTS
    assert dense(logits)
    assert bias is None or (bias.dtype is torch.float32 and bias.is_contiguous())
    ids = calls.empty(rows, routing.top_k, dtype=torch.int32)
    weights = calls.empty(rows, routing.top_k, dtype=torch.float32)
    calls.route(
        code,
        rows,
        num_experts,
        routing.top_k,
        routing.scoring == "sigmoid",
        routing.renormalize,
        routing.scale,
        routing.num_groups,
        routing.top_groups,
        routing.group_top,
        logits.data_ptr(),
        None if bias is None else bias.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
    )
    return ids, weights


def prepare_experts(
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate: Gate = SILU,
) -> PackedExperts | ExpertsWeight:
    """Packs gate_up [num_experts, 2 * intermediate_size, hidden_size] and down [num_experts, hidden_size,
    intermediate_size] into tiles, copying them. Other dtypes use the reference's weight."""
    code = DTYPES.get(gate_up.dtype)
    if code is None:
        return reference.prepare_experts(gate_up, down, gate_up_bias, down_bias, gate)
    num_experts, hidden_size, intermediate_size = down.shape
    assert num_experts <= MOST_EXPERTS
    assert gate_up.shape == (num_experts, 2 * intermediate_size, hidden_size)
    biases = [None if bias is None else bias.detach().contiguous() for bias in (gate_up_bias, down_bias)]
    (first, memory), (second, more) = _packed(code, gate_up), _packed(code, down)
    pointers = [None if bias is None else bias.data_ptr() for bias in biases]
    owners = (memory, more, *biases)
    return PackedExperts(
        gate_up.dtype, code, num_experts, hidden_size, intermediate_size, gate, first, pointers[0], second, pointers[1],
        owners,
    )  # fmt: skip


def _packed(code: int, weights: Tensor) -> tuple[int, Tensor]:
    """Returns the address of the first expert's tiles, and the memory that contains them."""
    num_experts, out_features, in_features = weights.shape
    each = LIBRARY.quire_packed_bytes(code, out_features, in_features)
    memory = aligned(num_experts * each)
    start = memory.data_ptr()
    LIBRARY.quire_prefer_huge_pages(start, num_experts * each)
    for expert, weight in enumerate(weights.detach()):
        LIBRARY.quire_pack_weight(
            code, out_features, in_features, weight.contiguous().data_ptr(), start + expert * each
        )
    return start, memory


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: PackedExperts | ExpertsWeight,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    load: Tensor | None = None,
    added: ExpertAdditions | None = None,
) -> Tensor:
    """Computes each token's weighted sum of its experts' outputs, [num_tokens, hidden_size] -> the same shape, and adds
    to `load`, as the reference does. Tensors are dense."""
    if type(packed) is not PackedExperts:
        return reference.experts(x, ids, weights, packed, shared, shared_gate, load, added)
    rows, hidden_size = x.shape
    assert x.dtype is packed.dtype
    assert hidden_size == packed.hidden_size
    assert ids.dtype is torch.int32
    assert weights.dtype is torch.float32
    assert load is None or load.dtype is torch.int64
    for beside in (shared, shared_gate):
        assert beside is None or (beside.dtype is x.dtype and beside.is_contiguous())
    assert dense(x, ids, weights)
    out = calls.empty(rows, hidden_size, dtype=x.dtype)
    calls.experts(
        packed.code,
        rows,
        hidden_size,
        packed.intermediate_size,
        packed.num_experts,
        ids.size(1),
        packed.gate.limit,
        packed.gate.alpha,
        x.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        packed.gate_up,
        packed.gate_up_bias,
        packed.down,
        packed.down_bias,
        None if shared is None else shared.data_ptr(),
        None if shared_gate is None else shared_gate.data_ptr(),
        None if load is None else load.data_ptr(),
        *_addresses(added, packed),
        out.data_ptr(),
    )
    return out


def _addresses(added: ExpertAdditions | None, packed: PackedExperts) -> tuple[int | None, ...]:
    """Returns the addresses of both tables and of the rows' count, tokens and adapters."""
    if added is None:
        return (None,) * 5
    assert not packed.gate.limit
    pairs, hidden, size = added.rows.num_adapters * packed.num_experts, packed.hidden_size, packed.intermediate_size
    for weights, sizes in ((added.gate_up, (hidden, 2 * size)), (added.down, (size, hidden))):
        assert weights.dtype is packed.dtype
        assert (len(weights.table), weights.in_features, weights.out_features) == (pairs, *sizes)
    rows, tables = added.rows, (added.gate_up.table.data_ptr(), added.down.table.data_ptr())
    return *tables, rows.count.data_ptr(), rows.tokens.data_ptr(), rows.numbers.data_ptr()
