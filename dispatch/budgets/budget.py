"""What follows from the limits: tokens of the largest step, rows a rank may dispatch, bytes of the exchange buffers.

Buffers are sized here, from configuration, before any step runs; no step can outgrow one by configuration
(`dispatch.budgets.capacity` refuses the configurations in which one could). Everything here is a function of the
limits and the layout, which are equal on every rank, so every value here is too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .layout import Layout
from .limits import ALL_TO_ALL_KINDS, ExpertsKind, Limits, tokens_per_request

if TYPE_CHECKING:
    # Only for annotations: the command line and the driver, which size pools and never touch a tensor, start without.
    import torch

DEFAULT_CAPACITY = 4096

_ROW_ALIGNMENT = 16


@dataclass(frozen=True)
class Bound:
    """A number of tokens or rows, and the setting that decided it; equal on every rank."""

    value: int
    term: str


@dataclass(frozen=True)
class RowFormat:
    """One token on the wire: hidden state, expert ids and routing weights, side by side in one row of bytes.

    Equal on every rank for a layer. `dtype` is that of the hidden state, `weights_dtype` of the routing weights; expert
    ids travel as int32.
    """

    hidden_size: int
    top_k: int
    dtype: "torch.dtype"
    weights_dtype: "torch.dtype"

    @property
    def ids_offset(self) -> int:
        return _align(self.hidden_size * self.dtype.itemsize)

    @property
    def weights_offset(self) -> int:
        return _align(self.ids_offset + self.top_k * 4)

    @property
    def row_bytes(self) -> int:
        return _align(self.weights_offset + self.top_k * self.weights_dtype.itemsize)

    @property
    def hidden_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


@dataclass(frozen=True)
class ExchangeBudget:
    """Rows and bytes of the exchange buffers of one rank, the same on every rank.

    Attributes:
        capacity: the most rows one rank dispatches in one step.
        send_bytes: rows on their way to the experts (`ep_size * capacity` of them in the all-to-all).
        receive_bytes: rows from all ranks, `ep_size * capacity`.
        combine_bytes: partial results on their way back, `ep_size * capacity` rows of hidden states.
    """

    capacity: int
    send_bytes: int
    receive_bytes: int
    combine_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.send_bytes + self.receive_bytes + self.combine_bytes


def largest_forward(limits: Limits) -> Bound:
    """Tokens of the largest forward of one DP rank, which CuTe DSL experts and gather buffers are made for.

    The largest of `max_prefill_tokens`, the piecewise bound where prefill graphs are on, and the larger of the graph
    batch and `max_running_requests` times tokens per request; the `cutedsl_moe_max_num_tokens` of engines.
    """
    prefill = Bound(limits.resolved_max_prefill_tokens, _max_prefill_term(limits))
    return _largest(prefill, _piecewise_bound(limits), _decode_bound(limits))


def largest_step(limits: Limits) -> Bound:
    """Tokens of the largest step that the limits let one DP rank run, padding to a graph's bucket included."""
    prefill = Bound(limits.prefill_tokens_per_step, prefill_setting(limits))
    return _largest(prefill, _piecewise_bound(limits), _decode_bound(limits))


