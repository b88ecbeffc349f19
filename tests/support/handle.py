"""The one place where tests reach into private parts of the product: what is renamed there is followed here alone.

`in_driver` and `in_rank` run a function inside the actors of a pool, with what the actor is around; the other functions
take that apart, there or in a plain rank. Parts that a test replaces are put back by whoever replaced them.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from expert_pool.dispatch.budgets.geometry import StepGeometry
from expert_pool.graphs.lockstep import LockstepRank
from expert_pool.graphs.plan import CaptureEntry
from expert_pool.graphs.runner import GraphModel, GraphRunner
from expert_pool.graphs.static import StaticBuffers
from expert_pool.workers.agreement import Agreement, StateReader
from expert_pool.workers.attention.kv_cache import BlockAllocator, KvCache
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.executor import StepExecutor
from expert_pool.workers.mailbox import Inbox
from expert_pool.workers.model.target import TargetModel
from expert_pool.workers.request import Completion, RankStats
from expert_pool.workers.scheduling.scheduler import Scheduler
from expert_pool.workers.scheduling.sequence import TokenSequence


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object, for as long as the context is open."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


# A pool, and what its driver actor holds.


def driver_of(pool: Any) -> Any:
    """The driver actor of a pool."""
    return pool._driver


def pool_label_of(pool: Any) -> str:
    """What tells this pool from others in metrics and logs."""
    return driver_of(pool)._actor_id.hex()[:8]


def in_driver(pool: Any, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(driver, *args)` returns in the pool's driver actor."""
    from expert_pool.cluster.driver.handle import get_answer

    _send_by_value(function)
    return get_answer(driver_of(pool).__ray_call__.remote(function, *args))


def actors_of(pool: Any) -> list[Any]:
    """The actors of the present ranks."""
    return in_driver(pool, lambda driver: driver._rank_set.actors)


