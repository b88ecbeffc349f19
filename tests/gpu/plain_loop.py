"""The ranks of a pool as plain processes: their step loop without Ray around it, and their graphs in a bare loop."""

import multiprocessing
import os
import queue
import statistics
import time
import traceback
from typing import Any

import harness  # noqa: F401  makes the folder of the tests importable
import msgspec
import torch
import torch.distributed as dist
from expert_pool.graphs.plan import plan_captures
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.rank_config import RankConfig
from expert_pool.workers.request import Request, SamplingParams
from handle import graphs_of, take, take_completions, with_inbox
from harness import gpu_of, say
from rank_insides import ScriptedInbox
from step_times import HostProfile, StepTimes, middle

SETTLING_REPLAYS, REPLAYS = 3, 16
# Requests move on and hit other experts from step to step, so one step's inputs say little about a generation.
KEPT_STEPS = 8
PROMPT_TOKENS = 8


class Measured(msgspec.Struct, frozen=True):
    """Of one number of requests a rank. Milliseconds; the profile in microseconds.

    Attributes:
        requests: of each rank.
        loop_ms: median iteration of the step loop.
        bare_ms: replay of the same graph back to back: the median of several steps' inputs, each replayed many times.
        profile: mean host time by part.
    """

    requests: int
    loop_ms: float
    bare_ms: float
    profile: dict[str, float]


def prompts(count: int, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(row) for row in torch.randint(2, vocab_size, (count, PROMPT_TOKENS), generator=generator).tolist()]


def dealt(ranks: int, count: int, vocab_size: int) -> list[tuple[int, ...]]:
    """The prompts of all ranks, in turn: the pool gets what plain ranks get, so its steps hit the same experts."""
    return [
        one for row in zip(*(prompts(count, vocab_size, seed) for seed in range(ranks)), strict=True) for one in row
    ]


class PlainRanks:
    """The ranks of a configuration as plain processes, which load at once and measure once they are told to.

    Args:
        config: of every rank.
        requests: of each rank, numbers to measure one after the other.
        new_tokens: of each request.
        profile: where the host's time goes, too.
    """

    def __init__(self, config: RankConfig, requests: list[int], new_tokens: int, profile: bool):
        self._requests = requests
        context = multiprocessing.get_context("spawn")
        self._rendezvouses, self._reports, self._go = context.Queue(), context.Queue(), context.Event()
        work = (self._rendezvouses, self._reports, self._go, requests, new_tokens, profile)
        self._processes = [
            context.Process(target=_main, args=(config, rank, *work), daemon=True)
            for rank in range(config.layout.world_size)
        ]
        for process in self._processes:
            process.start()

    def measure(self, deadline_s: float) -> list[Measured]:
        """Rank 0's numbers.

        Raises:
            RuntimeError: a rank failed, or the deadline has passed.
        """
        self._go.set()
        until = time.monotonic() + deadline_s
        measured: list[Measured] = []
        while len(measured) < len(self._requests):
            try:
                kind, content = self._reports.get(timeout=1.0)
            except queue.Empty:
                ended = [rank for rank, process in enumerate(self._processes) if process.exitcode is not None]
                if ended or time.monotonic() > until:
                    raise RuntimeError(f"plain ranks: ended {ended}, or no result in {deadline_s:g} s") from None
                continue
            if kind == "failed":
                raise RuntimeError(content)
            if kind == "said":
                say(f"  {content}")
            else:
                measured.append(content)
                say(f"  plain: {content}")
        return measured

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _main(
    config: RankConfig,
    rank: int,
    rendezvouses: Any,
    reports: Any,
    go: Any,
    requests: list[int],
    new_tokens: int,
    profile: bool,
) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[gpu_of(rank)]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        engine = _loaded_engine(config, rank, rendezvouses, reports)
        go.wait()
        record_what_all_can(engine)
        for count in requests:
            result = _measure(engine, count, new_tokens, profile)
            if rank == 0:
                reports.put(("measured", result))
        dist.barrier(group=engine.joined.host_group)
        time.sleep(60)  # until it is killed: leaving in order would wait for NCCL
    except BaseException:
        reports.put(("failed", f"rank {rank}:\n{traceback.format_exc()}"))
        time.sleep(5)  # the queue's thread sends it


