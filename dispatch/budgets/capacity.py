"""The checks of a pool's limits against its buffers, made before anything starts.

- Wherever an all-to-all is chosen, whatever the experts: its capacity covers the largest step.
- With CuTe DSL experts behind it, in a pool that prefills: `capacity * ep_size` covers the largest forward.
- With an all-gather: no step exceeds the largest forward, which its buffers are made for.

They see the limits as a whole, speculation and defaults resolved, so the order in which settings were given is of no
effect; and they are functions of values equal on every rank, so what they refuse is refused everywhere alike. A
capacity that was not set passes them always.
"""

from .budget import (
    capacity_bound,
    covers_largest_forward,
    largest_forward,
    largest_step,
    needed_capacity,
    prefill_setting,
    required_dispatch_tokens,
)
from .layout import Layout
from .limits import ALL_TO_ALL_KINDS, ExpertsKind, Limits, tokens_per_request

CAPACITY_VARIABLE = "EXPERT_POOL_MAX_DISPATCH_TOKENS_PER_RANK"


def budget_problems(limits: Limits, layout: Layout, dispatch: str, experts: ExpertsKind = "torch") -> tuple[str, ...]:
    """What the checks find, each with what is required, what there is, and both ways out.

    Args:
        limits: of a step, equal on every rank.
        layout: the arrangement of ranks.
        dispatch: resolved: `local`, or any kind but `auto`.
        experts: resolved: `torch` or `cutedsl`.
    """
    if dispatch in ALL_TO_ALL_KINDS:
        found = (_capacity_problem(limits, layout, experts), _cutedsl_problem(limits, layout, experts))
        return tuple(problem for problem in found if problem is not None)
    problem = _allgather_problem(limits, layout) if dispatch == "allgather" else None
    return () if problem is None else (problem,)


def _capacity_problem(limits: Limits, layout: Layout, experts: ExpertsKind) -> str | None:
    capacity = capacity_bound(limits, layout, "alltoall", experts).value
    required, step = required_dispatch_tokens(limits, layout), largest_step(limits)
    if capacity >= required:
        return None
    share = f" over attn_tp_size={layout.attn_tp_size} ranks" if layout.attn_tp_size > 1 else ""
    lower = _settings_to_lower(
        limits, capacity * layout.attn_tp_size, limits.prefill_tokens_per_step, prefill_setting(limits)
    )
    return (
        f"limits.max_dispatch_tokens_per_rank={capacity} is below the {required} rows that a rank dispatches in the "
        f"largest step, {step.value} tokens ({step.term}){share}: "
        f"{_raise_to(limits, layout, experts)}, or lower {lower}"
    )


def _cutedsl_problem(limits: Limits, layout: Layout, experts: ExpertsKind) -> str | None:
    capacity = capacity_bound(limits, layout, "alltoall", experts).value
    forward, rows = largest_forward(limits), capacity * layout.world_size
    if not covers_largest_forward(limits, experts) or rows >= forward.value:
        return None
    follows = limits.max_prefill_tokens is None
    setting = prefill_setting(limits) if follows else "limits.max_prefill_tokens"
    lower = _settings_to_lower(limits, rows, limits.resolved_max_prefill_tokens, setting)
    return (
        f"limits.max_dispatch_tokens_per_rank={capacity} x ep_size {layout.world_size} = {rows} rows of CuTe DSL "
        f"experts are below the {forward.value} tokens of the largest forward ({forward.term}): "
        f"{_raise_to(limits, layout, experts)}, or lower {lower}"
    )


def _allgather_problem(limits: Limits, layout: Layout) -> str | None:
    step, forward = largest_step(limits), largest_forward(limits)
    if step.value <= forward.value:
        return None
    # Both hold the same graph and decode terms, so what exceeds is the prefill step, and chunking is on.
    return (
        f"a step may hold {step.value} tokens of a batch ({step.term}), above the largest forward of {forward.value} "
        f"({forward.term}) that the all-gather buffers hold for each of {layout.dp_size} batches: set "
        f"limits.max_prefill_tokens to {step.value} or more, or limits.chunked_prefill_size to {forward.value} or less"
    )


def _raise_to(limits: Limits, layout: Layout, experts: ExpertsKind) -> str:
    smallest = needed_capacity(limits, layout, experts).value
    return f"set limits.max_dispatch_tokens_per_rank (or {CAPACITY_VARIABLE}) to {smallest} or more"


def _settings_to_lower(limits: Limits, allowed: int, prefill_tokens: int, prefill: str) -> str:
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
