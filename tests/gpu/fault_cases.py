"""The cases of check_faults.py: each takes a pool, makes one of its ranks fail, and asserts what everyone is told."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness  # noqa: F401  makes the folder of the tests importable
import msgspec
import psutil
from check_pool import agreement, reference
from expert_pool.cluster import ExpertPool, GeometryError, PoolConfig, RankError, SamplingParams
from expert_pool.cluster.cli.plan_report import plan_pool
from expert_pool.cluster.driver.handle import get_answer, named_driver
from fault_insides import disagree_at_next_step, outputs_are_kept
from faults_at_start import PLUGIN, want
from handle import in_ranks

SAID_WITHIN_S = 15.0
GONE_WITHIN_S = 20.0
NOTICED_WITHIN_S = 8.0
FIRST_TOKENS = 24
# A request that is prefilled anew rounds otherwise in bf16, so its tokens are held to Transformers, as all others are.
AGREES_WITHIN = 0.01

DISAGREEMENTS: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "bucket": ("other_bucket", (), "bucket differs"),
    "capacity": ("other_facts", ({"capacity": 77},), "capacity differs"),
    "expert backend": ("other_facts", ({"expert_backend": "another"},), "expert_backend differs"),
    "fp8 scale": ("other_facts", ({"quantisation_scales": (0.25,)},), "quantisation_scales[0] differs"),
}
RUNNING = {"graphs": "graphs.entries", "backend": "expert_backend differs", "step": "step differs"}


@dataclass
class Work:
    """What a pool generates in these cases: a few prompts on every rank, most of them long.

    Args:
        ranks: of the pool.
        new_tokens: of the long ones.
        path: of the model.
        dtype: of the pool.
        device: where Transformers runs.

    Attributes:
        tokens: of an undisturbed pool.
        repeated: the share of them that it repeats.
        agrees: the share that Transformers finds most likely.
    """

    ranks: int
    new_tokens: int
    path: str
    dtype: str
    device: str
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    repeated: float = 0.0
    agrees: float = 0.0

    @property
    def prompts(self) -> list[list[int]]:
        return [[5 + 7 * index, 17, 42 + index] for index in range(4 * self.ranks)]

    def stream(self, pool: ExpertPool, new_tokens: int | None = None) -> Iterator[Any]:
        """The first prompt is short: when it has come back, steps replay."""
        lengths = [1 if index == 0 else new_tokens or self.new_tokens for index in range(4 * self.ranks)]
        return pool.generate(self.prompts, [SamplingParams(max_new_tokens=one, ignore_eos=True) for one in lengths])

    def run(self, pool: ExpertPool) -> list[tuple[int, ...]]:
        return in_order(list(self.stream(pool)))

    def remember(self, pool: ExpertPool) -> None:
        self.tokens = self.run(pool)
        self.repeated = share_alike(self.tokens, self.run(pool))
        self.agrees = self._agreement(self.tokens)

    def compare_start(self, pool: ExpertPool, remarks: list[str]) -> None:
        """Of the same generation, the first tokens."""
        started = in_order(list(self.stream(pool, FIRST_TOKENS)))
        self.compare(started, remarks, [one[:FIRST_TOKENS] for one in self.tokens])

    def compare(
        self, tokens: list[tuple[int, ...]], remarks: list[str], undisturbed: list[tuple[int, ...]] | None = None
    ) -> None:
        expected = undisturbed or self.tokens
        assert [len(one) for one in tokens] == [len(one) for one in expected], "requests ended early"
        alike = share_alike(tokens, expected)
        if alike < 1:
            agrees = self._agreement(tokens)
            remarks.append(f"{alike:.3f} of the tokens as undisturbed; agreement {agrees:.4f}, then {self.agrees:.4f}")
            assert agrees >= self.agrees - AGREES_WITHIN, f"agreement {agrees:.4f}, undisturbed {self.agrees:.4f}"
        else:
            remarks.append("same tokens")

    def _agreement(self, tokens: list[tuple[int, ...]]) -> float:
        return agreement(reference(self.path, self.dtype, self.device), self.prompts, dict(enumerate(tokens)))


def in_order(completions: Sequence[Any]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in sorted(completions, key=lambda one: one.index)]


def share_alike(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> float:
    pairs = [pair for one, other in zip(first, second, strict=True) for pair in zip(one, other, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)


def plan_holds(remarks: list[str], pool: ExpertPool, config: PoolConfig) -> None:
    """H10: the bytes that `plan` prints are those that ranks hold."""
    plan = plan_pool(config)
    # Of dispatch and experts' buffers, the experts' weights not among them.
    held = plan.num_bytes("dispatch: ") + plan.num_bytes("experts: ")
    for load in pool.status().loads:
        assert load.kv_cache_bytes == plan.num_bytes("KV cache"), (load, plan.buffers)
        if config.dispatch == "mega":
            assert load.exchange_bytes >= held
        else:
            assert load.exchange_bytes == held, f"rank {load.rank} holds {load.exchange_bytes:,}, planned {held:,}"
    kernel = pool.status().loads[0].exchange_bytes - held
    remarks.append(f"KV {plan.num_bytes('KV cache'):,}, exchange {held:,}" + (f", kernel {kernel:,}" if kernel else ""))


def memory_pools_are_apart(remarks: list[str], pool: ExpertPool) -> None:
    """H13: graphs of a second memory pool leave the first as they were."""
    found = in_ranks(pool, _all_ranks(pool), outputs_are_kept)
    assert not any(found), found


def capture_disagrees(
    remarks: list[str], config: PoolConfig, faults: Path, hear: Callable[[str], None], what: str, faulty: int
) -> None:
    """One rank of a pool that starts would record something else: the pool is refused, and no process is left."""
    fault, args, sentence = DISAGREEMENTS[what]
    name, lines = f"disagreeing-{what.replace(' ', '-')}", [(0.0, "")]
    processes: list[psutil.Process] = []

    def on_line(line: str) -> None:
        hear(line)
        if line.startswith("loading"):
            places = get_answer(named_driver(name).status.remote()).places
            processes.extend(psutil.Process(place.pid) for place in places)
        lines.append((time.monotonic(), line))

    want(faults, [faulty], fault, *args)
    try:
        ExpertPool.launch(msgspec.structs.replace(config, plugins=(PLUGIN,)), report=on_line, name=name).shutdown()
        raise AssertionError("nobody noticed")
    except GeometryError as error:
        message = str(error)
    finally:
        faults.unlink()
    remarks.append(f"said {time.monotonic() - lines[-1][0]:.2f} s after {lines[-1][1]!r}")
    assert sentence in message, message
    assert f"rank {faulty}: " in message, message
    assert len(processes) == config.ranks, lines
    _assert_gone(processes)


def starts_again(remarks: list[str], pool: ExpertPool, work: Work) -> None:
    """After disagreements at capture: graphs on the same GPUs, and the same tokens."""
    graphs = pool.status().graphs
    remarks.append(f"{len(graphs[0].graphs)} graphs")
    work.compare_start(pool, remarks)
    assert all(report.replays > 0 for report in pool.status().graphs), "no replays"


def running_pool_disagrees(remarks: list[str], pool: ExpertPool, work: Work, what: str, faulty: int) -> None:
    """While a pool generates, one rank comes to hold something else: an error on every rank, and the pool ends."""
    processes = _processes(pool)
    stream = work.stream(pool)
    assert next(stream).index == 0
    in_ranks(pool, [faulty], disagree_at_next_step, what)
    started = time.monotonic()
    try:
        ended = len(list(stream))
        raise AssertionError(f"nobody noticed, {ended} finished")
    except GeometryError as error:
        message = str(error)
    seconds = time.monotonic() - started
    remarks.append(f"said after {seconds:.2f} s: {message[:200]}")
    assert RUNNING[what] in message, message
    assert f"raised on ranks {_range(len(processes))}" in message, message
    assert seconds < SAID_WITHIN_S
    _assert_gone(processes)


def rank_is_lost(
    remarks: list[str],
    pool: ExpertPool,
    heard: list[tuple[float, str]],
    work: Work,
    how: signal.Signals,
    faulty: int,
    step_timeout_s: float,
) -> None:
    """A rank is sent the signal in the middle of replays. The pool names it; then it ends, where it was restarted as
    often as it may be, or goes on with new ranks and finishes."""
    processes, before = _processes(pool), pool.status()
    allowed = step_timeout_s if how == signal.SIGSTOP else NOTICED_WITHIN_S
    stream = work.stream(pool)
    first = next(stream)
    time.sleep(0.3)
    said_before = len(heard)
    os.kill(before.places[faulty].pid, how)
    struck, failure = time.monotonic(), None
    try:
        completions = [first, *stream]
    except RankError as error:
        failure, said_at, message = error, time.monotonic(), str(error)
    else:
        assert len(heard) > said_before, f"all went on: {len(completions)} finished"
        said_at, message = heard[said_before]
    remarks.append(f"said after {said_at - struck:.1f} s: {message[:140]}")
    assert message.startswith(f"rank {faulty} "), message
    assert said_at - struck < allowed, f"{said_at - struck:.1f} s, allowed {allowed:.0f}"
    _assert_gone(processes)
    if failure is not None:
        assert pool.status().state == "failed"
        return
    after = pool.status()
    remarks.append(f"new ranks, all finished {time.monotonic() - struck:.1f} s after it")
    assert after.restarts == before.restarts + 1, after
    assert not {place.pid for place in after.places} & {place.pid for place in before.places}
    assert all(report.replays > 0 for report in after.graphs), "no replays"
    work.compare(in_order(completions), remarks)


def _processes(pool: ExpertPool) -> list[psutil.Process]:
    return [psutil.Process(place.pid) for place in pool.status().places]


def _assert_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    for process in left:  # so that what follows has its GPU
        process.kill()
    assert not left, f"still there: {[(process.pid, process.status()) for process in left]}"


def _all_ranks(pool: ExpertPool) -> list[int]:
    return _range(pool.rank_config.layout.world_size)


def _range(count: int) -> list[int]:
    return list(range(count))
