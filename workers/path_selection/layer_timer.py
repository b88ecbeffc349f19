"""How long one MoE layer takes through a path, recorded and replayed as in a step."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...dispatch.budgets.geometry import StepGeometry
from ...dispatch.budgets.layout import Layout
from ...dispatch.expert_path import ExpertPath
from ...dispatch.moe_layer import MoeLayer
from ...dispatch.probe import HostGroup
from ...graphs.backend import CaptureBackend
from .sample_rows import SampleRows, random_rows

_TRIALS = 3
_POOL = "measure"
# Calls in one recording, each with rows of its own: the layers of a step do not find their weights in a cache either.
_CALLS = 4


class LayerTimer:
    """Measures layers on one rank; all ranks measure the same, in the same order.

    Args:
        layout: the arrangement of ranks, equal on every rank.
        group: all ranks, which meet before each trial.
        backend: how steps are recorded on this device.
        device: of the layers.
        capacity: the most rows a rank brings to any step, equal on every rank.
        repeats: replays of one trial, of a few calls each; equal on every rank.
    """

    def __init__(
        self,
        layout: Layout,
        group: HostGroup,
        backend: CaptureBackend,
        device: torch.device,
        capacity: int,
        repeats: int,
    ):
        self._layout = layout
        self._group = group
        self._backend = backend
        self._device = device
        self._capacity = capacity
        self._repeats = repeats

    @torch.inference_mode()
    def microseconds(self, path: ExpertPath, layer: MoeLayer, num_rows: int) -> float:
        """One layer with `num_rows` rows on every rank, the best of a few trials; collective over all ranks."""
        layout = self._layout
        geometry = StepGeometry.captured(layout, num_rows * layout.attn_tp_size, capacity=self._capacity)
        calls = [partial(path.run, layer, *self._rows(layer, num_rows, call), geometry) for call in range(_CALLS)]
        step = partial(_one_after_another, calls)
        self._group.meet()  # a rank that has failed so far, for want of memory say, never comes to what follows
        self._backend.warm_up(step)
        self._group.meet()
        graph = self._backend.record(step, _POOL)
        clock = self._on_gpu if self._device.type == "cuda" else self._on_cpu
        trials = []
        for _ in range(_TRIALS):
            self._group.meet()
            trials.append(clock(graph.replay) / (self._repeats * _CALLS))
        return min(trials)

    def _rows(self, layer: MoeLayer, num_rows: int, call: int) -> SampleRows:
        return random_rows(layer, num_rows, 1000 * (_CALLS * num_rows + call) + self._group.rank, self._device)

    def _on_gpu(self, replay: Callable[[], torch.Tensor]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replay()
        start.record()
        for _ in range(self._repeats):
            replay()
        end.record()
        torch.cuda.synchronize(self._device)
        return 1e3 * start.elapsed_time(end)

    def _on_cpu(self, replay: Callable[[], torch.Tensor]) -> float:
        started = time.perf_counter()
        for _ in range(self._repeats):
            replay()
        return 1e6 * (time.perf_counter() - started)


def _one_after_another(calls: Sequence[Callable[[], torch.Tensor]]) -> torch.Tensor:
    """The result of the last."""
    for call in calls:
        result = call()
    return result
