"""Faults on real GPUs under Ray: ranks that disagree, die and stall, and what graphs and buffers hold beside the plan.

    python tests/gpu/check_faults.py --dispatch mega
    python tests/gpu/check_faults.py --device cpu --dispatch alltoall        the same on CPUs

For each dispatch three pools run one after the other on the same GPUs. The first makes reference tokens, is compared
with what `plan` says (H10), records graphs of a second memory pool (H13), recaptures after each disagreement, and loses
a rank to SIGKILL. The second must generate the same tokens and has a rank stopped by SIGSTOP; the third must generate
the same tokens. The tokens of an undisturbed pool may differ from one call to the next where a kernel sums in no fixed
order: then as large a share must be the same as between two calls of the first pool.
"""

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
import fault_insides
import psutil
import rank_faults
import rank_insides
import ray
from expert_pool.cluster import (
    CacheConfig,
    ExpertPool,
    ExpertPoolError,
    GeometryError,
    Limits,
    PlacementConfig,
    PoolConfig,
    RankError,
    SamplingParams,
    WorkerConfig,
)
from expert_pool.cluster.plan_report import plan_pool
from expert_pool.cluster.pool import _get
from fault_insides import capture_state, other_facts, outputs_are_kept
from harness import end_after, save_config, say, show
from rank_faults import during_capture, inject, other_bucket, undo

SMALL = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
PROMPTS = [[5, 17, 42], [9, 9], [100], [7, 8, 9, 10, 11], [3] * 20, [600, 700], [1000], [2, 4, 6]]
NEW_TOKENS = 24
SAID_WITHIN_S = 15.0
GONE_WITHIN_S = 20.0
NOTICED_WITHIN_S = 8.0

rows: list[list[str]] = []


@contextmanager
def check(name: str) -> Iterator[list[str]]:
    """A line of the table; what is raised inside is its failure. What is put into the list is shown beside it."""
    remarks: list[str] = []
    started = time.monotonic()
    try:
        yield remarks
        verdict = "pass"
    except Exception as error:
        verdict = "FAIL"
        remarks.append(f"{type(error).__name__}: {str(error)[:400]}")
        if not isinstance(error, (AssertionError, ExpertPoolError)):
            remarks.append(traceback.format_exc(limit=-2)[-400:])
    rows.append([verdict, name, f"{time.monotonic() - started:.1f}", "; ".join(remarks)])
    say(" ".join(rows[-1]))


def config_of(folder: str, dispatch: str, options: dict[str, Any], step_timeout_s: float) -> PoolConfig:
    on_gpu = options["device"] == "cuda"
    name, _, experts = dispatch.partition("+")
    return PoolConfig(
        model=folder,
        ranks=2,
        dtype="bfloat16" if on_gpu else "float32",
        weights="random",
        dispatch=name,
        experts=experts or "auto",
        limits=Limits(
            chunked_prefill_size=256,
            max_running_requests=8,
            cuda_graph_bs=(1, 2, 4, 8),
            disable_piecewise_cuda_graph=True,
        ),
        cache=CacheConfig(num_tokens=16384),
        worker=WorkerConfig(device=options["device"], step_timeout_s=step_timeout_s),
        placement=PlacementConfig(timeout_s=60, start_timeout_s=options["start_timeout"]),
    )


def on_rank(pool: ExpertPool, rank: int, function: Callable[..., Any], *args: Any) -> Any:
    return on_ranks(pool, [rank], function, *args)[0]


