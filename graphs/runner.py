"""The one graph runner: any kind of step, recorded once a bucket and replayed on static buffers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..dispatch.budgets.geometry import StepGeometry
from ..dispatch.budgets.step_kinds import StepKind
from ..dispatch.collective_call import CollectiveCall
from ..dispatch.errors import GeometryError
from ..dispatch.moe import MoeExchange
from .backend import CaptureBackend, RecordedGraph
from .plan import CaptureEntry
from .record import RecordedGeometry
from .static import StaticBuffers

StepFunction = Callable[[Mapping[str, torch.Tensor], StepGeometry, CaptureEntry], torch.Tensor]
"""Runs a step on its input views, `(views, geometry, entry) -> output`; the output has as many rows as are due."""


@dataclass(frozen=True)
class GraphModel:
    """What the graphs of one model run.

    Attributes:
        step: the step itself; the same code runs eagerly, in rehearsal, in recording and in static replay.
        buffers: input buffers, shared by all kinds that run this model.
        max_requests: the most requests in a step.
        prepare: what the host does before a step on given inputs, outside any recording.
        finish: recorded after the step, on its whole output, padding included: `[N, ...]` to `[N, ...]`; see
            `GraphRunner.finished`.
    """

    step: StepFunction
    buffers: StaticBuffers
    max_requests: int
    prepare: Callable[[CaptureEntry, Mapping[str, torch.Tensor]], None]
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass
class _Recording:
    """A recorded step with what its finish made of the output; both are valid until the next replay of the pool."""

    finished: torch.Tensor | None = None
    graph: RecordedGraph = field(init=False)


class GraphRunner:
    """Graphs of one kind of step.

    Args:
        kind: its declaration.
        model: what it runs.
        exchange: of the experts, through which the step goes.
        backend: how steps are recorded.
    """

    def __init__(self, kind: StepKind, model: GraphModel, exchange: MoeExchange, backend: CaptureBackend):
        self.kind = kind
        self.buffers = model.buffers
        self.backend = backend
        self._model = model
        self._exchange = exchange
        self._rank = exchange.rank
        self._recordings: dict[CaptureEntry, _Recording] = {}

    def geometry(self, entry: CaptureEntry) -> StepGeometry:
        """The geometry of every step that this entry's graph runs; equal on every rank."""
        return StepGeometry.captured(
            self._exchange.layout, entry.num_tokens, capacity=self._exchange.path.held.capacity
        )

    def sizes(self, entry: CaptureEntry) -> dict[str, int]:
        """Rows of the input views: tokens after padding, requests, and rows whose output is due."""
        num_tokens = self.geometry(entry).num_tokens(self._rank)
        most = self._model.max_requests
        by_request = self.kind.num_requests(entry.bucket, most)
        return {
            "tokens": num_tokens,
            "requests": entry.num_tokens if self.kind.attends_by == "token" else by_request,
            "due": self.kind.num_due(entry.bucket, entry.tokens_per_request, most),
        }

    def rehearse(self, entry: CaptureEntry, capture_depth: int) -> RecordedGeometry:
        """Run the step's code without sending anything; returns what a recording would freeze."""
        with self._exchange.collectives.rehearsing() as calls:
            self._padded_step(entry)()
        return self._record_of(entry, calls, capture_depth)

    def warm_up(self, entry: CaptureEntry) -> None:
        """Run the step outside a recording; collective over all ranks."""
        self.backend.warm_up(self._finishing(entry, _Recording()))

    def record(self, entry: CaptureEntry, capture_depth: int) -> RecordedGeometry:
        """Record the step; collective over all ranks. Returns what was frozen."""
        recording = _Recording()
        with self._exchange.collectives.listing() as calls:
            recording.graph = self.backend.record(self._finishing(entry, recording), self.kind.model)
        self._recordings[entry] = recording
        return self._record_of(entry, calls, capture_depth)

    def discard(self) -> None:
        """Forget all graphs of this kind."""
        self._recordings.clear()

    def num_bytes(self, entry: CaptureEntry) -> int:
        return self._recordings[entry].graph.num_bytes

    def replay(
        self,
        entry: CaptureEntry,
        values: Mapping[str, torch.Tensor],
        num_due: int,
        on_host: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Copy in, pad, replay, slice out; collective over all ranks, which replay the same entry.

        Args:
            entry: which graph; equal on every rank.
            values: this rank's inputs, at most as many rows as the entry has; none at all on an idle rank.
            num_due: rows of the output that carry a result.
            on_host: the same inputs on the host, for what the host does before the step; unset: `values` are there.

        Raises:
            GeometryError: there is no such graph.
        """
        if entry not in self._recordings:
            raise GeometryError(f"rank {self._rank} has no graph {entry}")
        self._take(entry, values, on_host)
        return self._recordings[entry].graph.replay()[:num_due]

    def finished(self, entry: CaptureEntry, num_due: int) -> torch.Tensor:
        """What `finish` made of the due rows in the last replay of this entry, of which it was a part."""
        finished = self._recordings[entry].finished
        assert finished is not None, "a runner without finish"
        return finished[:num_due]

    def _padded_step(self, entry: CaptureEntry) -> Callable[[], torch.Tensor]:
        """The step on an empty batch: all padding, as an idle rank runs it."""
        self._take(entry, {})
        return lambda: self._step_on_views(entry)

    def _finishing(self, entry: CaptureEntry, recording: _Recording) -> Callable[[], torch.Tensor]:
        """The same, with what is recorded after it."""
        step = self._padded_step(entry)

        def run() -> torch.Tensor:
            output = step()
            if self._model.finish is not None:
                recording.finished = self._model.finish(output)
            return output

        return run

    def _take(
        self,
        entry: CaptureEntry,
        values: Mapping[str, torch.Tensor],
        on_host: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Copy a step's inputs in, pad them, and do what the host has to before they run."""
        self.buffers.fill(self.buffers.views(self.sizes(entry)), values)
        self._model.prepare(entry, values if on_host is None else on_host)

    def _step_on_views(self, entry: CaptureEntry) -> torch.Tensor:
        return self._model.step(self.buffers.views(self.sizes(entry)), self.geometry(entry), entry)

    def _record_of(
        self, entry: CaptureEntry, collectives: list[CollectiveCall], capture_depth: int
    ) -> RecordedGeometry:
        geometry = self.geometry(entry)
        lengths = geometry.buffer_lengths(self._rank)
        return RecordedGeometry(
            kind=entry.kind,
            bucket=entry.bucket,
            tokens_per_request=entry.tokens_per_request,
            layer=entry.layer,
            global_num_tokens_cpu=None if lengths.num_tokens is None else tuple(lengths.num_tokens),
            dp_buffer_length=lengths.global_length,
            padding_mode=geometry.padding_mode.name,
            runtime_max_tokens_per_rank=geometry.runtime_max_tokens_per_rank,
            static_buffers=self.buffers.shapes(self.sizes(entry)),
            held=self._exchange.path.held,
            capture_depth=capture_depth,
            collectives=tuple(collectives),
        )
