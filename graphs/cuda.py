"""CUDA graphs as a capture backend.

What a graph freezes must be there before the recording: memory comes from the graph's own pool, and kernels are
compiled and loaded by the warm-up. A step that asks for more while it is recorded is refused with a sentence, instead
of leaving a graph that reads freed memory, or a capture that fails far from its cause.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..dispatch.errors import GeometryError
from .backend import RecordedGraph, Step

_WARM_UP_RUNS = 2

# What CUDA says, in PyTorch's words, and what a step did to hear it.
_VIOLATIONS = {
    "operation not permitted when stream is capturing": (
        "it allocated memory outside the graph's pool, or waited for the GPU (a copy to the host, .item(), a boolean "
        "index): allocate before the recording, and keep lengths on the device"
    ),
    "operation failed due to a previous error during capture": (
        "an operation before this one cannot be recorded: run with CUDA_LAUNCH_BLOCKING=1 to see which"
    ),
    "operation would make the legacy stream depend on a capturing": (
        "it ran a kernel on the default stream: everything of a step has to run on the current stream"
    ),
    "dependency created on uncaptured work in another stream": (
        "it waited for work on another stream that is not part of the recording"
    ),
    "operation would result in a merge of separate capture sequences": (
        "it joined two recordings: only one step is recorded at a time"
    ),
}


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor, num_bytes: int):
        self._graph = graph
        self._output = output
        self.num_bytes = num_bytes

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._output


class CudaGraphBackend:
    """Captures on a side stream, into one memory pool a name.

    Args:
        device: the rank's GPU.
    """

    name = "CUDA graphs"

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pools: dict[str, Any] = {}
        self._graphs: dict[str, weakref.WeakSet[_CudaGraph]] = {}

    def warm_up(self, step: Step) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def record(self, step: Step, pool: str) -> RecordedGraph:
        """See `backend.CaptureBackend`.

        Raises:
            GeometryError: the step compiled, allocated or waited while it was recorded; says which, and what to do.
        """
        graphs = self._graphs.setdefault(pool, weakref.WeakSet())
        if not graphs:
            # PyTorch ends a pool with the last graph in it, and refuses its handle from then on.
            self._pools[pool] = torch.cuda.graph_pool_handle()
        free_before, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        with refusing_violations(), torch.cuda.graph(graph, pool=self._pools[pool], stream=self._stream):
            output = step()
        torch.cuda.synchronize(self._device)
        free_after, _ = torch.cuda.mem_get_info(self._device)
        recorded = _CudaGraph(graph, output, max(0, free_before - free_after))
        graphs.add(recorded)
        return recorded


def violation(error: BaseException) -> str | None:
    """What a step did that cannot be recorded, from the error that CUDA raised; `None` for any other error."""
    text = str(error)
    found = [did for said, did in _VIOLATIONS.items() if said in text]
    return found[0] if found else None


@contextmanager
def refusing_violations() -> Iterator[None]:
    """While a step is recorded: kernels are not compiled, and what CUDA refuses is said in a sentence.

    Raises:
        GeometryError: the step did what cannot be recorded.
    """
    refused: list[str] = []

    def refuse(what: str) -> None:
        refused.append(what)
        raise GeometryError(_compiled(what))

    try:
        with _without_compilers(refuse):
            yield
    except Exception as error:
        if refused:
            # Ending the capture may have raised another error over the one that says why.
            raise GeometryError(_compiled(refused[0])) from error
        did = violation(error)
        if did is None:
            raise
        raise GeometryError(f"the step cannot be recorded: {did}") from error


def _compiled(what: str) -> str:
    return (
        f"the step compiles {what} while it is recorded: the warm-up has to run every kernel that the recording runs, "
        "with the same shapes"
    )


@contextmanager
def _without_compilers(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call `refuse` in place of the compilers of kernels that this process has imported."""
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for holder, name, stand_in in _compilers(refuse):
            replaced.append((holder, name, getattr(holder, name)))
            setattr(holder, name, stand_in)
        yield
    finally:
        for holder, name, original in replaced:
            setattr(holder, name, original)


def _compilers(refuse: Callable[[str], None]) -> Iterator[tuple[Any, str, Any]]:
    """Where FlashInfer, Triton and CuTe DSL come by before they compile or load: object, attribute, stand-in."""
    flashinfer = getattr(sys.modules.get("flashinfer.jit.core"), "JitSpec", None)
    if flashinfer is not None:
        yield flashinfer, "build_and_load", lambda spec: refuse(f"FlashInfer's {spec.name}")
    triton = getattr(getattr(sys.modules.get("triton"), "knobs", None), "runtime", None)
    if triton is not None:
        yield triton, "jit_cache_hook", lambda **facts: refuse(f"the Triton kernel {facts.get('repr', '')}".rstrip())
    cute = sys.modules.get("cutlass.cute")
    if cute is not None and hasattr(cute, "compile"):
        yield cute, "compile", _RefusedCompile(refuse)


class _RefusedCompile:
    """Stands in for `cutlass.cute.compile`, which is called, and is indexed by options and then called."""

    def __init__(self, refuse: Callable[[str], None]):
        self._refuse = refuse

    def __getitem__(self, options: Any) -> "_RefusedCompile":
        return self

    def __call__(self, function: Any = None, *_: Any, **__: Any) -> None:
        self._refuse(f"the CuTe DSL kernel {getattr(function, '__name__', type(function).__name__)}")