def on_ranks(pool: ExpertPool, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(engine, *args)` returns in the actors of these ranks, at the same time."""
    actors = _get(pool._driver.__ray_call__.remote(lambda driver: driver._gang.actors))
    calls = [actors[rank].__ray_call__.remote(lambda actor: function(actor._engine, *args)) for rank in ranks]
    return ray.get(calls, timeout=60)


def recapture(pool: ExpertPool) -> Any:
    try:
        return ray.get(pool._driver.recapture.remote(), timeout=60)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause or error) from None


def tokens_of(pool: ExpertPool) -> list[tuple[int, ...]]:
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    found = {one.index: one.token_ids for one in pool.generate(PROMPTS, sampling)}
    return [found[index] for index in range(len(PROMPTS))]


def share_alike(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> float:
    pairs = [pair for one, other in zip(first, second, strict=True) for pair in zip(one, other, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)


class Reference:
    """Tokens of an undisturbed pool, and how large a share of them it repeats."""

    def __init__(self, pool: ExpertPool):
        self._tokens = tokens_of(pool)
        self.repeated = share_alike(self._tokens, tokens_of(pool))

    def compare(self, pool: ExpertPool, remarks: list[str]) -> None:
        share = share_alike(self._tokens, tokens_of(pool))
        if share < 1:
            remarks.append(f"{share:.3f} of the tokens, undisturbed {self.repeated:.3f}")
        assert share >= min(self.repeated, 1.0) - (0.05 if self.repeated < 1 else 0), f"only {share:.3f} of the tokens"
        assert all(report.replays > 0 for report in pool.status().graphs), "no replays"


def disagreements() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]]:
    return {
        "bucket": (other_bucket, (), "bucket differs"),
        "capacity": (other_facts, ({"capacity": 77},), "capacity differs"),
        "expert backend": (other_facts, ({"expert_backend": "another"},), "expert_backend differs"),
        "fp8 scale": (other_facts, ({"quantisation_scales": (0.25,)},), "quantisation_scales[0] differs"),
    }


def check_disagreements(pool: ExpertPool, dispatch: str, reference: Reference, faulty: int) -> None:
    for what, (fault, args, sentence) in disagreements().items():
        with check(f"{dispatch}: another {what} on rank {faulty} is refused everywhere") as remarks:
            on_rank(pool, faulty, inject, during_capture, fault, *args)
            started = time.monotonic()
            try:
                recapture(pool)
                raise AssertionError("nobody noticed")
            except GeometryError as error:
                message = str(error)
            remarks.append(f"said after {time.monotonic() - started:.2f} s")
            on_rank(pool, faulty, undo)
            assert sentence in message, message
            assert time.monotonic() - started < SAID_WITHIN_S
            states = on_ranks(pool, [0, 1], capture_state)
            assert states == [(message, 0, 0)] * 2, states
        with check(f"{dispatch}: and the GPUs go on with new graphs") as remarks:
            outcome = recapture(pool)
            remarks.append(f"{len(outcome.plan.entries)} graphs")
            reference.compare(pool, remarks)


def check_plan(pool: ExpertPool, config: PoolConfig, dispatch: str) -> None:
    with check(f"{dispatch}: H10 bytes planned are bytes allocated") as remarks:
        plan = plan_pool(config)
        held = _exchange_bytes(plan)
        for load in pool.status().loads:
            assert load.kv_cache_bytes == plan.num_bytes("KV cache"), (load, plan.buffers)
            if dispatch == "mega":
                remarks.append(f"rank {load.rank}: {load.exchange_bytes:,} held, {held:,} planned without the kernel's")
                assert load.exchange_bytes >= held
            else:
                assert load.exchange_bytes == held, f"rank {load.rank} holds {load.exchange_bytes:,}, planned {held:,}"
        remarks.append(f"KV {plan.num_bytes('KV cache'):,}, exchange {held:,}")


def _exchange_bytes(plan: Any) -> int:
    """Of dispatch and experts' buffers, the experts' weights not among them."""
    return plan.num_bytes("dispatch: ") + plan.num_bytes("experts: ")


def check_memory_pools(pool: ExpertPool, dispatch: str) -> None:
    with check(f"{dispatch}: H13 graphs of a second memory pool leave the first as they were"):
        found = on_ranks(pool, [0, 1], outputs_are_kept)
        assert found == [[], []], found


def check_loss(pool: ExpertPool, dispatch: str, how: signal.Signals, faulty: int, step_timeout_s: float) -> None:
    """A rank is sent the signal in the middle of replays; the pool then ends, and names it."""
    places = pool.status().places
    processes = [psutil.Process(place.pid) for place in places]
    allowed = step_timeout_s if how == signal.SIGSTOP else NOTICED_WITHIN_S
    with check(f"{dispatch}: {how.name} of rank {faulty} is reported") as remarks:
        lengths = [SamplingParams(max_new_tokens=1)] + [SamplingParams(max_new_tokens=1000, ignore_eos=True)] * 15
        stream = pool.generate([[5, 17]] * 16, lengths)
        assert next(stream).index == 0
        time.sleep(0.3)
        os.kill(places[faulty].pid, how)
        struck = time.monotonic()
        try:
            ended = [completion.index for completion in stream]
            raise AssertionError(f"all went on: {len(ended)} finished")
        except RankError as error:
            message = str(error)
        seconds = time.monotonic() - struck
        remarks.append(f"after {seconds:.1f} s: {message[:160]}")
        assert message.startswith(f"rank {faulty} "), message
        assert seconds < allowed, f"{seconds:.1f} s, allowed {allowed:.0f}"
        assert pool.status().state == "failed"
    with check(f"{dispatch}: and the processes of all ranks end"):
        _, left = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
        for process in left:  # so that what follows has its GPU
            process.kill()
        assert not left, [(process.pid, process.status()) for process in left]


def run_dispatch(folder: str, dispatch: str, options: dict[str, Any]) -> None:
    # On a fresh host the first pool compiles kernels, during which ranks may wait for each other.
    first = config_of(folder, dispatch, options, max(60.0, options["step_timeout"]))
    config = config_of(folder, dispatch, options, options["step_timeout"])
    faulty, parts = options["rank"], options["part"]
    with launched(first, dispatch, "first") as pool:
        reference = Reference(pool)
        say(f"  reference tokens; {reference.repeated:.3f} repeated")
        if "plan" in parts:
            check_plan(pool, first, dispatch)
        if "pools" in parts:
            check_memory_pools(pool, dispatch)
        if "disagree" in parts:
            check_disagreements(pool, dispatch, reference, faulty)
        if "kill" in parts:
            check_loss(pool, dispatch, signal.SIGKILL, faulty, options["step_timeout"])
    if "stop" in parts:
        with launched(config, dispatch, "second") as pool:
            with check(f"{dispatch}: a new pool on the same GPUs generates the same tokens") as remarks:
                reference.compare(pool, remarks)
            check_loss(pool, dispatch, signal.SIGSTOP, faulty, options["step_timeout"])
    if "kill" in parts or "stop" in parts:
        with (
            launched(config, dispatch, "third") as pool,
            check(f"{dispatch}: a new pool on the same GPUs generates the same tokens") as remarks,
        ):
            reference.compare(pool, remarks)


@contextmanager
def launched(config: PoolConfig, dispatch: str, which: str) -> Iterator[ExpertPool]:
    started = time.monotonic()
    with ExpertPool.launch(config, report=lambda line: None) as pool:
        say(f"{dispatch}: {which} pool after {time.monotonic() - started:.1f} s")
        yield pool


@click.command()
@click.option("--dispatch", "dispatches", multiple=True, default=("flashinfer+cutedsl", "mega", "allgather"))
@click.option(
    "--part",
    multiple=True,
    type=click.Choice(["plan", "pools", "disagree", "kill", "stop"]),
    default=("plan", "pools", "disagree", "kill", "stop"),
)
@click.option("--rank", default=1, show_default=True, help="Which rank is made to disagree, die and stall.")
@click.option("--step-timeout", default=10.0, show_default=True)
@click.option("--start-timeout", default=150.0, show_default=True)
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]))
@click.option("--deadline", default=235.0, show_default=True)
def main(dispatches: tuple[str, ...], **options: Any) -> None:
    """Run the checks; exit with 1 if one fails, with 3 at the deadline."""
    end_after(options["deadline"], report)
    for module in (rank_faults, rank_insides, fault_insides):
        ray.cloudpickle.register_pickle_by_value(module)  # actors do not see these folders
    gpus = None if options["device"] == "cuda" else 0
    ray.init(address="local", num_cpus=4, num_gpus=gpus, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        save_config(folder, **SMALL)
        for dispatch in dispatches:
            try:
                run_dispatch(folder, dispatch, options)
            except Exception as error:
                rows.append(["FAIL", f"{dispatch}: not finished", "", f"{type(error).__name__}: {str(error)[:600]}"])
                say(" ".join(rows[-1]))
    report()
    ray.shutdown()
    raise SystemExit(any(row[0] == "FAIL" for row in rows))


def report() -> None:
    show("faults", [["", "check", "s", "remarks"], *([row[0], row[1], row[2], row[3][:200]] for row in rows)])
    click.echo(f"{sum(row[0] == 'FAIL' for row in rows)} of {len(rows)} failed")


if __name__ == "__main__":
    main()
