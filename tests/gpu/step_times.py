"""How long the iterations of a rank's step loop take, seen from inside it; works in an actor and in a plain process."""

import statistics
import time
from collections.abc import Callable
from typing import Any


class StepTimes:
    """Notes when each iteration launched a step, until `stop`.

    Args:
        engine: of this rank.
    """

    def __init__(self, engine: Any):
        self._loop = engine._loop
        self._run_step = self._loop._run_step
        self._noted: list[tuple[float, str | None]] = []
        self._loop._run_step = self._note

    def _note(self, batch: Any, plan: Any, started: float) -> None:
        graph = plan.graph if plan.geometry is not None and not plan.leave else None
        self._noted.append((started, None if graph is None else f"{graph.kind}{graph.bucket}"))
        self._run_step(batch, plan, started)

    def stop(self) -> list[float]:
        """Seconds from one replayed decode step to the next, of those that follow one another."""
        self._loop._run_step = self._run_step
        pairs = zip(self._noted, self._noted[1:], strict=False)
        return [later - now for (now, graph), (later, following) in pairs if graph is not None and graph == following]


def begin_times(engine: Any) -> None:
    engine.step_times = StepTimes(engine)


def end_times(engine: Any) -> list[float]:
    return engine.step_times.stop()


def middle(seconds: list[float]) -> float:
    """The median in milliseconds, of all but the first two: buffers and clocks settle."""
    return 1e3 * statistics.median(seconds[2:] or seconds or [float("nan")])


class HostProfile:
    """Mean time of each part of a replayed decode step on the host, by wrapping the methods of live objects.

    Args:
        engine: of this rank.
    """

    def __init__(self, engine: Any):
        from expert_pool.workers import executor as executor_module
        from expert_pool.workers.executor import SampledTokens
        from expert_pool.workers.inputs import PackedStep

        loop, graphs = engine._loop, engine.graphs
        executor, runner = loop._executor, graphs.runners["decode"]
        attention = executor._model.attention
        self.seconds: dict[str, list[float]] = {}
        self._undo: list[Callable[[], None]] = []
        self._wrap(loop._scheduler, "schedule", "schedule")
        self._wrap(loop._state, "digest", "state digest")
        self._wrap(loop._agreement, "agree", "agree")
        self._wrap(executor._counts, "fill", "counts")
        self._wrap(executor_module, "pack", "pack")
        self._wrap(PackedStep, "on", "to device")
        self._wrap(runner.buffers, "fill", "fill buffers")
        self._wrap(runner, "_prepare", "plan attention")
        for name, label in (("_wait_for_last_plan", "  of it waiting for the last"), ("_pages", "  of it page table")):
            if hasattr(attention, name):  # FlashInfer's
                self._wrap(attention, name, label)
        for graph in runner._graphs.values():
            self._wrap(graph, "replay", "replay")
        self._wrap(executor, "_sample", "sample")
        self._wrap(executor, "run", "launch, all of it")
        self._wrap(loop._scheduler, "launch", "count launched")
        self._wrap(SampledTokens, "wait", "wait for tokens")
        self._wrap(loop._scheduler, "resolve", "resolve")
        self._wrap(loop, "_hand_out", "hand out")

    def _wrap(self, owner: Any, name: str, label: str) -> None:
        function, own = getattr(owner, name), name in vars(owner)
        times = self.seconds.setdefault(label, [])

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                times.append(time.perf_counter() - started)

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, function) if own else delattr(owner, name))

    def stop(self) -> dict[str, float]:
        """Mean microseconds of a call by part, the slowest and fastest tenth left out."""
        while self._undo:
            self._undo.pop()()
        return {label: _trimmed(times) * 1e6 for label, times in self.seconds.items() if times}


def _trimmed(times: list[float]) -> float:
    cut = len(times) // 10
    kept = sorted(times)[cut : len(times) - cut] or times
    return sum(kept) / len(kept)
