"""Ways in which one rank comes to disagree with the others, or ends; each is undone when its context is left.

They change live objects inside the rank's process: what the protocol then reports and does is its own.
"""

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from expert_pool.dispatch.budgets.geometry import PaddingMode, StepGeometry
from expert_pool.dispatch.dispatchers.exchange import ExchangeBuffers
from expert_pool.graphs.plan import CaptureEntry, CapturePlan
from expert_pool.workers.agreement import StateReader
from expert_pool.workers.engine import RankEngine
from handle import (
    collectives_of,
    dispatcher_of,
    executor_of,
    geometry_of,
    model_of,
    path_of,
    replaced,
    tensors_of,
    with_means,
    with_model,
    with_state,
    with_tensors,
)

Fault = Callable[..., AbstractContextManager[None]]
OTHER_BACKEND = "another backend"
OTHER_TABLE = "all layers to 16: another path"
OTHER_SCALE = 0.25
INJECTED = "injected failure"


@contextmanager
def rehearses_other_entries(engine: RankEngine, change: Callable[[CaptureEntry], CaptureEntry]) -> Iterator[None]:
    rehearse = engine.graphs.rehearse

    def changed(plan: CapturePlan) -> Any:
        return rehearse(CapturePlan(tuple(change(entry) for entry in plan.entries)))

    with replaced(engine.graphs, "rehearse", changed):
        yield


def other_bucket(engine: RankEngine) -> AbstractContextManager[None]:
    def change(entry: CaptureEntry) -> CaptureEntry:
        return msgspec.structs.replace(entry, bucket=1) if entry == CaptureEntry("decode", 2) else entry

    return rehearses_other_entries(engine, change)


def other_tokens_per_request(engine: RankEngine) -> AbstractContextManager[None]:
    def change(entry: CaptureEntry) -> CaptureEntry:
        return msgspec.structs.replace(entry, tokens_per_request=2) if entry == CaptureEntry("decode", 1) else entry

    return rehearses_other_entries(engine, change)


@contextmanager
def other_geometry(engine: RankEngine, change: Callable[[StepGeometry], StepGeometry]) -> Iterator[None]:
    runner = engine.graphs.runners["decode"]
    geometry = runner.geometry
    with replaced(runner, "geometry", lambda entry: change(geometry(entry))):
        yield


def other_count(engine: RankEngine, dp_rank: int) -> AbstractContextManager[None]:
    """One more token for this DP rank."""

    def change(geometry: StepGeometry) -> StepGeometry:
        counts = list(geometry.num_tokens_per_dp_rank)
        counts[dp_rank] += 1
        return geometry_of(geometry, tuple(counts), PaddingMode.MAX_LEN)

    return other_geometry(engine, change)


def other_padding_mode(engine: RankEngine) -> AbstractContextManager[None]:
    return other_geometry(engine, lambda geometry: dataclasses.replace(geometry, padding_mode=PaddingMode.SUM_LEN))


def other_capacity(engine: RankEngine) -> AbstractContextManager[None]:
    """Buffers as large as before, made for one row less."""
    dispatcher = dispatcher_of(engine)
    budget = dispatcher.buffers.budget
    smaller = ExchangeBuffers(dataclasses.replace(budget, capacity=budget.capacity - 1), torch.device("cpu"))
    return replaced(dispatcher, "buffers", smaller)


def holds_otherwise(engine: RankEngine, **changes: Any) -> AbstractContextManager[None]:
    """What this rank reads of its way to the experts is something else."""
    path = path_of(engine)
    held = msgspec.structs.replace(path.held, **changes)
    if "held" in vars(path):
        return replaced(path, "held", held)
    return replaced(type(path), "held", property(lambda _: held))


