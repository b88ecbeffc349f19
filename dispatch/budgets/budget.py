"""What follows from the limits: tokens of the largest step, rows a rank may dispatch, bytes of the exchange buffers.

Buffers are sized here, from configuration, before any step runs; no step can outgrow one by configuration
(`dispatch.budgets.capacity` refuses the configurations in which one could). Everything here is a function of the
limits and the layout, which are equal on every rank, so every value here is too.
"""

from dataclasses import dataclass

from ..dtypes import dtype_bytes
from .layout import Layout
from .limits import Limits
from .step_kinds import tokens_per_request

DEFAULT_CAPACITY = 4096
CAPACITY_SETTING = "limits.max_dispatch_tokens_per_rank"

_ROW_ALIGNMENT = 16


@dataclass(frozen=True)
class Bound:
    """A number of tokens or rows, and the setting that decided it; equal on every rank."""

    value: int
    term: str


@dataclass(frozen=True)
class RowFormat:
    """One token on the wire: hidden state, expert ids and routing weights, side by side in one row of bytes.

    Equal on every rank for a layer. `dtype` is that of the hidden state, `weights_dtype` of the routing weights, as
    PyTorch names them; expert ids travel as int32.
    """

    hidden_size: int
    top_k: int
    dtype: str
    weights_dtype: str

    @property
    def ids_offset(self) -> int:
        return _align(self.hidden_bytes)

    @property
    def weights_offset(self) -> int:
        return _align(self.ids_offset + self.top_k * 4)

    @property
    def row_bytes(self) -> int:
        return _align(self.weights_offset + self.weights_bytes)

    @property
    def weights_bytes(self) -> int:
        return self.top_k * dtype_bytes(self.weights_dtype)

    @property
    def hidden_bytes(self) -> int:
        return self.hidden_size * dtype_bytes(self.dtype)


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
    return largest_of(prefill, _piecewise_bound(limits), _decode_bound(limits))


def largest_step(limits: Limits) -> Bound:
    """Tokens of the largest step that the limits let one DP rank run, padding to a graph's bucket included."""
    prefill = Bound(limits.prefill_tokens_per_step, prefill_setting(limits))
    return largest_of(prefill, _piecewise_bound(limits), _decode_bound(limits))


def required_dispatch_tokens(limits: Limits, layout: Layout) -> int:
    """Rows of one rank in the largest step: a DP rank's tokens over the ranks that share it, rounded up."""
    return -(-largest_step(limits).value // layout.attn_tp_size)


def needed_rows(limits: Limits, layout: Layout, at_least: Bound | None = None) -> Bound:
    """The smallest per-rank capacity that holds every step.

    Args:
        limits: of a step, equal on every rank.
        layout: the arrangement of ranks.
        at_least: what the experts behind need beside that, if anything.
    """
    term = shared_term(largest_step(limits).term, "attn_tp_size", layout.attn_tp_size)
    needed = Bound(required_dispatch_tokens(limits, layout), term)
    return needed if at_least is None else largest_of(needed, at_least)


def own_capacity(
    limits: Limits, layout: Layout, at_least: Bound | None = None, default: int = DEFAULT_CAPACITY
) -> Bound:
    """Rows that one rank's share of a workspace holds which has a capacity of its own; not multiplied by `ep_size`.

    Args:
        limits, layout, at_least: see `needed_rows`.
        default: what is taken where `max_dispatch_tokens_per_rank` is not set, unless more is needed.
    """
    if limits.max_dispatch_tokens_per_rank is not None:
        return Bound(limits.max_dispatch_tokens_per_rank, CAPACITY_SETTING)
    return largest_of(Bound(default, "the default"), needed_rows(limits, layout, at_least))


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
    capacity = own_capacity(limits, layout).value if capacity is None else capacity
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


def largest_of(*bounds: Bound) -> Bound:
    """The first of the largest."""
    return max(bounds, key=lambda bound: bound.value)


def shared_term(term: str, name: str, size: int) -> str:
    """The term of a bound that ranks have a share of each."""
    return term if size == 1 else f"{term} / {name} {size}"
