"""The one graph runner: any kind of step, recorded once a bucket and replayed on static buffers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from ..dispatch.budgets.geometry import StepGeometry
from ..dispatch.budgets.step_kinds import StepKind
from ..dispatch.collective_call import CollectiveCall
from ..dispatch.dtypes import dtype_name
from ..dispatch.errors import GeometryError
from ..dispatch.moe import MoeExchange
from .backend import CaptureBackend, RecordedGraph
from .plan import CaptureEntry
from .record import BufferShape, RecordedGeometry
from .report import GraphUse
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
        finish: recorded after the step, on its whole output, padding included: `[N, ...]` to `[N, ...]`; what it
            makes comes with the output of each replay.
    """

    step: StepFunction
    buffers: StaticBuffers
    max_requests: int
    prepare: Callable[[CaptureEntry, Mapping[str, torch.Tensor]], None]
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass
class _Recording:
    """An entry's step with its inputs, and its graph.

    Attributes:
        entry: which step.
        geometry: of the step; equal on every rank.
        views: its rows of the static buffers.
        finished: what `finish` made of the last output; valid until the next replay of the pool.
        num_replays: how often the graph ran.
        graph: unset until the step is recorded.
    """

    entry: CaptureEntry
    geometry: StepGeometry
    views: Mapping[str, torch.Tensor]
    finished: torch.Tensor | None = None
    num_replays: int = 0
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

    def rehearse(self, entry: CaptureEntry, capture_depth: int) -> RecordedGeometry:
        """Run the step's code without sending anything; returns what a recording would freeze."""
        with self._exchange.collectives.rehearsing() as calls:
            padded = self._padded_step(entry)
            self._model.step(padded.views, padded.geometry, entry)
        return self._record_of(padded, calls, capture_depth)

    def warm_up(self, entry: CaptureEntry) -> None:
        """Run the step outside a recording; collective over all ranks."""
        self.backend.warm_up(partial(self._run, self._padded_step(entry)))

    def record(self, entry: CaptureEntry, capture_depth: int) -> RecordedGeometry:
        """Record the step; collective over all ranks. Returns what was frozen."""
        with self._exchange.collectives.listing() as calls:
            recording = self._padded_step(entry)
            recording.graph = self.backend.record(partial(self._run, recording), self.kind.model)
        self._recordings[entry] = recording
        return self._record_of(recording, calls, capture_depth)

    def discard(self) -> None:
        """Forget all graphs of this kind."""
        self._recordings.clear()

    def use(self, entry: CaptureEntry) -> GraphUse:
        """What its graph holds, and how often it ran."""
        recording = self._recordings[entry]
        return GraphUse(entry, recording.graph.num_bytes, recording.num_replays)

    def replay(
        self,
        entry: CaptureEntry,
        values: Mapping[str, torch.Tensor],
        num_due: int,
        on_host: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copy in, pad, replay, slice out; collective over all ranks, which replay the same entry.

        Args:
            entry: which graph; equal on every rank.
            values: this rank's inputs, at most as many rows as the entry has; none at all on an idle rank.
            num_due: rows of the output that carry a result.
            on_host: the same inputs on the host, for what the host does before the step; unset: `values` are there.

        Returns:
            The due rows of the output, and what `finish` made of them; `None` where the model has no `finish`.

        Raises:
            GeometryError: there is no such graph.
        """
        recording = self._recordings.get(entry)
        if recording is None:
            raise GeometryError(f"rank {self._rank} has no graph {entry}")
        recording.num_replays += 1
        self._take(recording, values, on_host)
        output, finished = recording.graph.replay(), recording.finished
        return output[:num_due], None if finished is None else finished[:num_due]

    def _padded_step(self, entry: CaptureEntry) -> _Recording:
        """The step on an empty batch: all padding, as an idle rank runs it."""
        geometry, most = self.geometry(entry), self._model.max_requests
        by_request = self.kind.num_requests(entry.bucket, most)
        sizes = {
            "tokens": geometry.num_tokens(self._rank),
            "requests": entry.num_tokens if self.kind.attends_by == "token" else by_request,
            "due": self.kind.num_due(entry.bucket, entry.tokens_per_request, most),
        }
        padded = _Recording(entry, geometry, self.buffers.views(sizes))
        self._take(padded, {})
        return padded

    def _take(
        self,
        recording: _Recording,
        values: Mapping[str, torch.Tensor],
        on_host: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Copy a step's inputs in, pad them, and do what the host has to before they run."""
        self.buffers.fill(recording.views, values)
        self._model.prepare(recording.entry, values if on_host is None else on_host)

    def _run(self, recording: _Recording) -> torch.Tensor:
        """The step on what its views hold, with what is recorded after it."""
        output = self._model.step(recording.views, recording.geometry, recording.entry)
        if self._model.finish is not None:
            recording.finished = self._model.finish(output)
        return output

    def _record_of(
        self, recording: _Recording, collectives: list[CollectiveCall], capture_depth: int
    ) -> RecordedGeometry:
        entry, geometry = recording.entry, recording.geometry
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
            static_buffers=tuple(
                BufferShape(name, tuple(view.shape), dtype_name(view.dtype)) for name, view in recording.views.items()
            ),
            held=self._exchange.path.held,
            capture_depth=capture_depth,
            collectives=tuple(collectives),
        )