def _loaded_engine(config: RankConfig, rank: int, rendezvouses: Any, reports: Any) -> RankEngine:
    started = time.perf_counter()
    engine = RankEngine(config, rank)
    if rank == 0:
        rendezvous = engine.open_rendezvous("127.0.0.1")
        for _ in range(config.layout.world_size - 1):
            rendezvouses.put(rendezvous)
    else:
        rendezvous = rendezvouses.get(timeout=120)
    engine.join(rendezvous)
    engine.load()
    if rank == 0:
        reports.put(("said", f"plain ranks: loaded in {time.perf_counter() - started:.1f} s"))
    return engine


def record_what_all_can(engine: RankEngine) -> None:
    """Record the plan in its order; what one rank cannot, the others of the same make cannot either."""
    graphs, plan = engine.graphs, plan_captures(engine.config.limits)
    plan = plan.without({entry for entry, _ in graphs.agree(plan).refused})
    graphs.begin()
    for entry in plan.entries:
        graphs.warm_up(entry)
        graphs.record(entry)
    graphs.end()
    graphs.commit(plan)


def _measure(engine: RankEngine, count: int, new_tokens: int, profile: bool) -> Measured:
    """Collective over all ranks: the loop, then the same again with a profile, then the graph alone."""
    kept = KeptInputs(engine, new_tokens)
    times = StepTimes(engine)
    run_loop(engine, count, new_tokens)
    seconds = times.stop()
    kept.stop()
    parts: dict[str, float] = {}
    if profile:
        host_profile = HostProfile(engine)
        run_loop(engine, count, new_tokens)
        parts = host_profile.stop()
    return Measured(count, middle(seconds), _bare_ms(engine, kept), parts)


def run_loop(engine: RankEngine, count: int, new_tokens: int) -> None:
    """All requests arrive at the first iteration; the loop ends when every rank is idle."""
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    own = prompts(count, engine.config.spec.vocab_size, seed=engine.rank)
    requests = [Request(1000 * engine.rank + index, prompt, sampling) for index, prompt in enumerate(own)]
    with with_inbox(engine, ScriptedInbox({0: requests})):
        engine.loaded.loop.run()
    finished = take_completions(engine)
    lengths = {completion.num_completion_tokens for completion in finished}
    assert len(finished) == count, f"{len(finished)} of {count} requests finished"
    assert lengths == {new_tokens}, lengths


class KeptInputs:
    """Keeps the inputs of several decode steps of a generation, as their graph took them.

    Args:
        engine: of this rank.
        new_tokens: of each request, and so about the number of decode steps.
    """

    def __init__(self, engine: RankEngine, new_tokens: int):
        self._runner = engine.graphs.runners["decode"]
        self._replay = self._runner.replay
        self._every = max(1, (new_tokens - 2) // KEPT_STEPS)
        self._seen = 0
        self.steps: list[tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
        self._runner.replay = self._keep  # type: ignore[method-assign]

    def _keep(self, entry: Any, values: Any, num_due: int, on_host: Any = None) -> Any:
        self._seen += 1
        if self._seen % self._every == 0 and len(self.steps) < KEPT_STEPS:
            on_device = {name: tensor.clone() for name, tensor in values.items()}
            self.steps.append(
                (entry, on_device, {name: tensor.clone() for name, tensor in (on_host or values).items()})
            )
        return self._replay(entry, values, num_due, on_host)

    def stop(self) -> None:
        self._runner.replay = self._replay  # type: ignore[method-assign]
        assert self.steps, "no decode step replayed a graph"


def _copies(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@torch.inference_mode()
def _bare_ms(engine: RankEngine, kept: KeptInputs) -> float:
    """Milliseconds of a replay: on GPUs by events around all replays of one step's inputs."""
    runner, times = engine.graphs.runners["decode"], []
    for entry, values, on_host in kept.steps:
        take(runner, entry, values, on_host)
        graph = graphs_of(runner)[entry]
        for _ in range(SETTLING_REPLAYS):
            graph.replay()
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=engine.joined.host_group)
        times.append(replays_ms(graph, engine.device))
    return statistics.median(times)


def replays_ms(graph: Any, device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        return 1e3 * (time.perf_counter() - started) / REPLAYS
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS
