"""The checks of a pool's limits against its buffers, made before anything starts.

- Wherever a dispatcher has a capacity of its own, whatever the experts: that capacity covers the largest step.
- What the experts behind it need beside that, they check themselves (`way.ExpertsWay.budget_problems`).

They see the limits as a whole, speculation and defaults resolved, so the order in which settings were given is of no
effect; and they are functions of values equal on every rank, so what they refuse is refused everywhere alike. A
capacity that was not set passes them always.
"""

from .budget import Bound, largest_step, needed_rows, own_capacity, prefill_setting, required_dispatch_tokens
from .layout import Layout
from .limits import Limits
from .step_kinds import tokens_per_request

CAPACITY_VARIABLE = "EXPERT_POOL_MAX_DISPATCH_TOKENS_PER_RANK"


def capacity_problem(limits: Limits, layout: Layout, at_least: Bound | None) -> str | None:
    """Why a capacity is below the rows of the largest step, with what is required, what there is, and both ways out.

    Args:
        limits: of a step, equal on every rank.
        layout: the arrangement of ranks.
        at_least: what the experts behind need beside that, if anything.
    """
    capacity = own_capacity(limits, layout, at_least).value
    required, step = required_dispatch_tokens(limits, layout), largest_step(limits)
    if capacity >= required:
        return None
    share = f" over attn_tp_size={layout.attn_tp_size} ranks" if layout.attn_tp_size > 1 else ""
    lower = settings_to_lower(
        limits, capacity * layout.attn_tp_size, limits.prefill_tokens_per_step, prefill_setting(limits)
    )
    return (
        f"limits.max_dispatch_tokens_per_rank={capacity} is below the {required} rows that a rank dispatches in the "
        f"largest step, {step.value} tokens ({step.term}){share}: "
        f"{raise_to(needed_rows(limits, layout, at_least))}, or lower {lower}"
    )


def raise_to(needed: Bound) -> str:
    """The way out that keeps the limits."""
    return f"set limits.max_dispatch_tokens_per_rank (or {CAPACITY_VARIABLE}) to {needed.value} or more"


def settings_to_lower(limits: Limits, allowed: int, prefill_tokens: int, prefill: str) -> str:
    """All settings that put a step above `allowed` tokens of a DP rank, with the value that no longer does."""
    lowered = []
    if prefill_tokens > allowed:
        lowered.append(f"{prefill} to {allowed}")
    if limits.piecewise_tokens > allowed:
        given = limits.piecewise_cuda_graph_max_tokens is not None
        setting = "limits.piecewise_cuda_graph_max_tokens" if given else prefill_setting(limits)
        lowered.append(f"{setting} to {allowed}")
    width = tokens_per_request(limits)
    if width > allowed:
        lowered.append(f"the {width} tokens a request of limits.speculative_algorithm to {allowed}")
    batch = max(1, allowed // width)
    if limits.max_running_requests > batch:
        lowered.append(f"limits.max_running_requests to {batch}")
    # A graph batch that was not set follows max_running_requests down.
    if limits.graph_batch_size > batch and limits.cuda_graph_bs is not None:
        lowered.append(f"limits.cuda_graph_bs to sizes of at most {batch}")
    elif limits.graph_batch_size > batch and limits.cuda_graph_max_bs is not None:
        lowered.append(f"limits.cuda_graph_max_bs to {batch}")
    return " and ".join(dict.fromkeys(lowered))
