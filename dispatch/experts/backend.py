"""What every expert backend keeps: it computes the rows that a dispatcher brought to this rank.

- **Equal on every rank**: the backend's kind, its buffers' sizes, the layers in their order, and `tuning`, which the
  ranks agree on in `prepare`.
- **Before any step, outside inference mode**: `adopt` for each layer, then `prepare`. Both come more than once: a path
  is tried over one layer of each shape before it takes over all, and paths over several dispatchers share a backend.
  What was adopted or prepared before costs nothing again. From then on nothing is allocated, tuned or compiled for rows
  of a number that has been run before, so a step can be recorded after one run.
- **Rows that carry no token cost nothing**: extents follow the ids on the device, and no value is read back.
- **Undefined rows stay harmless**: ids may be any integer, hidden states and weights of slots without a pair may be
  NaN; the result of a row without a pair is zero.
- **Results repeat to the bit** where the backend says so in its docstring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from ..dispatchers.contract import Dispatched
    from ..moe_layer import MoeLayer
    from ..probe import HostGroup


class ExpertBackend(Protocol):
    """One way to compute received rows; see the module docstring for what it keeps.

    Attributes:
        name: what computes.
        num_bytes: of this rank's buffers.
        tuning: what was chosen for which rows; empty where nothing is tuned.
    """

    name: str

    @property
    def num_bytes(self) -> int: ...

    @property
    def tuning(self) -> str: ...

    def adopt(self, layer: MoeLayer) -> None:
        """Take note of one layer; what a backend keeps for it, it keeps by its `index`.

        Args:
            layer: with the experts of this rank, on its device, in the format that `layer.weights` names.

        Raises:
            ConfigError: on every rank alike, where the backend cannot compute these experts.
        """
        ...

    def prepare(self, group: HostGroup | None) -> None:
        """Compile and tune for all adopted layers; collective over `group`, whose ranks end with the same choice.

        It is attempted by all ranks together (`dispatch.probe.attempt`), which then know whose reason it was.

        Args:
            group: all ranks; `None` for one rank alone.

        Raises:
            ConfigError: on a rank that found nothing that runs.
            PeerGaveUp: on the others.
        """
        ...

    def run(self, layer: MoeLayer, dispatched: Dispatched) -> torch.Tensor:
        """`[R, H]` received rows -> `[R, H]`: weighted sums over this rank's experts, zero where it owns none.

        The result may live in `dispatched.combine_input_RH`.
        """
        ...