def other_facts(engine: RankEngine, changes: dict[str, Any]) -> AbstractContextManager[None]:
    """Whatever the dispatcher, its capacity, experts or scales are read as others; as JSON has them."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    return holds_otherwise(engine, **values)


def other_dispatcher(engine: RankEngine) -> AbstractContextManager[None]:
    return replaced(dispatcher_of(engine), "name", "another dispatcher")


def other_expert_backend(engine: RankEngine) -> AbstractContextManager[None]:
    return replaced(path_of(engine).experts, "name", OTHER_BACKEND)


def other_table(engine: RankEngine) -> AbstractContextManager[None]:
    return holds_otherwise(engine, tuning=OTHER_TABLE)


def other_fp8_scale(engine: RankEngine) -> AbstractContextManager[None]:
    """A scale that this rank would decode its peers' rows with, and they theirs without."""
    return holds_otherwise(engine, quantisation_scales=(OTHER_SCALE,))


def other_buffer_shape(engine: RankEngine) -> AbstractContextManager[None]:
    """Block tables with one more column."""
    buffers = engine.graphs.runners["decode"].buffers
    tables = tensors_of(buffers)["block_tables"]
    wider = torch.cat([tables, tables[:, :1]], dim=1)
    return with_tensors(buffers, {**tensors_of(buffers), "block_tables": wider})


@contextmanager
def swapped_collectives(engine: RankEngine) -> Iterator[None]:
    """The first all-gather of a step is issued after the all-to-all that follows it."""
    collectives = collectives_of(engine)
    all_gather, all_to_all, held = collectives.all_gather, collectives.all_to_all, []

    def hold(*call: Any) -> None:
        held.append(call)

    def release(*call: Any) -> None:
        all_to_all(*call)
        while held:
            all_gather(*held.pop())

    with replaced(collectives, "all_gather", hold), replaced(collectives, "all_to_all", release):
        yield


@contextmanager
def one_collective_more(engine: RankEngine) -> Iterator[None]:
    runner, collectives = engine.graphs.runners["decode"], collectives_of(engine)
    step, world_size = model_of(runner).step, engine.config.layout.world_size

    def with_another(*arguments: Any) -> torch.Tensor:
        output = step(*arguments)
        collectives.all_gather("ep", torch.zeros(world_size, 7), torch.zeros(1, 7))
        return output

    with with_model(runner, step=with_another):
        yield


@contextmanager
def capture_mode_left_on(engine: RankEngine) -> Iterator[None]:
    engine.graphs.capture_depth += 1
    yield
    engine.graphs.capture_depth = 0


@contextmanager
def capture_mode_entered_twice(engine: RankEngine) -> Iterator[None]:
    """After the rehearsal, so that only the recording shows it."""
    begin, graphs = engine.graphs.begin, engine.graphs

    def begin_twice() -> None:
        graphs.capture_depth += 1
        begin()

    with replaced(engine.graphs, "begin", begin_twice):
        yield


@contextmanager
def other_plan(engine: RankEngine) -> Iterator[None]:
    agree = engine.graphs.agree
    with replaced(engine.graphs, "agree", lambda plan: agree(plan.without({plan.entries[0]}))):
        yield


def cannot_record(engine: RankEngine, entry: CaptureEntry | str, reason: str) -> AbstractContextManager[None]:
    return with_means(engine.graphs, lambda one, said: reason if str(one) == str(entry) else said)


@contextmanager
def other_committed_graphs(engine: RankEngine) -> Iterator[None]:
    committed = engine.graphs.committed
    engine.graphs.commit_plan(committed.without({committed.entries[-1]}))
    yield
    engine.graphs.commit_plan(committed)


def other_config(engine: RankEngine) -> AbstractContextManager[None]:
    limits = msgspec.structs.replace(
        engine.config.limits, max_running_requests=engine.config.limits.max_running_requests + 1
    )
    config = msgspec.structs.replace(engine.config, limits=limits)
    return with_state(engine, StateReader(config, path_of(engine), engine.loaded.layers, engine.graphs))


