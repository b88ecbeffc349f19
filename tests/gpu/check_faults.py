"""Faults on real GPUs under Ray: ranks that disagree, die and stall, and what graphs and buffers hold beside the plan.

    python tests/gpu/check_faults.py --ranks 4 --dispatch flashinfer+cutedsl --short mega --short allgather
    python tests/gpu/check_faults.py --device cpu --ranks 4 --dispatch alltoall --short allgather     the same on CPUs

For each dispatch, in one Ray session: a pool makes reference tokens, is compared with what `plan` says (H10), and
records graphs of a second memory pool (H13). Pools one rank of which disagrees at capture are refused. Another pool
loses a rank to SIGKILL and is rebuilt, loses one to SIGSTOP and is rebuilt, and finishes what it was generating; last,
a rank disagrees while it generates, which ends it. A short dispatch has one disagreement at capture, is rebuilt after
SIGKILL, and ends with SIGSTOP. A case whose pool is not there any more gets a new one.
"""

import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import check_pool
import click
import fault_cases
import fault_insides
import rank_faults
import rank_insides
import ray
from expert_pool.cluster import (
    CacheConfig,
    ExpertPool,
    ExpertPoolError,
    Limits,
    PlacementConfig,
    PoolConfig,
    RecoveryConfig,
    WorkerConfig,
)
from fault_cases import DISAGREEMENTS, RUNNING, Work
from faults_at_start import session_environment
from harness import begin_session, end_after, in_time, say, show

MODEL = str(Path(__file__).resolve().parent.parent.parent / "examples" / "tiny_moe")
PARTS = ("plan", "pools", "disagree", "kill", "stop", "running")
SHORT = ("disagree", "kill", "stop")

MODULES = (rank_faults, rank_insides, fault_insides, fault_cases, check_pool)
FAULTS = Path(tempfile.mkdtemp()) / "wanted.json"

rows: list[list[str]] = []


class Cases:
    """Runs the cases of one dispatch, each on the pool there is, or on a new one.

    Args:
        dispatch: a dispatch, or DISPATCH+EXPERTS.
        restarts: how often a pool is rebuilt; the failure after that ends it.
        options: of the command line.
    """

    def __init__(self, dispatch: str, restarts: int, options: dict[str, Any]):
        self.config = config_of(dispatch, restarts, options)
        self.heard: list[tuple[float, str]] = []
        self._dispatch = dispatch
        self._options = options
        self._pool: ExpertPool | None = None
        on_gpu = options["device"] == "cuda"
        self.work = Work(
            options["ranks"],
            options["new_tokens"],
            MODEL,
            self.config.dtype or "",
            "cuda:0" if on_gpu else "cpu",
        )

    def run(self, name: str, case: Callable[..., None], *arguments: Any) -> None:
        """A line of the table; what is raised inside is its failure."""
        self._run(name, self._ready_pool, case, *arguments)

    def run_without_pool(self, name: str, case: Callable[..., None], *arguments: Any) -> None:
        """The same of a case that launches a pool itself, for which it gets the configuration."""
        self.close()
        self._run(name, lambda: self.config, case, *arguments)

    def hear(self, line: str) -> None:
        self.heard.append((time.monotonic(), line))
        say(f"  {line}")

    def _run(self, name: str, get_subject: Callable[[], Any], case: Callable[..., None], *arguments: Any) -> None:
        remarks: list[str] = []
        started = time.monotonic()
        try:
            subject = get_subject()
            started = time.monotonic()
            in_time(self._options["case_deadline"], case, remarks, subject, *arguments)
            verdict = "pass"
        except Exception as error:
            verdict = "FAIL"
            remarks.append(f"{type(error).__name__}: {str(error)[:400]}")
            if not isinstance(error, (AssertionError, ExpertPoolError, TimeoutError)):
                remarks.append(traceback.format_exc(limit=-2)[-400:])
            if isinstance(error, TimeoutError):  # what hangs would keep its GPUs
                self._pool = None
                ray.shutdown()
                begin(self._options)
        rows.append([verdict, f"{self._dispatch}: {name}", f"{time.monotonic() - started:.1f}", "; ".join(remarks)])
        say(" ".join(rows[-1]))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _ready_pool(self) -> ExpertPool:
        if self._pool is not None and self._pool.status().state == "ready":
            return self._pool
        self.close()
        started = time.monotonic()
        self._pool = in_time(self._options["start_timeout"], ExpertPool.launch, self.config, self.hear)
        say(f"{self._dispatch}: a pool after {time.monotonic() - started:.1f} s")
        return self._pool


