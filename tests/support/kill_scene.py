"""A pool under load whose ranks are ended on purpose, and what must be true of its answers."""

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import rank_faults
import rank_insides
import ray
from expert_pool.cluster import (
    CacheConfig,
    ExpertPool,
    Limits,
    PoolConfig,
    RecoveryConfig,
    SamplingParams,
    WorkerConfig,
)
from handle import in_rank
from kill_report import Row
from rank_faults import dies_recording, ends_at_step, inject
from ray.util.placement_group import placement_group_table

STEP_TIMEOUT_S = 8.0
PROMPT_TOKENS = 40
NEW_TOKENS = (40, 100)


@contextmanager
def ray_session(*modules: ModuleType, places: int = 8) -> Iterator[None]:
    """Places for that many ranks, by default two pools of four; functions of these modules may be sent to actors."""
    for module in (rank_faults, rank_insides, sys.modules[__name__], *modules):
        ray.cloudpickle.register_pickle_by_value(module)  # actors do not see the folder of the tests
    ray.init(address="local", num_cpus=places, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def config_of(model: str, ranks: int, **settings: Any) -> PoolConfig:
    """Small chunks, so that prompts take several prefill steps, and restarts without a pause."""
    return PoolConfig(
        model=model,
        ranks=ranks,
        limits=Limits(chunked_prefill_size=16, max_running_requests=4, cuda_graph_bs=(2, 4)),
        cache=CacheConfig(num_tokens=2048),
        worker=WorkerConfig(step_timeout_s=STEP_TIMEOUT_S),
        recovery=settings.pop("recovery", RecoveryConfig(max_restarts=1000, backoff_s=0)),
        **settings,
    )


def load_of(rng: random.Random, num_requests: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of all lengths; greedy and sampled requests in turn."""
    prompts = [[rng.randrange(3, 100) for _ in range(rng.randint(1, PROMPT_TOKENS))] for _ in range(num_requests)]
    return prompts, [
        SamplingParams(
            max_new_tokens=rng.randint(*NEW_TOKENS), ignore_eos=True, temperature=0.8 * (index % 2), seed=index
        )
        for index in range(num_requests)
    ]


def processes_of(*actors: str) -> list[psutil.Process]:
    """Processes of these actors below this one, of whatever pool."""
    titles = tuple(f"ray::{actor}" for actor in actors)
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(part.startswith(titles) for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.pid)


def rank_processes() -> list[psutil.Process]:
    return processes_of("Rank")


def placement_groups() -> set[str]:
    return {key for key, group in placement_group_table().items() if group["state"] != "REMOVED"}


class Left:
    """What there is of processes and placement groups beyond what was there before."""

    def __init__(self) -> None:
        self._processes, self._groups = set(processes_of("Rank", "Driver")), placement_groups()

    def processes(self) -> set[psutil.Process]:
        return set(processes_of("Rank", "Driver")) - self._processes

    def groups(self) -> set[str]:
        return placement_groups() - self._groups

    def is_nothing(self) -> bool:
        return psutil.wait_procs(list(self.processes()), timeout=10)[1] == [] and self.groups() == set()


NOTHING = "0 processes, 0 groups"


def beyond(pool: ExpertPool) -> str:
    """Ranks and placement groups that there are besides those of the one pool there is; waits for what is ending."""
    own = {place.pid for place in pool.status().places}
    alive = psutil.wait_procs([one for one in processes_of("Rank") if one.pid not in own], timeout=10)[1]
    return f"{len(alive)} processes, {len(placement_groups()) - 1} groups"


@dataclass
class Scene:
    """One pool for several faults.

    Args:
        pool: that runs.
        stamps: folder for the times at which faults happen.
        seed: of moments, ranks and requests.
        num_requests: of the load.
        lines: what the pool reports, with the time; append to it from `launch`.

    Attributes:
        expected: tokens by index, of an undisturbed run of the same requests.
        aim: what the latest fault was aimed at.
    """

    pool: ExpertPool
    stamps: Path
    seed: int
    num_requests: int = 12
    lines: list[tuple[float, str]] = field(default_factory=list)
    aim: str = "-"

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.prompts, self.sampling = load_of(self.rng, self.num_requests)
        self.expected = self.answers()
        assert len(self.expected) == self.num_requests

    @property
    def stamp(self) -> Path:
        return self.stamps / "stamp"

    def answers(
        self, first: Callable[[], None] | None = None, then: Callable[[], None] | None = None
    ) -> dict[int, tuple[int, ...]]:
        """Tokens of all requests by index, none twice.

        Args:
            first: runs before the requests are sent.
            then: runs after the first answer, while the others are on their way.
        """
        answered: dict[int, tuple[int, ...]] = {}
        if first is not None:
            first()
        for completion in self.pool.generate(self.prompts, self.sampling):
            assert completion.finish_reason == "length", completion.error
            assert completion.index not in answered
            if then is not None and not answered:
                then()
            answered[completion.index] = completion.token_ids
        return answered

    def survives(
        self,
        row: Row,
        restarts: Sequence[int],
        first: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """A fault happens under load, and every answer is as expected; fills the row in.

        Args:
            row: of the report.
            restarts: how many of them the fault may take.
            first: arms the fault before the requests are sent.
            then: brings it about while they are on their way.
        """
        self.lines.clear()
        self.stamp.unlink(missing_ok=True)
        before = self.pool.status()
        answered = self.answers(first, then)
        row.step, row.tokens_equal = self.aim, answered == self.expected
        after = self.pool.status()
        assert row.tokens_equal
        assert (after.state, after.unfinished) == ("ready", 0)
        assert after.restarts - before.restarts in restarts, self.lines
        self.takes_the_times(row)
        assert {place.pid for place in before.places}.isdisjoint(place.pid for place in after.places)
        ended = [psutil.Process(place.pid) for place in before.places if psutil.pid_exists(place.pid)]
        assert psutil.wait_procs(ended, timeout=10)[1] == []
        row.left_over = beyond(self.pool)
        assert row.left_over == NOTHING

    def takes_the_times(self, row: Row) -> None:
        """From the latest fault until the pool reported it, and until it served again."""
        happened = float(self.stamp.read_text())
        row.detected_s = (
            next(when for when, line in self.lines if "; restarting" in line and when > happened) - happened
        )
        row.recovered_s = [when for when, line in self.lines if line.startswith("ready")][-1] - happened

    def at_step(self, kind: str, by: str, ranks: int = 1, up_to: int = 30) -> None:
        """Random ranks end in a random step of this kind."""
        number = self.rng.randint(1, up_to)
        chosen = sorted(self.rng.sample(range(len(self.pool.status().places)), ranks))
        self.aim = f"{kind.lower()} step {number}, rank {' and '.join(map(str, chosen))}"
        for rank in chosen:
            in_rank(self.pool, rank, inject, ends_at_step, kind, number, by, str(self.stamp))

    def once_it_says(self, beginning: str, act: Callable[[], None]) -> None:
        """Act, on a thread, when the pool reports a line that begins so."""

        def wait() -> None:
            while not any(line.startswith(beginning) for _, line in list(self.lines)):
                time.sleep(0.01)
            act()

        threading.Thread(target=wait, daemon=True).start()


def kill_in_decode(scene: Scene) -> None:
    scene.at_step("DECODE", "dying")


def kill_in_prefill(scene: Scene) -> None:
    scene.at_step("PREFILL", "dying", up_to=4)


def kill_in_a_mixed_step(scene: Scene) -> None:
    """While some batch decodes and prefills in one step."""
    scene.at_step("MIXED", "dying", up_to=4)


def kill_two_at_once(scene: Scene) -> None:
    scene.at_step("DECODE", "dying", ranks=2)


def stall(scene: Scene) -> None:
    scene.at_step("DECODE", "stopping")


def raise_in_a_layer(scene: Scene) -> None:
    scene.at_step("DECODE", "raising")


def kill_while_it_loads_again(scene: Scene) -> None:
    """A rank dies, and one of those that replace it dies while it loads."""
    scene.at_step("DECODE", "dying")
    pause, rank = scene.rng.uniform(0.0, 0.2), scene.rng.randrange(len(scene.pool.status().places))
    scene.aim = f"{pause:.2f} s into load, rank {rank}"

    def kill() -> None:
        time.sleep(pause)
        process = psutil.Process(scene.pool.status().places[rank].pid)
        scene.stamp.write_text(str(time.time()))
        process.send_signal(signal.SIGKILL)

    scene.once_it_says("loading", kill)


def kill_in_the_capture_after(scene: Scene) -> None:
    """A rank dies, and one that replaces it dies while it records a graph."""
    status = scene.pool.status()
    number, rank = scene.rng.randint(1, len(status.graphs[0].graphs)), scene.rng.randrange(len(status.places))
    scene.at_step("DECODE", "dying")
    scene.aim = f"recording graph {number}, rank {rank}"
    scene.once_it_says("loading", lambda: in_rank(scene.pool, rank, inject, dies_recording, number, str(scene.stamp)))


FAULTS: dict[str, tuple[Callable[[Scene], None], int]] = {
    "SIGKILL during load": (kill_while_it_loads_again, 2),
    "SIGKILL inside capture": (kill_in_the_capture_after, 2),
    "SIGKILL during prefill": (kill_in_prefill, 1),
    "SIGKILL during decode": (kill_in_decode, 1),
    "SIGKILL during a mixed step": (kill_in_a_mixed_step, 1),
    "SIGSTOP during decode": (stall, 1),
    "an exception in a layer": (raise_in_a_layer, 1),
    "SIGKILL of two ranks at once": (kill_two_at_once, 1),
}
"""Faults of ranks, with the restarts that each takes."""
