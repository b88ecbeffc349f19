"""Static input buffers: allocated once at their largest, shared by all buckets, copied into before every replay."""

from collections.abc import Mapping

import torch

from ..dispatch.errors import GeometryError
from .buffer_spec import BufferSpec


class StaticBuffers:
    """The input buffers of one memory pool.

    Args:
        specs: by name; equal on every rank.
        device: where they live.
    """

    def __init__(self, specs: Mapping[str, BufferSpec], device: torch.device):
        self._specs = dict(specs)
        # Steps run in inference mode and write these buffers; made inside it, nothing outside could.
        with torch.inference_mode(False):
            self._tensors = {
                name: torch.full(spec.shape, spec.padding, dtype=getattr(torch, spec.dtype), device=device)
                for name, spec in specs.items()
            }

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def views(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The leading rows of each buffer that a graph reads.

        Args:
            sizes: how many `tokens`, `requests` and `due` rows the graph has.

        Raises:
            GeometryError: a buffer has fewer rows.
        """
        views = {}
        for name, spec in self._specs.items():
            wanted = sizes.get(spec.rows, spec.shape[0])
            if wanted > self._tensors[name].shape[0]:
                raise GeometryError(
                    f"static buffer {name} holds {self._tensors[name].shape[0]} rows, the step has {wanted}"
                )
            views[name] = self._tensors[name][:wanted]
        return views

    def fill(self, views: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """Copy a step's inputs to the front of their views and pad the rest; one without a value is all padding."""
        for name, view in views.items():
            value = values.get(name)
            num_rows = 0 if value is None else value.shape[0]
            if value is not None:
                columns = value.shape[1] if value.dim() > 1 else None
                target = view[:num_rows] if columns is None else view[:num_rows, :columns]
                target.copy_(value)
                if columns is not None and columns < view.shape[1]:
                    view[:num_rows, columns:] = self._specs[name].padding
            view[num_rows:] = self._specs[name].padding
