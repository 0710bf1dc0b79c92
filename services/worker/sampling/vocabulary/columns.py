"""Parameters of drawing tokens: the table of filters, and columns of their values."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from quire.shared.pb.common.v1.sampling_pb2 import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenFilter:
    """Parameter of SamplingParams that drops tokens before one is drawn; `unused`: the value with which it drops none;
    `dtype`: NumPy type of its column."""

    name: str
    unused: float
    dtype: str

    def requested(self, sampling: SamplingParams) -> float:
        """Returns the value that a sequence asks for, `unused` if the field is not set."""
        value: float = getattr(sampling, self.name) if sampling.HasField(self.name) else self.unused
        return value


TOP_K = TokenFilter("top_k", 0, "int32")
TOP_P = TokenFilter("top_p", 1, "float32")
FILTERS = (TOP_K, TOP_P, TokenFilter("min_p", 0, "float32"))  # in the order of ChoiceColumns
# Filters that sort the vocabulary need more memory than any other sampling parameter.
COSTLY = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)


@dataclass(frozen=True, slots=True)
class ChoiceColumns:
    """Temperature and filter values of some rows, [num_rows] on the device, in the argument order of
    quire.kernels.reference.sample; None if no row uses one."""

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    max_kept: int = field(default=0, kw_only=True)
    """Upper bound of the tokens that a row with top_k or top_p keeps; 0: not bounded by a few."""
    all: tuple[Tensor | None, ...] = field(init=False, repr=False)  # the columns above, which every step passes on

    def __post_init__(self) -> None:
        object.__setattr__(self, "all", (self.temperature, self.top_k, self.top_p, self.min_p))

    @property
    def have_filters(self) -> bool:
        return any(column is not None for column in self.all[1:])

    def select(self, rows: Tensor | slice) -> ChoiceColumns:
        """Returns the columns of some rows; `max_kept` stays the bound over all of them."""
        columns = (None if column is None else column[rows] for column in self.all)
        return ChoiceColumns(*columns, max_kept=self.max_kept)

    def min_p_threshold(self, tops: Tensor) -> Tensor | None:
        """Returns the logits below which min_p drops tokens, [num_rows]; None if no row uses it. `tops`: [num_rows, 1],
        the largest logits."""
        return None if self.min_p is None else tops.squeeze(1) + self.min_p.log()