def required_dispatch_tokens(limits: Limits, layout: Layout) -> int:
    """Rows of one rank in the largest step: a DP rank's tokens over the ranks that share it, rounded up."""
    return -(-largest_step(limits).value // layout.attn_tp_size)


def needed_capacity(limits: Limits, layout: Layout, experts: ExpertsKind = "torch") -> Bound:
    """The smallest per-rank capacity with which an all-to-all passes both checks of `dispatch.budgets.capacity`."""
    step, forward = largest_step(limits), largest_forward(limits)
    needed = [Bound(required_dispatch_tokens(limits, layout), _shared(step.term, "attn_tp_size", layout.attn_tp_size))]
    if covers_largest_forward(limits, experts):
        rows = -(-forward.value // layout.world_size)
        needed.append(Bound(rows, _shared(forward.term, "ep_size", layout.world_size)))
    return _largest(*needed)


def covers_largest_forward(limits: Limits, experts: ExpertsKind) -> bool:
    """Whether `capacity * ep_size` behind an all-to-all has to cover the largest forward.

    So it is for CuTe DSL experts, whose buffers hold that many rows, in a pool that prefills.
    """
    return experts == "cutedsl" and limits.resolved_max_prefill_tokens > 0 and limits.disaggregation_mode != "decode"


def capacity_bound(limits: Limits, layout: Layout, dispatch: str = "alltoall", experts: ExpertsKind = "torch") -> Bound:
    """Rows that one rank's share of the buffers holds; per rank, not yet multiplied by `ep_size`.

    Args:
        limits: of a step, equal on every rank.
        layout: the arrangement of ranks.
        dispatch: resolved. All-to-all: `max_dispatch_tokens_per_rank`, or the larger of 4096 and what is needed;
            exactly what is needed where paths are measured, since a capacity costs speed.
            All-gather: this rank's share of the largest forward, so that all shares together hold `dp_size` times it.
            Local: the largest forward or step, and nothing is allocated by it.
        experts: resolved; CuTe DSL experts behind an all-to-all may need more.
    """
    if dispatch in ALL_TO_ALL_KINDS:
        if limits.max_dispatch_tokens_per_rank is not None:
            return Bound(limits.max_dispatch_tokens_per_rank, "limits.max_dispatch_tokens_per_rank")
        needed = needed_capacity(limits, layout, experts)
        return needed if dispatch == "measured" else _largest(Bound(DEFAULT_CAPACITY, "the default"), needed)
    forward = largest_forward(limits)
    if dispatch == "local":
        return _largest(forward, largest_step(limits))
    share = -(-forward.value // layout.attn_tp_size)
    return Bound(share, _shared(forward.term, "attn_tp_size", layout.attn_tp_size))


def dispatch_capacity(
    limits: Limits, layout: Layout, dispatch: str = "alltoall", experts: ExpertsKind = "torch"
) -> int:
    """Rows one rank may dispatch in one step; see `capacity_bound`."""
    return capacity_bound(limits, layout, dispatch, experts).value


def exchange_budget(
    limits: Limits, layout: Layout, formats: list[RowFormat], *, capacity: int | None = None
) -> ExchangeBudget:
    """One set of buffers for all layers, sized for the largest of each (layers may differ in hidden size or top-k).

    Args:
        limits: of a step, equal on every rank.
        layout: the arrangement of ranks.
        formats: the wire format of each MoE layer.
        capacity: rows of one rank, resolved with the configuration; `None`: those of an all-to-all under these limits.
            The buffers hold `ep_size` times as many: here the factor enters, and nowhere else.
    """
    capacity = dispatch_capacity(limits, layout) if capacity is None else capacity
    rows = exchange_rows(layout, capacity)
    row_bytes = max(row_format.row_bytes for row_format in formats)
    hidden_bytes = max(row_format.hidden_bytes for row_format in formats)
    return ExchangeBudget(
        capacity=capacity,
        send_bytes=rows * row_bytes,
        receive_bytes=rows * row_bytes,
        combine_bytes=rows * hidden_bytes,
    )


def exchange_rows(layout: Layout, capacity: int) -> int:
    """Rows of an exchange buffer, and of the experts behind it: every rank's share.

    Behind an all-to-all this is `ep_size * capacity`; behind an all-gather, whose capacity is a share of the largest
    forward, it is `dp_size` times that forward, each share rounded up to whole rows.
    """
    return layout.world_size * capacity


def prefill_setting(limits: Limits) -> str:
    """The setting that bounds a prefill step."""
    return "limits.chunked_prefill_size" if limits.chunked_prefill_size else "limits.max_prefill_tokens"


def _max_prefill_term(limits: Limits) -> str:
    if limits.max_prefill_tokens is not None or not limits.chunked_prefill_size:
        return "limits.max_prefill_tokens"
    return "limits.max_prefill_tokens, by default limits.chunked_prefill_size"


def _piecewise_bound(limits: Limits) -> Bound:
    given = limits.piecewise_cuda_graph_max_tokens is not None
    term = "limits.piecewise_cuda_graph_max_tokens"
    return Bound(limits.piecewise_tokens, term if given else f"{term}, by default {prefill_setting(limits)}")


def _decode_bound(limits: Limits) -> Bound:
    width = tokens_per_request(limits)
    term = "limits.max_running_requests"
    if limits.graph_batch_size > limits.max_running_requests:
        term = "limits.cuda_graph_max_bs" if limits.cuda_graph_bs is None else "limits.cuda_graph_bs"
    per_request = f" x {width} tokens a request" if width > 1 else ""
    return Bound(limits.max_requests_per_step * width, term + per_request)


def _largest(*bounds: Bound) -> Bound:
    """The first of the largest."""
    return max(bounds, key=lambda bound: bound.value)


def _shared(term: str, name: str, size: int) -> str:
    return term if size == 1 else f"{term} / {name} {size}"