def in_ranks(pool: Any, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(engine, *args)` returns in the actors of these ranks, at the same time."""
    from expert_pool.cluster.driver.handle import get_answer

    _send_by_value(function)
    actors = actors_of(pool)
    calls = [actors[rank].__ray_call__.remote(lambda actor: function(actor._engine, *args)) for rank in ranks]
    return [get_answer(call) for call in calls]


def in_rank(pool: Any, rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(engine, *args)` returns in the actor of this rank."""
    [answer] = in_ranks(pool, [rank], function, *args)
    return answer


def pool_ranks_of(driver: Any) -> Any:
    """The driver's ranks through the pool's life."""
    return driver._life.pool_ranks


def metrics_of(driver: Any) -> Any:
    """What the driver reports to Ray."""
    return driver._life._metrics


def note_losses(rank_set: Any, failures: Mapping[int, BaseException]) -> None:
    """As where calls of these ranks have failed."""
    rank_set._note_losses(failures)


def metric_objects_of(metrics: Any) -> dict[str, Any]:
    """What is registered with Ray, by name."""
    return metrics._metrics


def write_trace(pool: Any, trace: Any, console: Any) -> None:
    """As at the end of a run of the command line."""
    from expert_pool.cluster.cli.commands import _Run

    _Run([], "", "", console, False, trace)._write_trace(pool, trace)


def _send_by_value(function: Callable[..., Any]) -> None:
    """Actors do not see the folders of the tests."""
    import ray

    for name in (__name__, function.__module__):
        if not name.startswith(("expert_pool.", "builtins")):
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])


# A rank, and what its engine holds.


def executor_of(engine: RankEngine) -> StepExecutor:
    return engine.loaded.loop._executor


def scheduler_of(engine: RankEngine) -> Scheduler:
    return engine.loaded.loop._scheduler


@contextmanager
def noting_preemptions(engine: RankEngine) -> Iterator[list[bool]]:
    """Of each request that gives way meanwhile, whether it was in the middle of its prompt."""
    scheduler, noted = scheduler_of(engine), []
    preempt = scheduler._preempt

    def note(sequence: TokenSequence) -> None:
        noted.append(sequence.is_prefilling and sequence.num_computed > 0)
        preempt(sequence)

    with replaced(scheduler, "_preempt", note):
        yield noted


def allocator_of(engine: RankEngine) -> BlockAllocator:
    return scheduler_of(engine)._allocator


def agreement_of(engine: RankEngine) -> Agreement:
    return engine.loaded.loop._agreement


def state_of(engine: RankEngine) -> StateReader:
    """What the rank reads of itself for every agreement."""
    return engine.loaded.loop._state


def with_state(engine: RankEngine, state: StateReader) -> AbstractContextManager[None]:
    return replaced(engine.loaded.loop, "_state", state)


def with_inbox(engine: RankEngine, inbox: Inbox) -> AbstractContextManager[None]:
    return replaced(engine.loaded.loop, "_inbox", inbox)


def take_completions(engine: RankEngine) -> list[Completion]:
    """What the rank has finished, which it then no longer hands out."""
    completions = engine.outbox._completions
    taken = list(completions)
    completions.clear()
    return taken


def stats_of(engine: RankEngine) -> RankStats:
    """The counters that the rank reported last."""
    return engine.outbox._stats


def target_of(engine: RankEngine) -> TargetModel:
    return executor_of(engine)._model


def exchange_of(engine: RankEngine) -> Any:
    return target_of(engine)._exchange


def path_of(engine: RankEngine) -> Any:
    return exchange_of(engine).path


def dispatcher_of(engine: RankEngine) -> Any:
    return path_of(engine).dispatcher


def collectives_of(engine: RankEngine) -> Any:
    return exchange_of(engine).collectives


def group_of(engine: RankEngine, name: str) -> Any:
    """A process group of the rank's collectives."""
    return collectives_of(engine)._groups[name]


def store_of(engine: RankEngine) -> Any:
    """The rendezvous' store as PyTorch has it, without the seal around it."""
    return engine._store._store


def with_draws(draw: Callable[..., torch.Tensor]) -> AbstractContextManager[None]:
    """The sampler calls `draw(drawn, logits_MV, sequences)`, where `drawn` is what it would have called."""
    from expert_pool.workers.scheduling import sampler

    drawn = sampler._draw
    return replaced(sampler, "_draw", lambda *arguments: draw(drawn, *arguments))


def change_logits(engine: RankEngine, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Between the forward and the sampler, also where a graph has found the greedy tokens already."""
    executor = executor_of(engine)
    logits = executor._logits

    def changed(*step: Any) -> tuple[torch.Tensor, None]:
        return change(logits(*step)[0]), None

    executor._logits = changed  # type: ignore[method-assign]


def cached_tensors(cache: KvCache) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of a cache, a layer each."""
    return list(cache._keys), list(cache._values)


# Graphs of a rank.


def tensors_of(buffers: StaticBuffers) -> dict[str, torch.Tensor]:
    """Static buffers by name, whole."""
    return buffers._tensors


def with_tensors(buffers: StaticBuffers, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
    return replaced(buffers, "_tensors", dict(tensors))


def model_of(runner: GraphRunner) -> GraphModel:
    return runner._model


def with_model(runner: GraphRunner, **changes: Any) -> AbstractContextManager[None]:
    """The runner runs another step, or another part of it."""
    return replaced(runner, "_model", dataclasses.replace(model_of(runner), **changes))


def another_runner(runner: GraphRunner, kind: Any, **changes: Any) -> GraphRunner:
    """A second one over the same exchange."""
    return GraphRunner(kind, dataclasses.replace(model_of(runner), **changes), runner._exchange, runner.backend)


def take(runner: GraphRunner, entry: CaptureEntry, *inputs: Any) -> None:
    """As before a replay: copy the inputs in and pad them."""
    runner._take(runner._recordings[entry], *inputs)


def run_padded(
    runner: GraphRunner, entry: CaptureEntry, values: Mapping[str, torch.Tensor], num_due: int
) -> torch.Tensor:
    """The step of a graph with its padding, run directly; what a replay must equal to the bit."""
    take(runner, entry, values)
    recording = runner._recordings[entry]
    return runner._model.step(recording.views, recording.geometry, entry)[:num_due]


def graphs_of(runner: GraphRunner) -> dict[CaptureEntry, Any]:
    """What is replayed, by entry."""
    return {entry: recording.graph for entry, recording in runner._recordings.items()}


def recorded_of(graphs: LockstepRank) -> Mapping[CaptureEntry, Any]:
    """What each recording froze."""
    return graphs._recorded


def with_means(graphs: LockstepRank, change: Callable[[CaptureEntry, str | None], str | None]) -> Any:
    """Whether this rank can record an entry is said otherwise: `change(entry, reason)` of what it would say."""
    can_record = graphs._can_record
    return replaced(graphs, "_can_record", lambda entry: change(entry, can_record(entry)))


def geometry_of(geometry: StepGeometry, num_tokens_per_dp_rank: tuple[int, ...], mode: Any) -> StepGeometry:
    """A captured step of other counts, which no rank would make by itself."""
    return StepGeometry._build(geometry.layout, num_tokens_per_dp_rank, mode, True, geometry.capacity)


# Steps of a rank's loop, for what measures them.


def with_run_step(engine: RankEngine, run_step: Callable[..., None]) -> AbstractContextManager[None]:
    """Each iteration calls `run_step(run, batch, plan, started, *rest)`, where `run` is what it would have called."""
    loop = engine.loaded.loop
    run = loop._run_step
    return replaced(loop, "_run_step", lambda *arguments: run_step(run, *arguments))


def step_parts_of(engine: RankEngine) -> dict[str, tuple[Any, str]]:
    """Where each part of a step is done on the host: object and method. FlashInfer's alone are not always there."""
    loop, executor, attention = engine.loaded.loop, executor_of(engine), target_of(engine).attention
    parts: dict[str, tuple[Any, str]] = {
        "schedule": (loop._scheduler, "schedule"),
        "agree": (loop._agreement, "agree"),
        "  of agreeing, own state": (loop._state, "read"),
        "  of planning, waiting for the last plan": (attention, "_wait_for_last_plan"),
        "  of planning, page table": (attention, "_pages"),
        "sample": (executor, "_sample"),
        "launch, all of it": (executor, "run"),
        "count launched": (loop._scheduler, "launch"),
        "resolve": (loop._scheduler, "resolve"),
        "hand out": (loop._reporter, "hand_out"),
    }
    return {label: part for label, part in parts.items() if part[0] is not attention or hasattr(*part)}


# Ways to the experts.


def choice_built(choice: Any, names: Sequence[Any], layers: Sequence[Any]) -> tuple[list[Any], Mapping[str, Any]]:
    """What a selection makes of these paths, and what it has dropped by then."""
    return choice._build(tuple(names), layers), choice._dropped


def with_dispatchers(make: Callable[..., Any]) -> AbstractContextManager[None]:
    """Every maker of paths calls `make(made, maker, kind)`, where `made` is what it would have called."""
    from expert_pool.workers.path_selection.selection import PathMaker

    made = PathMaker._dispatcher
    return replaced(PathMaker, "_dispatcher", lambda maker, kind: make(made, maker, kind))


def bound_of_one_row() -> float:
    """By how much more than all of them one row may differ, as `PathCheck` has it."""
    from expert_pool.workers.path_selection import check

    return check._OF_ONE_ROW


def keep_registries(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """What is registered from now on goes when `set_attribute` (of pytest's monkeypatch) is undone."""
    from expert_pool.dispatch import registry
    from expert_pool.workers.attention import registry as attentions
    from expert_pool.workers.model.formats import registry as formats

    for known in (attentions._known, formats._known, registry.dispatch_names):
        known()
    kept = ((registry, "_ways"), (registry, "_experts"), (registry, "_plugged_in"))
    for module, name in (*kept, (attentions, "_ways"), (formats, "_formats")):
        set_attribute(module, name, dict(getattr(module, name)))


def attentions_known() -> dict[str, Any]:
    """By their kinds."""
    from expert_pool.workers.attention import registry

    return registry._ways


def layers_of(kernels: Any) -> list[Any]:
    """What mega kernels have adopted."""
    return list(kernels._layers.values())


def workspaces_of(kernels: Any) -> dict[Any, Any]:
    """Of mega kernels."""
    return kernels._workspaces


def links_of(dispatcher: Any) -> list[Any]:
    """Of FlashInfer's all-to-all."""
    return list(dispatcher._links.values())


def words_of(link: Any, name: str, count: int) -> list[int]:
    """Flags in this rank's part of a link's workspace."""
    offset = int(link.metainfo[getattr(link._index, f"{name}_OFFSET_INDEX")])
    return link._rank_bytes[offset : offset + 4 * count].view(torch.int32).cpu().tolist()


def tile_tables_of(backend: Any) -> dict[str, Any]:
    """Of experts over sorted pairs: the tiles that they have taken, by the shape of layers."""
    return dict(backend._tables)


def grouped_gemms_of(backend: Any, layer: Any, x: torch.Tensor) -> tuple[Any, Any, Any]:
    """Of QuACK's experts: views for these rows, and both GEMMs of a layer as calls without arguments."""
    from expert_pool.dispatch.experts.pairs.tuned_experts import Routed

    known = backend._layers[layer.index]
    views = backend._buffers.views(known.shape, x.shape[0])
    up, down = backend._tables[known.key].tiles_for(x.shape[0])
    none = torch.empty(0)  # the GEMMs read rows and views alone
    routed = Routed(x, none, none, 0, views, none)
    return views, lambda: backend._gate_up(known, routed, up), lambda: backend._down(known, routed, down)
