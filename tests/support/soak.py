"""A soak: a pool of CPU ranks serves random arrivals while a rank is killed every minute.

    python tests/support/soak.py --seconds 600 --report docs/soak.md

Exits with 1 where a request was not answered exactly once with the tokens of an undisturbed run, where memory grows, or
where anything is left over.
"""

import argparse
import os
import platform
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
from expert_pool.cluster import ExpertPool
from handle import in_driver
from kill_scene import Left, config_of, load_of, ray_session
from models import save_random_model

RANKS = 4
NUM_KINDS = 60
KILL_EVERY_S = 60.0
SAMPLE_EVERY_S = 2.0
SETTLED_SHARE = 0.3
LIFE_SETTLED_S = 8.0
LIFE_AT_LEAST_S = 15.0
FINISH_S = 180.0
MIB = 1024.0 * 1024.0
DRIVER_BOUND = 1.0
RANK_BOUND = 6.0
"""MiB a minute that the driver may grow by over the run, and ranks by the median of their lives."""

_REPORT = """# Soak

Written by `make soak`: {ranks} CPU ranks of a small random Qwen3-MoE for {soak.seconds:.0f} s, Poisson arrivals of
{soak.rate:g} requests a second with prompts and answers of mixed lengths, greedy and sampled, and one SIGKILL of a
random rank every {every:.0f} s. Each request has to be answered exactly once, with the tokens of an undisturbed run;
memory may grow by at most {driver_bound:g} MiB a minute in the driver, and by {rank_bound:g} in ranks, by the median
of their lives; nothing may be left over. {verdict}

{date}, {cores}; load of the machine {loads[0]:.1f} at the start, {loads[1]:.1f} at the end.

| what | value |
|---|---|
{table}

| killed after s | rank | known after s | served again after s | memory of the driver before, MiB |
|---|---|---|---|---|
{kills}
"""


@dataclass
class Kill:
    """A rank's death: when, and when the pool said so and served again, in seconds since the soak began."""

    at_s: float
    rank: int
    driver_mib: float
    detected_s: float | None = None
    recovered_s: float | None = None


@dataclass
class Memory:
    """What one process has for itself (USS) over time; its share of common pages (PSS) moves as others come and go."""

    at_s: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def sample(self, pid: int, at_s: float) -> None:
        try:
            used = psutil.Process(pid).memory_full_info().uss
        except psutil.Error:
            return
        self.at_s.append(at_s)
        self.mib.append(used / MIB)

    def after(self, seconds: float) -> "Memory":
        """Without what lies before `seconds` after the first sample."""
        kept = [index for index, at_s in enumerate(self.at_s) if at_s - self.at_s[0] >= seconds]
        return Memory([self.at_s[index] for index in kept], [self.mib[index] for index in kept])

    @property
    def lasted_s(self) -> float:
        return self.at_s[-1] - self.at_s[0] if self.at_s else 0.0

    @property
    def slope(self) -> float:
        """MiB a minute, by least squares."""
        return float(np.polyfit(np.array(self.at_s) / 60.0, self.mib, 1)[0])