@contextmanager
def ends_inside(engine: RankEngine, stage: str, by: str) -> Iterator[None]:
    """The rank ends in the middle of a stage's first step, when the others are in its first all-to-all or past it.

    Args:
        engine: of this rank.
        stage: `rehearse`, `warm_up` or `record`, or `step` for one of a running pool.
        by: `raising` or `dying`.
    """
    collectives = collectives_of(engine)
    owner, name = (executor_of(engine), "run") if stage == "step" else (engine.graphs, stage)
    run, all_to_all = getattr(owner, name), collectives.all_to_all
    inside = [False]

    def run_stage(*arguments: Any) -> Any:
        inside[0] = True
        try:
            return run(*arguments)
        finally:
            inside[0] = False

    def end(*call: Any) -> None:
        if inside[0] and by == "dying":
            os.kill(os.getpid(), signal.SIGKILL)
        if inside[0]:
            raise RuntimeError(INJECTED)
        all_to_all(*call)

    with replaced(owner, name, run_stage), replaced(collectives, "all_to_all", end):
        yield


@contextmanager
def ends_at_step(engine: RankEngine, kind: str, number: int, by: str, stamp: str) -> Iterator[None]:
    """The rank ends inside a layer of a later step, when the others are in its first all-to-all or past it.

    Args:
        engine: of this rank.
        kind: of the step, `PREFILL` or `DECODE`, as any DP rank runs it.
        number: which of the steps of this kind from now on, from 1.
        by: `raising`, `dying` or `stopping`.
        stamp: file that gets the time when it happens.
    """
    collectives, executor = collectives_of(engine), executor_of(engine)
    run, all_to_all = executor.run, collectives.all_to_all
    steps, inside = [0], [False]

    def run_step(batch: Any, plan: Any) -> Any:
        steps[0] += any(one.name == kind for one in plan.kinds)
        inside[0] = steps[0] == number
        return run(batch, plan)

    def end(*call: Any) -> None:
        if inside[0]:
            _end_now(by, stamp)
        all_to_all(*call)

    with replaced(executor, "run", run_step), replaced(collectives, "all_to_all", end):
        yield


@contextmanager
def dies_recording(engine: RankEngine, number: int, stamp: str) -> Iterator[None]:
    """The rank dies inside the recording of a graph, when the others are in its first all-to-all or past it.

    Args:
        engine: of this rank.
        number: which of the graphs that are recorded from now on, from 1.
        stamp: file that gets the time when it happens.
    """
    collectives, graphs = collectives_of(engine), engine.graphs
    record, all_to_all = graphs.record, collectives.all_to_all
    recorded, inside = [0], [False]

    def record_one(*arguments: Any) -> Any:
        recorded[0] += 1
        inside[0] = recorded[0] == number
        return record(*arguments)

    def end(*call: Any) -> None:
        if inside[0]:
            _end_now("dying", stamp)
        all_to_all(*call)

    with replaced(graphs, "record", record_one), replaced(collectives, "all_to_all", end):
        yield


def _end_now(by: str, stamp: str) -> None:
    """The process of this rank ends (`dying`), stops (`stopping`) or raises (`raising`); the file gets the time."""
    with open(stamp, "w") as file:
        file.write(str(time.time()))
    if by == "raising":
        raise RuntimeError(INJECTED)
    os.kill(os.getpid(), signal.SIGKILL if by == "dying" else signal.SIGSTOP)


def agrees_late(engine: RankEngine, stamp: str, seconds: float) -> AbstractContextManager[None]:
    """The rank takes so long to say that it can record the plan; the file is there once it was asked."""
    agree = engine.graphs.agree

    def late(plan: CapturePlan) -> Any:
        Path(stamp).touch()
        time.sleep(seconds)
        return agree(plan)

    return replaced(engine.graphs, "agree", late)


def hangs_inside(engine: RankEngine, stage: str, seconds: float) -> AbstractContextManager[None]:
    """The rank does not come back from this call of the capture protocol, and so answers no other."""
    return replaced(engine.graphs, stage, lambda *_: time.sleep(seconds))


def inject(engine: RankEngine, fault: Fault, *args: Any) -> None:
    """Open a fault and keep it open, until `undo`; for calls from outside the rank's process."""
    engine.open_fault = fault(engine, *args)
    engine.open_fault.__enter__()


def undo(engine: RankEngine) -> None:
    engine.open_fault.__exit__(None, None, None)
