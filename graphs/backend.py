"""What it takes to record a step once and run it again: the interface, and static replay for CPUs.

Static replay runs the recorded function on the static buffers again. Plans, padding, buffers, agreement and lockstep
are those of CUDA graphs; only the last call differs, and the backend says so by its name.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Step = Callable[[], torch.Tensor]
"""Runs a step on static buffers and returns its output; takes and allocates nothing that changes between runs."""


class RecordedGraph(Protocol):
    """A recorded step.

    Attributes:
        num_bytes: memory that the recording holds beside the static buffers.
    """

    num_bytes: int

    def replay(self) -> torch.Tensor:
        """Run the step on what the static buffers hold now; the output is valid until the next replay of the pool."""
        ...


class CaptureBackend(Protocol):
    """Records steps. Warm-up and recording run the step's collectives, so all ranks call both together."""

    name: str

    def warm_up(self, step: Step) -> None:
        """Run the step outside a recording: what is compiled or allocated on first use is, before the recording."""
        ...

    def record(self, step: Step, pool: str) -> RecordedGraph:
        """Record the step into the memory pool of this name; graphs of different pools share no memory."""
        ...


class _StaticReplay:
    num_bytes = 0

    def __init__(self, step: Step):
        self._step = step

    def replay(self) -> torch.Tensor:
        return self._step()


class StaticReplayBackend:
    """Replays by calling the recorded function on the static buffers; for CPUs."""

    name = "static replay (no CUDA graph on this device)"

    def warm_up(self, step: Step) -> None:
        step()

    def record(self, step: Step, pool: str) -> RecordedGraph:
        step()
        return _StaticReplay(step)