class Soak:
    """One run.

    Args:
        pool: that serves.
        lines: what it reports, with the time.
        seconds: for how long requests arrive.
        rate: requests a second, on average.
        seed: of arrivals, requests and kills.
    """

    def __init__(self, pool: ExpertPool, lines: list[tuple[float, str]], seconds: float, rate: float, seed: int):
        self.pool, self.lines, self.seconds, self.rate = pool, lines, seconds, rate
        self.rng = random.Random(seed)
        self.prompts, self.sampling = load_of(random.Random(seed), NUM_KINDS)
        self.expected = self._undisturbed()
        self.kills: list[Kill] = []
        self.driver, self.ranks = Memory(), dict[int, Memory]()
        self.latencies: list[float] = []
        self.wrong: list[str] = []
        self.arrived = self.tokens = 0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def _undisturbed(self) -> dict[int, tuple[int, ...]]:
        answers = {one.index: one.token_ids for one in self.pool.generate(self.prompts, self.sampling)}
        assert len(answers) == NUM_KINDS
        return answers

    def run(self) -> None:
        self.began = time.time()
        helpers = [threading.Thread(target=work, daemon=True) for work in (self._watch_memory, self._kill_ranks)]
        for helper in helpers:
            helper.start()
        callers: list[threading.Thread] = []
        arrival = 0.0
        while (arrival := arrival + self.rng.expovariate(self.rate)) < self.seconds:
            time.sleep(max(0.0, self.began + arrival - time.time()))
            kind = self.rng.randrange(NUM_KINDS)
            callers.append(threading.Thread(target=self._ask, args=(kind,), daemon=True))
            callers[-1].start()
            self.arrived += 1
        deadline = time.monotonic() + FINISH_S
        for caller in callers:
            caller.join(max(0.0, deadline - time.monotonic()))
        self._over.set()
        for helper in helpers:
            helper.join(30.0)
        self.unanswered = sum(caller.is_alive() for caller in callers)
        self.lasted_s = time.time() - self.began
        self._match_lines()

    def _ask(self, kind: int) -> None:
        started = time.time()
        try:
            answers = [one.token_ids for one in self.pool.generate([self.prompts[kind]], self.sampling[kind])]
        except Exception as error:
            answers, problem = [], f"{type(error).__name__}: {error}"[:200]
        else:
            problem = "" if answers == [self.expected[kind]] else f"kind {kind}: {len(answers)} answers, other tokens"
        with self._lock:
            self.latencies.append(time.time() - started)
            self.tokens += sum(map(len, answers))
            if problem:
                self.wrong.append(problem)

    def _kill_ranks(self) -> None:
        rng = random.Random(self.rng.random())
        for minute in range(int(self.seconds // KILL_EVERY_S)):
            moment = self.began + minute * KILL_EVERY_S + rng.uniform(0.1, 0.6) * KILL_EVERY_S
            if self._over.wait(max(0.0, moment - time.time())):
                return
            while (status := self.pool.status()).state != "ready":
                time.sleep(0.2)
            place = rng.choice(status.places)
            self.kills.append(Kill(time.time() - self.began, place.rank, self.driver.mib[-1]))
            os.kill(place.pid, signal.SIGKILL)

    def _watch_memory(self) -> None:
        pid = in_driver(self.pool, lambda driver: os.getpid())
        while not self._over.wait(SAMPLE_EVERY_S):
            now = time.time() - self.began
            self.driver.sample(pid, now)
            for place in self.pool.status().places:
                self.ranks.setdefault(place.pid, Memory()).sample(place.pid, now)

    def _match_lines(self) -> None:
        for kill, following in zip(self.kills, [*self.kills[1:], None], strict=True):
            until = following.at_s if following is not None else float("inf")
            since = [(when - self.began, line) for when, line in self.lines]
            since = [(at_s, line) for at_s, line in since if kill.at_s < at_s < until]
            kill.detected_s = min((at_s for at_s, line in since if "; restarting" in line), default=None)
            kill.recovered_s = max((at_s for at_s, line in since if line.startswith("ready")), default=None)

    @property
    def rank_slopes(self) -> list[float]:
        lives = [memory.after(LIFE_SETTLED_S) for memory in self.ranks.values()]
        return sorted(life.slope for life in lives if life.lasted_s >= LIFE_AT_LEAST_S)

    @property
    def settled_s(self) -> float:
        """What the driver takes in its first restarts, it keeps and uses again."""
        return SETTLED_SHARE * self.seconds

    @property
    def driver_slope(self) -> float:
        return self.driver.after(self.settled_s).slope

    def problems(self) -> list[str]:
        """What did not hold."""
        status, found = self.pool.status(), []
        if self.unanswered:
            found.append(f"{self.unanswered} of {self.arrived} requests were not answered")
        found += [f"{count} x {problem}" for problem, count in Counter(self.wrong).most_common(10)]
        if len(self.latencies) + self.unanswered != self.arrived:
            found.append(f"{self.arrived} requests arrived, {len(self.latencies)} ended")
        if status.state != "ready" or status.unfinished or status.restarts < len(self.kills):
            found.append(f"{status.state}, {status.unfinished} unfinished, {status.restarts} restarts")
        if self.driver_slope > DRIVER_BOUND:
            found.append(f"the driver grows by {self.driver_slope:.2f} MiB a minute (bound {DRIVER_BOUND:g})")
        if self.rank_slopes and float(np.median(self.rank_slopes)) > RANK_BOUND:
            found.append(f"ranks grow by {np.median(self.rank_slopes):.2f} MiB a minute (bound {RANK_BOUND:g})")
        return found


def report_of(soak: Soak, problems: list[str], loads: tuple[float, float]) -> str:
    slopes, latencies = soak.rank_slopes, np.array(soak.latencies or [0.0])
    median, late, latest = np.median(latencies), np.quantile(latencies, 0.99), latencies.max()
    of_ranks = f"{np.median(slopes):+.2f}, {slopes[-1]:+.2f}" if slopes else "-"
    rows = {
        "requests that arrived": soak.arrived,
        "answered once, with the tokens of an undisturbed run": len(soak.latencies) - len(soak.wrong),
        "wrong or failed": len(soak.wrong),
        "unanswered": soak.unanswered,
        "tokens": f"{soak.tokens} in {soak.lasted_s:.0f} s",
        "seconds until an answer: median, 99%, largest": f"{median:.1f}, {late:.1f}, {latest:.1f}",
        "memory of the driver (USS), MiB: first, last": f"{soak.driver.mib[0]:.1f}, {soak.driver.mib[-1]:.1f}",
        f"slope of the driver after its first {soak.settled_s:.0f} s, MiB a minute (bound {DRIVER_BOUND:g})": (
            f"{soak.driver_slope:+.2f}"
        ),
        f"slope of ranks within their lives, MiB a minute: median (bound {RANK_BOUND:g}), largest": of_ranks,
        f"lives of ranks of at least {LIFE_AT_LEAST_S:.0f} s after their first {LIFE_SETTLED_S:.0f} s": len(slopes),
    }
    table = "\n".join(f"| {what} | {value} |" for what, value in rows.items())
    kills = "\n".join(
        f"| {kill.at_s:.0f} | {kill.rank} | {_after(kill.detected_s, kill)} | {_after(kill.recovered_s, kill)} | "
        f"{kill.driver_mib:.1f} |"
        for kill in soak.kills
    )
    verdict = "All of it held." if not problems else "It FAILED: " + "; ".join(problems)
    return _REPORT.format(
        ranks=RANKS,
        soak=soak,
        every=KILL_EVERY_S,
        driver_bound=DRIVER_BOUND,
        rank_bound=RANK_BOUND,
        verdict=verdict,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        cores=f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}",
        loads=loads,
        table=table,
        kills=kills,
    )


def _after(at_s: float | None, kill: Kill) -> str:
    return "-" if at_s is None else f"{at_s - kill.at_s:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", default="docs/soak.md")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder, ray_session():
        model = Path(folder) / "model"
        save_random_model("qwen3_moe", model)
        left = Left()
        config = config_of(str(model), RANKS)
        with ExpertPool.launch(config, report=lambda line: lines.append((time.time(), line))) as pool:
            soak = Soak(pool, lines, options.seconds, options.rate, options.seed)
            soak.run()
            problems = soak.problems()
        if not left.is_nothing():
            problems.append(f"left over: {left.processes()}, placement groups {left.groups()}")
    report = report_of(soak, problems, (load, os.getloadavg()[0]))
    Path(options.report).write_text(report)
    print(report)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
