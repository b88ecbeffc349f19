"""How long the iterations of a rank's step loop take: from a pool's trace, or from inside a plain process."""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import harness  # noqa: F401  makes the folder of the tests importable
import msgspec
from expert_pool.workers.observing.trace import RankTrace
from handle import graphs_of, model_of, replaced, step_parts_of, with_model, with_run_step

HOST_STAGES = ("schedule", "agree", "launch", "resolve")


class StepTimes:
    """Notes when each iteration launched a step, until `stop`.

    Args:
        engine: of this rank.
    """

    def __init__(self, engine: Any):
        self._noted: list[tuple[float, str | None]] = []
        self._noting = with_run_step(engine, self._note)
        self._noting.__enter__()

    def _note(self, run: Callable[..., None], batch: Any, plan: Any, started: float, *rest: Any) -> None:
        graph = plan.graph if plan.geometry is not None and not plan.leave else None
        self._noted.append((started, None if graph is None else f"{graph.kind}{graph.bucket}"))
        run(batch, plan, started, *rest)

    def stop(self) -> list[float]:
        """Seconds from one replayed decode step to the next, of those that follow one another."""
        self._noting.__exit__(None, None, None)
        pairs = zip(self._noted, self._noted[1:], strict=False)
        return [later - now for (now, graph), (later, following) in pairs if graph is not None and graph == following]


class TracedSteps(msgspec.Struct, frozen=True):
    """Medians over one rank's replayed decode steps that follow one another, in milliseconds.

    Attributes:
        num_steps: of them.
        step_ms: from one launch to the next.
        agree_ms: the agreement, waiting for later ranks included.
        host_ms: all that the host does for a step: scheduling, agreement, launch, taking the tokens in.
    """

    num_steps: int
    step_ms: float
    agree_ms: float
    host_ms: float


def traced_steps(trace: RankTrace, since: float) -> TracedSteps:
    """Of the decode steps that were launched after `since`, on the clock of the trace.

    Raises:
        RuntimeError: no two of them follow one another with the same graph.
    """
    stages: dict[int, dict[str, float]] = {}
    launched: list[tuple[int, float, str]] = []
    for event in trace.events:
        stages.setdefault(event.step, {})[event.stage] = event.ended - event.began
        if event.stage == "launch" and event.began > since and (event.graph or "").startswith("decode["):
            launched.append((event.step, event.began, event.graph or ""))
    launched.sort()
    pairs = [
        (step, later - began)
        for (step, began, graph), (following, later, other) in pairwise(launched)
        if following == step + 1 and graph == other
    ]
    if not pairs:
        raise RuntimeError(f"rank {trace.rank}: no replayed decode steps among {len(stages)} in its trace")
    steps = [step for step, _ in pairs][2:] or [step for step, _ in pairs]
    on_host = [sum(stages[step].get(name, 0.0) for name in HOST_STAGES) for step in steps]
    return TracedSteps(
        num_steps=len(pairs),
        step_ms=middle([seconds for _, seconds in pairs]),
        agree_ms=1e3 * statistics.median(stages[step]["agree"] for step in steps),
        host_ms=1e3 * statistics.median(on_host),
    )


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
        from expert_pool.workers.executor import SampledRows
        from expert_pool.workers.scheduling.inputs import PackedStep

        runner = engine.graphs.runners["decode"]
        self.seconds: dict[str, list[float]] = {}
        self._wrapped = ExitStack()
        for label, (owner, name) in step_parts_of(engine).items():
            self._wrap(owner, name, label)
        self._wrap(executor_module, "pack", "pack")
        self._wrap(PackedStep, "on", "to device")
        self._wrap(runner.buffers, "fill", "fill buffers")
        self._wrapped.enter_context(with_model(runner, prepare=self._timed(model_of(runner).prepare, "plan attention")))
        for graph in graphs_of(runner).values():
            self._wrap(graph, "replay", "replay")
        self._wrap(SampledRows, "wait", "wait for rows")

    def _wrap(self, owner: Any, name: str, label: str) -> None:
        self._wrapped.enter_context(replaced(owner, name, self._timed(getattr(owner, name), label)))

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        times = self.seconds.setdefault(label, [])

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                times.append(time.perf_counter() - started)

        return timed

    def stop(self) -> dict[str, float]:
        """Mean microseconds of a call by part, the slowest and fastest tenth left out."""
        self._wrapped.close()
        return {label: _trimmed(times) * 1e6 for label, times in self.seconds.items() if times}


def _trimmed(times: list[float]) -> float:
    cut = len(times) // 10
    kept = sorted(times)[cut : len(times) - cut] or times
    return sum(kept) / len(kept)