def config_of(dispatch: str, restarts: int, options: dict[str, Any]) -> PoolConfig:
    on_gpu = options["device"] == "cuda"
    name, _, experts = dispatch.partition("+")
    return PoolConfig(
        model=MODEL,
        ranks=options["ranks"],
        dtype="bfloat16" if on_gpu else "float32",
        dispatch=name,
        experts=experts or "auto",
        limits=Limits(
            chunked_prefill_size=256,
            max_running_requests=8,
            cuda_graph_bs=(1, 2, 4, 8),
            disable_piecewise_cuda_graph=True,
        ),
        cache=CacheConfig(num_tokens=16384),
        worker=WorkerConfig(device=options["device"], step_timeout_s=options["step_timeout"]),
        placement=PlacementConfig(timeout_s=60, start_timeout_s=options["start_timeout"]),
        recovery=RecoveryConfig(max_restarts=restarts, backoff_s=0),
    )


def run_dispatch(dispatch: str, parts: tuple[str, ...], options: dict[str, Any]) -> None:
    is_short = "running" not in parts
    # Without a disagreement at the end, the last loss of a rank is one too many, and ends the pool.
    lost = [part for part in ("kill", "stop") if part in parts]
    cases = Cases(dispatch, len(lost) - is_short if lost else 0, options)
    work, faulty = cases.work, options["rank"]

    def remember(remarks: list[str], pool: ExpertPool) -> None:
        work.remember(pool)
        remarks.append(f"repeats {work.repeated:.3f} of its tokens, agreement with Transformers {work.agrees:.4f}")
        assert work.repeated > 0.9

    cases.run("generates", remember)
    if "plan" in parts:
        cases.run("H10 bytes planned are bytes allocated", fault_cases.plan_holds, cases.config)
    if "pools" in parts:
        cases.run("H13 a second memory pool leaves the first as it was", fault_cases.memory_pools_are_apart)
    for what in list(DISAGREEMENTS)[: 1 if is_short else None] if "disagree" in parts else ():
        arguments = (FAULTS, cases.hear, what, faulty)
        cases.run_without_pool(f"another {what} on rank {faulty} is refused", fault_cases.capture_disagrees, *arguments)
    if "disagree" in parts:
        cases.run("and the GPUs go on with new graphs", fault_cases.starts_again, work)
    for part, how in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        if part in parts:
            arguments = (cases.heard, work, how, faulty, options["step_timeout"])
            cases.run(f"{how.name} of rank {faulty}", fault_cases.rank_is_lost, *arguments)
    for what in options["running"] if "running" in parts else ():
        arguments = (work, what, faulty)
        cases.run(f"rank {faulty} disagrees while it runs: {what}", fault_cases.running_pool_disagrees, *arguments)
    cases.close()


@click.command()
@click.option("--ranks", default=2, show_default=True)
@click.option("--dispatch", "dispatches", multiple=True, help="All parts of this one. DISPATCH, or DISPATCH+EXPERTS.")
@click.option("--short", multiple=True, help=f"{', '.join(SHORT)} of this one.")
@click.option("--part", multiple=True, type=click.Choice(PARTS), default=PARTS, help="Of --dispatch.")
@click.option("--running", multiple=True, type=click.Choice(list(RUNNING)), default=("graphs",), show_default=True)
@click.option("--rank", default=1, show_default=True, help="Which rank is made to disagree, die and stall.")
@click.option("--new-tokens", default=900, show_default=True, help="Of the generations that are disturbed.")
@click.option("--step-timeout", default=10.0, show_default=True)
@click.option("--start-timeout", default=120.0, show_default=True)
@click.option("--case-deadline", default=90.0, show_default=True, help="Seconds for one case, a rebuild included.")
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]))
@click.option("--deadline", default=570.0, show_default=True)
def main(dispatches: tuple[str, ...], short: tuple[str, ...], part: tuple[str, ...], **options: Any) -> None:
    """Run the checks; exit with 1 if one fails, with 3 at the deadline."""
    end_after(options["deadline"], report)
    begin(options)
    wanted = [(dispatch, part) for dispatch in dispatches] + [(dispatch, SHORT) for dispatch in short]
    for dispatch, parts in wanted or [("flashinfer+cutedsl", part)]:
        try:
            run_dispatch(dispatch, parts, options)
        except Exception as error:
            rows.append(["FAIL", f"{dispatch}: not finished", "", f"{type(error).__name__}: {str(error)[:600]}"])
            say(" ".join(rows[-1]))
    report()
    ray.shutdown()
    raise SystemExit(any(row[0] == "FAIL" for row in rows))


def begin(options: dict[str, Any]) -> None:
    with session_environment(FAULTS):
        begin_session(options["ranks"], options["device"], MODULES)


def report() -> None:
    show("faults", [["", "check", "s", "remarks"], *([*row[:3], row[3][:240]] for row in rows)])
    click.echo(f"{sum(row[0] == 'FAIL' for row in rows)} of {len(rows)} failed")


if __name__ == "__main__":
    main()
