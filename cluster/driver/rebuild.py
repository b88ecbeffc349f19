"""What is to be done so that ranks run: in a first start, after a failure, for another size, off a node that goes.

These differ by the values here alone; `Lifecycle.rebuilding` carries each of them out.
"""

import dataclasses
from collections.abc import AsyncIterator, Callable

from ...dispatch.errors import ExpertPoolError, RankError
from ...workers.rank_config import RankConfig
from ..ranks.placement import Placement
from .states import Recovering, Resizing, State


@dataclasses.dataclass(frozen=True)
class Rebuild:
    """One set of ranks takes the place of another, or of none.

    Attributes:
        state: what the pool is until they run; a first start goes on to others.
        doing: what it is, for the message of a bug.
        places: finds places for them; yields what is being waited for.
        says: a line before anything happens, if there is one.
        is_first: whether nothing has worked before: then only a process that was lost is reason to begin again.
        ranks_leave: whether those that run leave at a step boundary and say all that they have to say; else they are
            ended, if there are any.
        reserve: places that are held for it until no rank is left.
        pause_s: before places are looked for.
        size_before: what to go back to where another size has no places, or does not come up.
        given_up: the size that had places and did not come up, and why; it is tried again where this one has none.
    """

    state: State
    doing: str
    places: Callable[[], AsyncIterator[str]]
    says: str = ""
    is_first: bool = False
    ranks_leave: bool = False
    reserve: Placement | None = None
    pause_s: float = 0.0
    size_before: RankConfig | None = None
    given_up: tuple[RankConfig, ExpertPoolError] | None = None

    def back(
        self, places: Callable[[], AsyncIterator[str]], error: ExpertPoolError, begun: RankConfig | None
    ) -> "Rebuild":
        """From another size to the one before.

        Args:
            places: for that.
            error: why.
            begun: the other size, where its ranks had places.
        """
        assert self.size_before is not None
        ranks = self.size_before.layout.world_size
        says = f"the other size did not start, going back to {ranks} ranks: {error}" if begun else ""
        given_up = None if begun is None else (begun, error)
        return Rebuild(Resizing(ranks, str(error)), self.doing, places, says, given_up=given_up)

    def error_of(self, bug: BaseException) -> ExpertPoolError:
        """What to say of an error that nobody foresaw."""
        what = str(bug) if self.is_first else f"{type(bug).__name__}: {bug}"
        cause = self.state.cause if isinstance(self.state, Recovering) else None
        return RankError(f"{self.doing} failed: {what}" + (f"; it followed: {cause}" if cause else ""))
