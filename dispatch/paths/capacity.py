"""The capacity of a pool and the checks of its limits, by the names of its dispatcher and experts.

Each way says its own (`dispatch.way`); see `dispatch.budgets.capacity` for what the checks are.
"""

from ..budgets.budget import Bound, needed_rows
from ..budgets.layout import Layout
from ..budgets.limits import Limits
from ..registry import PLAIN_EXPERTS, experts_of, way_of


def capacity_bound(limits: Limits, layout: Layout, dispatch: str = "alltoall", experts: str = PLAIN_EXPERTS) -> Bound:
    """Rows that one rank's share of the buffers holds; per rank, not yet multiplied by `ep_size`.

    Args:
        limits: of a step, equal on every rank.
        layout: the arrangement of ranks.
        dispatch: resolved.
        experts: resolved; some need more behind a dispatcher that has a capacity of its own.
    """
    return way_of(dispatch).capacity_bound(limits, layout, experts_of(experts))


def dispatch_capacity(limits: Limits, layout: Layout, dispatch: str = "alltoall", experts: str = PLAIN_EXPERTS) -> int:
    """Rows one rank may dispatch in one step; see `capacity_bound`."""
    return capacity_bound(limits, layout, dispatch, experts).value


def needed_capacity(limits: Limits, layout: Layout, experts: str = PLAIN_EXPERTS) -> Bound:
    """The smallest capacity of its own with which a dispatcher passes the checks."""
    return needed_rows(limits, layout, experts_of(experts).least_capacity(limits, layout))


def budget_problems(limits: Limits, layout: Layout, dispatch: str, experts: str = PLAIN_EXPERTS) -> tuple[str, ...]:
    """What the checks find, each with what is required, what there is, and both ways out.

    Args:
        limits: of a step, equal on every rank.
        layout: the arrangement of ranks.
        dispatch: resolved: `local`, or any kind but `auto`.
        experts: resolved.
    """
    return tuple(way_of(dispatch).budget_problems(limits, layout, experts_of(experts)))
