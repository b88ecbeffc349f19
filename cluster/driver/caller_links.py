"""How a driver learns that a process is gone that it works for.

Ray goes on with a streaming call whose caller has died, and an actor that outlives its creator is told nothing. But a
wait for an object fails within about a second of the death of the process that owns the object. So a caller owns an
object that never comes, the result of `hold`, and the driver waits for it.
"""

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError

_UNSTARTED_S = 60.0


@dataclass(frozen=True)
class CallerLink:
    """What a caller sends of itself.

    Attributes:
        key: of the call that the object comes from.
        refs: the object, in a list: Ray then passes it on as it is, and does not wait for its value.
    """

    key: str
    refs: list[Any]


def link_to(driver: Any) -> CallerLink:
    """A link from this process to a driver actor; held for as long as the driver does not drop it."""
    key = uuid.uuid4().hex
    return CallerLink(key, [driver.hold.remote(key)])


def lasting_link_to(driver: Any) -> CallerLink:
    """One that lasts as long as this process, also where Ray starts the driver anew: it then asks to be held again."""
    key = uuid.uuid4().hex
    return CallerLink(key, [driver.hold.options(max_task_retries=-1).remote(key)])


class CallerLinks:
    """The driver's end of all links."""

    def __init__(self) -> None:
        self._dropped: dict[str, asyncio.Event] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def hold(self, key: str) -> None:
        """Returns once the link is dropped: until then, its result is what the caller owns."""
        await self._dropped.setdefault(key, asyncio.Event()).wait()
        self._dropped.pop(key, None)

    def when_gone(self, link: CallerLink, act: Callable[[], Awaitable[None] | None], or_cut_off: bool = False) -> None:
        """Act once the process that owns the link is gone, unless it is dropped before.

        Args:
            link: of that process.
            act: what to do then.
            or_cut_off: act also when that process takes the driver for gone, which it then asks anew.
        """
        signs = (ObjectLostError, RayActorError) if or_cut_off else (ObjectLostError,)

        async def watch() -> None:
            try:
                await link.refs[0]
            except signs:
                if (acting := act()) is not None:
                    await acting

        self._watches[link.key] = asyncio.ensure_future(watch())

    def drop(self, link: CallerLink) -> None:
        """Nobody is to watch it, or go on watching it; to be called once."""
        if (watch := self._watches.pop(link.key, None)) is not None:
            watch.cancel()
        self._dropped.setdefault(link.key, asyncio.Event()).set()


def end_unless_started(is_started: Callable[[], bool]) -> None:
    """End this actor for good if its creator died before it could call anything: nobody knows of it then."""
    this = ray.get_runtime_context().current_actor

    def check() -> None:
        if not is_started():
            ray.kill(this)

    timer = threading.Timer(_UNSTARTED_S, check)
    timer.daemon = True
    timer.start()
