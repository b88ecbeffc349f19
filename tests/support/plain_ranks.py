"""Ranks as plain processes: the same engine, loop and collectives as in a pool, without Ray around them.

Processes are forked from a server that has PyTorch and Transformers imported, so that a matrix of layouts costs seconds
rather than minutes. Ray actors are tested beside it, on fewer cases.
"""

import itertools
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import latent_moe  # noqa: F401  makes its family known in every rank's process
import msgspec
import torch
import torch.distributed as dist
from expert_pool.cluster.config import PoolConfig, resolve
from expert_pool.dispatch.errors import ExpertPoolError
from expert_pool.graphs.plan import plan_captures
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.mailbox import Intake
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.rank_config import RankConfig, Rendezvous
from expert_pool.workers.request import Completion, RankStats, Request, SamplingParams

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["expert_pool.workers.engine", "plain_ranks"])
DEADLINE_S = 120.0
AFTER_ERROR_S = 10.0
LOOK_S = 0.5


class PlainRanks:
    """A set of forked ranks; use it as a context manager.

    Args:
        config: as for a pool.
        prepare: called in each rank's process with the engine after loading; for tests that make a rank misbehave.
        graphs: record the planned graphs first, in the plan's order on every rank.
    """

    def __init__(self, config: PoolConfig, prepare: Callable[[RankEngine], None] | None = None, graphs: bool = False):
        self.rank_config: RankConfig = resolve(config, inspect_model(config.model, config.dtype))
        world_size = self.rank_config.layout.world_size
        self._commands = [CONTEXT.Queue() for _ in range(world_size)]
        self._reports: Any = CONTEXT.Queue()
        self.processes = [
            CONTEXT.Process(
                target=_rank_main,
                args=(self.rank_config, rank, self._commands, self._commands[rank], self._reports, prepare, graphs),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        self._keys = itertools.count()
        self._wake_epoch = 0
        self.stats: dict[int, RankStats] = {}

    def __enter__(self) -> "PlainRanks":
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._deliver({}, leave=True)
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Run the prompts, dealt out to the DP ranks in turn; completions in the prompts' order."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        dp_size = self.rank_config.layout.dp_size
        intakes: dict[int, list[Request]] = {dp_rank: [] for dp_rank in range(dp_size)}
        keys = []
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            keys.append(next(self._keys))
            intakes[index % dp_size].append(Request(keys[-1], tuple(prompt), one))
        self._deliver({dp_rank: Intake(requests=tuple(requests)) for dp_rank, requests in intakes.items()})
        finished: dict[int, Completion] = {}
        while len(finished) < len(prompts):
            completions, stats = self.next_report()
            finished |= {completion.key: completion for completion in completions}
            self.stats[stats.dp_rank] = stats
        return [finished[key] for key in keys]

    def _deliver(self, intakes: dict[int, Intake], leave: bool = False) -> None:
        self._wake_epoch += 1
        layout = self.rank_config.layout
        for rank, commands in enumerate(self._commands):
            dp_rank = layout.dp_rank(rank)
            mine = intakes.get(dp_rank, Intake()) if rank == layout.leader(dp_rank) else Intake()
            commands.put(("deliver", mine, self._wake_epoch, leave))

    def next_report(self) -> Any:
        try:
            kind, content = self._reports.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise AssertionError(f"no rank reported anything for {DEADLINE_S:g} s") from None
        if kind == "error":
            raise AssertionError(content)
        return content


class ForkedRanks:
    """Loaded ranks that wait for functions to run in them; use it as a context manager.

    Args:
        config: as for a pool.
        graphs: record the planned graphs first, in the plan's order on every rank.
        otherwise: configurations of ranks that were not given the pool's, by rank.
    """

    def __init__(self, config: PoolConfig, graphs: bool = True, otherwise: Mapping[int, RankConfig] | None = None):
        self.rank_config: RankConfig = resolve(config, inspect_model(config.model, config.dtype))
        world_size = self.rank_config.layout.world_size
        self._commands = [CONTEXT.Queue() for _ in range(world_size)]
        self._reports: Any = CONTEXT.Queue()
        self.processes = [
            CONTEXT.Process(
                target=_forked_main,
                args=(
                    (otherwise or {}).get(rank, self.rank_config),
                    rank,
                    self._commands,
                    self._commands[rank],
                    self._reports,
                    graphs,
                ),
                daemon=True,
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> "ForkedRanks":
        for process in self.processes:
            process.start()
        try:
            self._answers("starting", DEADLINE_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for commands in self._commands:
            commands.put(None)
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()

    def call(self, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
        """Run `function(engine, *args)` in every rank's process at the same time.

        Args:
            function: a top-level function of a module; what it raises on any rank is raised here.
            args: the same for all ranks.
            deadline_s: for the slowest rank; its passing means that ranks wait for each other.

        Returns:
            What it returned on each rank, in rank order; plain data rather than tensors.
        """
        for commands in self._commands:
            commands.put((function, args))
        return self._answers(function.__name__, deadline_s)

    def _answers(self, what: str, deadline_s: float) -> list[Any]:
        waiting, answers, errors = set(range(len(self.processes))), {}, []
        until = time.monotonic() + deadline_s
        while waiting:
            try:
                rank, succeeded, content = self._reports.get(timeout=LOOK_S)
            except queue.Empty:
                ended = [rank for rank in sorted(waiting) if not self.processes[rank].is_alive()]
                if not ended and time.monotonic() < until:
                    continue
                state = f"; the processes of {ended} have ended" if ended else ""
                errors.append(f"ranks {sorted(waiting)} did not finish {what}{state}")
                break
            waiting.discard(rank)
            if succeeded:
                answers[rank] = content
            else:
                errors.append(f"rank {rank}:\n{content}")
                until = min(until, time.monotonic() + AFTER_ERROR_S)
        if errors:
            raise AssertionError("\n".join(errors))
        return [answers[rank] for rank in range(len(self.processes))]


def run_on_ranks(config: PoolConfig, function: Callable[..., Any], *args: Any, graphs: bool = True) -> list[Any]:
    """What `function(engine, *args)` returns on each rank of a set started for it; see `ForkedRanks.call`."""
    with ForkedRanks(config, graphs) as rank_set:
        return rank_set.call(function, *args)


def _forked_main(
    config: RankConfig, rank: int, all_commands: list[Any], commands: Any, reports: Any, graphs: bool
) -> None:
    try:
        engine = _loaded_engine(config, rank, all_commands, commands, graphs)
    except BaseException:
        reports.put((rank, False, traceback.format_exc()))
        raise
    reports.put((rank, True, None))
    while (command := commands.get()) is not None:
        function, args = command
        try:
            reports.put((rank, True, function(engine, *args)))
        except Exception:
            reports.put((rank, False, traceback.format_exc()))


def _rank_main(
    config: RankConfig,
    rank: int,
    all_commands: list[Any],
    commands: Any,
    reports: Any,
    prepare: Callable[[RankEngine], None] | None,
    graphs: bool,
) -> None:
    import threading

    try:
        engine = _loaded_engine(config, rank, all_commands, commands, graphs)
        if prepare is not None:
            prepare(engine)
        threading.Thread(target=_receive, args=(commands, engine), daemon=True).start()
        if rank == config.layout.leader(config.layout.dp_rank(rank)):
            threading.Thread(target=_send, args=(reports, engine), daemon=True).start()
        engine.run()
    except BaseException:
        reports.put(("error", f"rank {rank}:\n{traceback.format_exc()}"))
        raise


def _loaded_engine(config: RankConfig, rank: int, all_commands: list[Any], commands: Any, graphs: bool) -> RankEngine:
    engine = RankEngine(config, rank)
    if rank == 0:
        rendezvous = engine.open_rendezvous("127.0.0.1")
        for other in all_commands[1:]:
            other.put(("join", rendezvous))
    else:
        rendezvous = _expect_rendezvous(commands)
    engine.join(rendezvous)
    engine.load()
    if graphs:
        record_all(engine)
    return engine


def record_all(engine: RankEngine) -> None:
    """Record the whole plan; all ranks do it at once, so their collectives meet."""
    plan = plan_captures(engine.config.limits)
    engine.graphs.begin()
    for entry in plan.entries:
        engine.graphs.warm_up(entry)
        engine.graphs.record(entry)
    engine.graphs.end()
    engine.graphs.commit(plan)


def _expect_rendezvous(commands: Any) -> Rendezvous:
    kept = []
    while True:
        command = commands.get(timeout=DEADLINE_S)
        if command[0] == "join":
            for other in kept:
                commands.put(other)
            return command[1]
        kept.append(command)


def _receive(commands: Any, engine: RankEngine) -> None:
    while True:
        _, intake, wake_epoch, leave = commands.get()
        engine.inbox.deliver(intake, wake_epoch, leave)


def _send(reports: Any, engine: RankEngine) -> None:
    while True:
        output = engine.outbox.next()
        reports.put(("output", (output.completions, output.stats)))


def _join_alone(config: RankConfig, rank: int, meeting: Any, reports: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    dist.set_debug_level_from_env()  # what PyTorch read before
    engine = RankEngine(config, rank)
    if rank == 0:
        rendezvous = engine.open_rendezvous("127.0.0.1")
        for _ in range(1, config.layout.world_size):
            meeting.put(rendezvous)
    else:
        rendezvous = meeting.get(timeout=DEADLINE_S)
    try:
        engine.join(rendezvous)
        total = torch.ones(1)
        dist.all_reduce(total)
        reports.put((rank, f"met {total.item():g} ranks"))
    except ExpertPoolError as error:
        reports.put((rank, f"{type(error).__name__}: {error}"))
    meeting.get(timeout=DEADLINE_S)  # what a rank that leaves does to the others is not asked here


def said_by_joining(environments: list[dict[str, str]], model: str) -> list[str]:
    """What comes of ranks that join and reduce a number, each with its own variables over those of this process.

    Returns:
        In rank order: that it met so many ranks, or the error by which it is refused.
    """
    config = resolve(PoolConfig(model=model, ranks=len(environments), weights="random"), inspect_model(model))
    meeting, reports = CONTEXT.Queue(), CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=_join_alone, args=(config, rank, meeting, reports, environment), daemon=True)
        for rank, environment in enumerate(environments)
    ]
    try:
        for process in processes:
            process.start()
        said = dict(reports.get(timeout=DEADLINE_S) for _ in processes)
        for _ in processes:
            meeting.put("leave")
        for process in processes:
            process.join(timeout=DEADLINE_S)
        return [said[rank] for rank in range(len(processes))]
    except queue.Empty:
        raise AssertionError(f"ranks waited for {DEADLINE_S:g} s, or died: {[p.exitcode for p in processes]}") from None
    finally:
        for process in processes:
            process.kill()
            process.join()


def changed(config: PoolConfig, **sections: Any) -> PoolConfig:
    return msgspec.structs.replace(config, **sections)
