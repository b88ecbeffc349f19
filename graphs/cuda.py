"""CUDA graphs as a capture backend."""

import weakref
from typing import Any

import torch

from .backend import RecordedGraph, Step

_WARM_UP_RUNS = 2


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
        graphs = self._graphs.setdefault(pool, weakref.WeakSet())
        if not graphs:
            # PyTorch ends a pool with the last graph in it, and refuses its handle from then on.
            self._pools[pool] = torch.cuda.graph_pool_handle()
        free_before, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pools[pool], stream=self._stream):
            output = step()
        torch.cuda.synchronize(self._device)
        free_after, _ = torch.cuda.mem_get_info(self._device)
        recorded = _CudaGraph(graph, output, max(0, free_before - free_after))
        graphs.add(recorded)
        return recorded
