"""Whether ranks have read the weights that the pool began with. A request that is resumed, or a caller that asks again,
would otherwise go on with another model, and nothing would say so.

Ranks that load are compared in full. Before ranks leave for others, a sample of what is on their disks now says cheaply
whether the others would pass.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...dispatch.errors import CheckpointError, GeometryError, RankError
from ...workers.rank import RankPlace
from ...workers.rank_config import SUMS_MODULO, LoadReport
from ..ranks.failure import answer_of
from ..ray_session.ray_internals import forget_of_this_actor, keep_for_this_actor, kept_for_this_actor

logger = logging.getLogger(__name__)

_LISTED = 5
# Shorter than it takes to find that a rank is frozen.
_LOOK_S = 3.0


class WeightsRecord:
    """What the weight files of a pool held when its first ranks had loaded them.

    Ray keeps it as well: a driver that is started anew has the arguments of the first, and not its memory.

    Args:
        path: the model folder.
    """

    def __init__(self, path: str):
        self._path = path
        self._held: Mapping[str, str] | None = None
        self._on_disk: str | None = None

    async def require_same(self, loads: Sequence[LoadReport]) -> None:
        """Of the first ranks that load, take down what they have read; compare what later ones have with it.

        Args:
            loads: of all ranks, in rank order; with `weights: random` there is nothing to compare.

        Raises:
            GeometryError: ranks have read different values under one name.
            CheckpointError: other weights than the first ranks'; names the files.
        """
        if not loads[0].files:
            return
        now = held_by_files(self._path, loads)
        if self._held is None:
            kept = await asyncio.to_thread(kept_for_this_actor)
            self._held = None if kept is None else msgspec.json.decode(kept, type=dict[str, str])
        if self._held is None:
            await asyncio.to_thread(keep_for_this_actor, msgspec.json.encode(now))
            self._held = now
        require_same_files(self._path, self._held, now)

    async def look_at_disk(self, actors: Sequence[Any], places: Sequence[RankPlace]) -> None:
        """Ranks have just loaded, all of them the same: take down a sample of the files that they have read."""
        self._on_disk = await _on_disk(actors[0], places[0]) if self._held is not None else None

    async def require_same_on_disk(self, actors: Sequence[Any], places: Sequence[RankPlace]) -> None:
        """Have one rank of each node look at the files again. A few kilobytes of each are compared: what passes here
        is compared in full once it is loaded.

        Raises:
            CheckpointError: they are others than those that ranks have loaded, or cannot be read.
        """
        if self._on_disk is None:
            return
        asked = list({place.node_id: place for place in reversed(places)}.values())
        answers = await asyncio.gather(*(_on_disk(actors[place.rank], place) for place in asked))
        for place, now in zip(asked, answers, strict=True):
            if now not in (self._on_disk, None):
                raise CheckpointError(
                    f"model={self._path!r}: weights were replaced since the pool began, as rank {place.rank} on "
                    f"{place.address} finds them ({self._on_disk}, now {now}): put the files back, or launch the pool "
                    "anew; it goes on as before"
                )

    async def forget(self) -> None:
        """The pool is shut down. One that has failed keeps it, since Ray may start its driver anew."""
        await asyncio.to_thread(forget_of_this_actor)


async def _on_disk(actor: Any, place: RankPlace) -> str | None:
    """What a rank finds; `None` where it does not say in time, which is for others to look into."""
    try:
        call = actor.weights_on_disk.remote()
        return await answer_of(place.rank, call, "while looking at the weight files", _LOOK_S, (place,))
    except RankError as error:
        logger.warning("%s", error)
        return None


def held_by_files(path: str, loads: Sequence[LoadReport]) -> dict[str, str]:
    """One number for what each weight file holds, by name; the same for any number of ranks.

    Args:
        path: the model folder, for the message.
        loads: of all ranks, in rank order.

    Raises:
        GeometryError: ranks have read different values where all read the same part.
    """
    dense: dict[str, dict[str, list[int]]] = {}
    sums: dict[str, int] = {}
    for load in loads:
        for file in load.files:
            dense.setdefault(file.name, {}).setdefault(file.dense, []).append(load.rank)
            sums[file.name] = sums.get(file.name, 0) + int(file.experts, 16)
    for name, holders in dense.items():
        if len(holders) > 1:
            listed = "; ".join(f"{value[:16]}: ranks {ranks}" for value, ranks in holders.items())
            raise GeometryError(
                f"ranks disagree before a step: what {name} of model={path!r} holds differs ({listed}): "
                "have one model folder on all nodes"
            )
    return {
        name: f"{(total + int(next(iter(dense[name])), 16)) % SUMS_MODULO:032x}"[:16] for name, total in sums.items()
    }


def require_same_files(path: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """
    Raises:
        CheckpointError: a file holds other weights than before, or is not read any more, or newly read.
    """
    others = [
        f"{name} ({before.get(name, 'not read')}, now {now.get(name, 'not read')})"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if others:
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        raise CheckpointError(
            f"model={path!r}: weights were replaced since the pool began: {', '.join(others[:_LISTED])}{more}; its "
            "requests would go on with another model: put the files back, or launch the pool anew"
        )
