"""Compiling kernels at start-up: who compiles, what is said meanwhile, and what becomes of a compiler that fails.

And while a graph is recorded: nothing compiles, and what CUDA refuses is said in a sentence.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from expert_pool.cluster.ranks.kernels import builders, prepare_kernels
from expert_pool.dispatch.errors import GeometryError, KernelError, RankError
from expert_pool.graphs.cuda import refusing_violations, violation
from expert_pool.workers.kernels.flashinfer_kernels import build_failure
from expert_pool.workers.rank import RankPlace
from expert_pool.workers.rank_config import KernelStatus

PLACES = tuple(RankPlace(rank, f"node {rank // 2}", "127.0.0.1", 1000 + rank, ()) for rank in range(4))


def needs(**built: bool) -> tuple[KernelStatus, ...]:
    return tuple(
        KernelStatus(label.replace("_", "-"), f"module_{label}", is_built, "~/cache")
        for label, is_built in built.items()
    )


MISSING = needs(attention=False, all_to_all=False)
THERE = needs(attention=True, all_to_all=True)


def lines_of(statuses, call, timeout_s=10.0, interval_s=0.02) -> list[str]:
    async def run() -> list[str]:
        return [line async for line in prepare_kernels(statuses, PLACES, call, timeout_s, interval_s)]

    return asyncio.run(run())


def test_one_rank_a_node_compiles_what_is_missing_there():
    partly = needs(attention=True, all_to_all=False)

    def chosen(*statuses: tuple[KernelStatus, ...]) -> dict[int, list[str]]:
        return {rank: [one.label for one in missing] for rank, missing in builders(list(statuses), PLACES).items()}

    both = ["attention", "all-to-all"]
    assert chosen(THERE, THERE, THERE, THERE) == {}
    assert chosen(MISSING, MISSING, MISSING, MISSING) == {0: both, 2: both}
    assert chosen(THERE, THERE, partly, partly) == {2: ["all-to-all"]}
    assert chosen(THERE, partly, MISSING, THERE) == {1: ["all-to-all"], 2: both}


def test_the_start_says_what_compiles_where_it_is_kept_and_for_how_long():
    called: list[tuple[int, str]] = []

    async def compile_for_a_while(rank: int, method: str) -> None:
        called.append((rank, method))
        await asyncio.sleep(0.05 if rank == 0 else 0.15)

    lines = lines_of([MISSING] * 4, compile_for_a_while)
    assert called == [(0, "build_kernels"), (2, "build_kernels")]
    assert lines[0] == (
        "compiling 2 kernel modules on first use (all-to-all, attention), one rank a node; cached in ~/cache"
    )
    assert lines[1] == "compiling kernels on rank 0, rank 2: 0 s"
    assert lines[-2] == "compiling kernels on rank 2: 0 s"
    assert lines[-1] == "compiled kernels in 0 s"


def test_nothing_is_said_or_called_where_all_is_there():
    async def never(rank: int, method: str) -> None:
        raise AssertionError

    assert lines_of([THERE] * 4, never) == []


def test_a_compiler_that_fails_ends_the_start_with_its_last_lines():
    ninja = (
        "Ninja build failed. Ninja output:\n" + "\n".join(f"[{n}/40] nvcc ..." for n in range(40)) + "\nerror: no nvcc"
    )
    message = build_failure("attention", RuntimeError(ninja))
    assert message.startswith("kernels for attention did not compile: RuntimeError")
    assert message.endswith("error: no nvcc")
    assert "[26/40]" in message
    assert "[25/40]" not in message

    async def fail(rank: int, method: str) -> None:
        if rank == 0:
            raise KernelError(message)
        await asyncio.sleep(60)

    with pytest.raises(KernelError, match=r"error: no nvcc \(raised on ranks \[0\]\)"):
        lines_of([MISSING] * 4, fail)


def test_a_compiler_that_takes_too_long_is_given_up():
    async def slow(rank: int, method: str) -> None:
        await asyncio.sleep(0 if rank == 0 else 60)

    with pytest.raises(RankError, match=r"ranks \[2\] did not compile .* within placement.start_timeout_s=0.1"):
        lines_of([MISSING] * 4, slow, timeout_s=0.1)


@pytest.fixture
def compilers(monkeypatch) -> SimpleNamespace:
    """Modules in the place of those that compile, with the attributes that theirs have; a CPU machine has neither."""

    class JitSpec:
        def __init__(self, name: str):
            self.name = name

        def build_and_load(self) -> str:
            return f"{self.name} built"

    def compiled(function: object) -> str:
        return "compiled"

    flashinfer, triton, cute = (ModuleType(name) for name in ("flashinfer.jit.core", "triton", "cutlass.cute"))
    flashinfer.JitSpec, cute.compile = JitSpec, compiled
    triton.knobs = SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=None))
    for module in (flashinfer, triton, cute):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(JitSpec=JitSpec, hooks=triton.knobs.runtime, cute=cute)


@contextmanager
def refused_as(sentence: str) -> Iterator[None]:
    """What happens inside is refused as a recording refuses it."""
    with pytest.raises(GeometryError, match=sentence), refusing_violations():
        yield


def test_nothing_compiles_while_a_step_is_recorded(compilers):
    spec = compilers.JitSpec("batch_decode")
    assert spec.build_and_load() == "batch_decode built"
    with refused_as("compiles FlashInfer's batch_decode while it is recorded"):
        spec.build_and_load()
    with refused_as("compiles the Triton kernel sort_rows"):
        compilers.hooks.jit_cache_hook(key="", repr="sort_rows", fn=None, compile={}, already_compiled=False)
    with refused_as("compiles the CuTe DSL kernel dict while"):
        compilers.cute.compile["--opt"]({})
    assert spec.build_and_load() == "batch_decode built"
    assert compilers.hooks.jit_cache_hook is None
    assert compilers.cute.compile({}) == "compiled"


def test_the_refusal_is_told_even_where_ending_the_capture_raises_another_error(compilers):
    def step() -> None:
        try:
            compilers.JitSpec("page").build_and_load()
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    with refused_as("compiles FlashInfer's page"):
        step()


def test_what_cuda_refuses_is_said_with_what_to_do():
    with refused_as("the step cannot be recorded: it allocated memory outside"):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for ...")
    assert violation(torch.OutOfMemoryError("CUDA out of memory")) is None
    with pytest.raises(ZeroDivisionError), refusing_violations():
        raise ZeroDivisionError
