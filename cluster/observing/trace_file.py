"""A file of the steps of all ranks in Chrome's trace format, which Perfetto and chrome://tracing open."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...dispatch.errors import ConfigError, ExpertPoolError
from ...workers.observing.trace import RankTrace
from ..config import PoolConfig

TRACED_STEPS = 10_000


class TraceFile:
    """Where `generate --trace` writes.

    Args:
        path: of the file, which is made at once, and keeps what it holds until it is written.
        others: files of the same run, by the option that names them: none of them may be written over.

    Raises:
        ConfigError: it cannot be written, or is one of the others.
    """

    def __init__(self, path: str, others: Mapping[str, str | None] | None = None):
        self._path = Path(path)
        for option, other in (others or {}).items():
            if other is not None and os.path.realpath(other.removeprefix("file://")) == os.path.realpath(path):
                raise ConfigError(f"--trace {path}: is the file of {option}, which it would write over; name another")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("ab").close()
        except OSError as error:
            raise ConfigError(f"--trace {path}: cannot be written: {error.strerror}") from error

    def traced(self, config: PoolConfig) -> PoolConfig:
        """The same pool with ranks that remember their steps; as many as it says, else the last 10,000."""
        if config.worker.trace_steps:
            return config
        worker = msgspec.structs.replace(config.worker, trace_steps=TRACED_STEPS)
        return msgspec.structs.replace(config, worker=worker)

    def write(self, traces: Sequence[RankTrace]) -> str:
        """Write the file; returns a line about it.

        Raises:
            ExpertPoolError: it did not fit, or cannot be written any more.
        """
        try:
            self._path.write_bytes(msgspec.json.encode(chrome_trace(traces)))
        except OSError as error:
            raise ExpertPoolError(f"--trace {self._path}: cannot be written: {error.strerror}") from error
        steps = max(len({event.step for event in trace.events}) for trace in traces)
        dropped = max(trace.dropped_steps for trace in traces)
        before = f", {dropped} before them forgotten" if dropped else ""
        return f"trace: the last {steps} steps of {len(traces)} ranks in {self._path}{before}"


def chrome_trace(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """One process for every rank, with a complete event for every stage; times in microseconds from the first.

    Args:
        traces: with all times on one clock.
    """
    start = min((event.began for trace in traces for event in trace.events), default=0.0)
    events: list[dict[str, Any]] = []
    for trace in traces:
        for name, args in (
            ("process_name", {"name": f"rank {trace.rank}"}),
            ("process_sort_index", {"sort_index": trace.rank}),
            ("thread_name", {"name": "step loop"}),
        ):
            events.append({"ph": "M", "name": name, "pid": trace.rank, "tid": 0, "args": args})
        for event in trace.events:
            events.append(
                {
                    "ph": "X",
                    "name": event.stage,
                    "cat": event.kind,
                    "pid": trace.rank,
                    "tid": 0,
                    "ts": (event.began - start) * 1e6,
                    "dur": (event.ended - event.began) * 1e6,
                    "args": {
                        "step": event.step,
                        "kind": event.kind,
                        "num_tokens": event.num_tokens,
                        "graph": event.graph,
                    },
                }
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}
