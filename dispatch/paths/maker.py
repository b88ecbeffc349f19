"""Making a way to the experts by its name, and saying beforehand why a rank cannot."""

import importlib
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from ..budgets.budget import ExchangeBudget, RowFormat
from ..budgets.layout import Layout
from ..budgets.limits import QuantisationKind
from ..collectives import Collectives
from ..dispatchers.allgather import AllGatherDispatcher
from ..dispatchers.alltoall import AllToAllDispatcher
from ..dispatchers.contract import Dispatcher
from ..dispatchers.local import LocalDispatcher
from ..errors import ConfigError
from ..experts.backend import ExpertBackend
from ..experts.checks import refuse_unsupported
from ..experts.nvfp4_experts import Nvfp4Experts, architecture_problem
from ..experts.pair_budget import PairBudget
from ..experts.torch_experts import TorchExperts
from ..moe_layer import MoeLayer
from ..probe import HostGroup
from .fastest import PathCost
from .mega import MegaPath, refuse_experts
from .mega_kernels import MegaKernels
from .path import DispatchedPath, ExpertPath, MemberPath
from .table import PathName

# The first architecture of which whole racks are one NVLink domain.
_NVLINK_BETWEEN_HOSTS = 10


@dataclass(frozen=True)
class PathMaker:
    """What every path of one rank is made from.

    Attributes:
        collectives: through which steps exchange.
        group: process group of all ranks.
        layout: the arrangement of ranks, equal on every rank.
        rank: this rank.
        device: where rows are.
        budget: sizes of exchange buffers, equal on every rank.
        pair_budget: sizes of the buffers of CuTe DSL experts, equal on every rank.
        formats: of rows, for each MoE layer with its number of experts; equal on every rank.
        quantisation: of mega kernels, equal on every rank.
        peer_timeout_s: bound on waits for a peer inside a kernel, where the kernel has one.
        records_graphs: whether steps are recorded, equal on every rank.
    """

    collectives: Collectives
    group: dist.ProcessGroup
    layout: Layout
    rank: int
    device: torch.device
    budget: ExchangeBudget
    pair_budget: PairBudget
    formats: tuple[tuple[int, RowFormat], ...]
    quantisation: QuantisationKind
    peer_timeout_s: float
    records_graphs: bool
    _dispatchers: dict[str, Dispatcher] = field(init=False, default_factory=dict)
    _experts: dict[str, ExpertBackend] = field(init=False, default_factory=dict)

    @cached_property
    def kernels(self) -> MegaKernels:
        """Prepared weights, which mega kernels of all capacities share."""
        return MegaKernels(self.group, self.layout, self.rank, self.device, self.quantisation)

    def cost_of(self, name: PathName, path: ExpertPath) -> PathCost:
        """What keeping a path costs on this rank; paths over one dispatcher or backend share its buffers."""
        if isinstance(path, DispatchedPath):
            parts = {name.dispatch: path.dispatcher.num_bytes, name.experts: path.experts.num_bytes}
            return PathCost(parts, name.weights)
        return PathCost({str(name): path.held.workspace_bytes}, name.weights)

    def refusal(self, name: PathName, layers: Sequence[MoeLayer], host_of_first: str) -> str | None:
        """Why this rank cannot take the path, found without communicating; what it raises is a reason too.

        Args:
            name: of the path.
            layers: it would compute.
            host_of_first: the host name of rank 0.
        """
        if name.experts == "torch" and name.dispatch != "flashinfer":
            return None
        if self.device.type != "cuda":
            return f"worker.device is {self.device.type}, {name} needs NVIDIA GPUs"
        reason: str | None = None
        if name.dispatch in ("flashinfer", "mega"):
            is_elsewhere = socket.gethostname() != host_of_first
            if is_elsewhere and torch.cuda.get_device_capability(self.device)[0] < _NVLINK_BETWEEN_HOSTS:
                return (
                    f"it is on {socket.gethostname()}, rank 0 on {host_of_first}: Hopper hosts share no NVLink; "
                    "dispatch='allgather' exchanges over NCCL instead"
                )
            reason = _import_problem("flashinfer.moe_ep") or _peer_problem(self.device)
        if reason is None and name.dispatch == "flashinfer":
            reason = _link_problem()
        if reason is None and name.is_mega:
            reason = self._hopper_problem() or self._weights_problem(layers, mega=True)
            reason = reason or _import_problem("nvshmem.core") or _import_problem("cutlass")
        if reason is None and name.experts == "cutedsl":
            reason = self._hopper_problem() or self._weights_problem(layers, mega=False)
            reason = reason or _import_problem("triton") or _import_problem("quack")
        if reason is None and name.experts == "nvfp4":
            reason = architecture_problem(torch.cuda.get_device_capability(self.device))
        return reason

    def make(self, name: PathName) -> MemberPath:
        """The path; collective over all ranks, which make the same paths in the same order.

        Raises:
            ConfigError: the name of no path.
        """
        if name.capacity is not None:
            return MegaPath(self.collectives, self.kernels, self.rank, name.capacity)
        self.make_local(name)
        if name.dispatch not in self._dispatchers:
            self._dispatchers[name.dispatch] = self._dispatcher(name.dispatch)
        return DispatchedPath(self._dispatchers[name.dispatch], self._experts[name.experts])

    def make_local(self, name: PathName) -> str:
        """Make what of a path takes no other rank, so that a failure is known before any rank waits for this one.

        Returns:
            The kind of experts.
        """
        if not name.is_mega:
            if name.experts not in ("torch", "cutedsl", "nvfp4"):
                raise ConfigError(
                    f"path {str(name)!r}: no experts {name.experts!r} are known; use torch, cutedsl or nvfp4"
                )
            if name.experts not in self._experts:
                self._experts[name.experts] = self._backend(name.experts)
        return name.experts

    def give_up(self, name: PathName, kept: Collection[PathName], group: HostGroup) -> None:
        """Give up what some rank could not make, or prepare, of a path; collective over all ranks, which are `group`.

        The next path over it is then made by all ranks again: making a dispatcher, and tuning experts, takes them all.

        Args:
            name: of the path.
            kept: paths that all ranks have made.
            group: all ranks.
        """
        if name.experts not in {other.experts for other in kept}:
            self._experts.pop(name.experts, None)
        everywhere = set.intersection(*map(set, group.gather(list(self._dispatchers), list[str])))
        for kind in [kind for kind in self._dispatchers if kind not in everywhere]:
            self._dispatchers.pop(kind).close()

    def keep_only(self, names: Sequence[PathName], group: HostGroup) -> None:
        """Give up what none of these paths uses; collective over all ranks, which are `group`."""
        for kind in [kind for kind in self._dispatchers if kind not in {name.dispatch for name in names}]:
            self._dispatchers.pop(kind).close()
        for kind in [kind for kind in self._experts if kind not in {name.experts for name in names}]:
            del self._experts[kind]
        self.kernels.keep_only({name.capacity for name in names if name.capacity is not None}, group)

    def _backend(self, kind: str) -> ExpertBackend:
        if kind != "nvfp4":
            return make_experts(kind, self.pair_budget, self.device)
        return Nvfp4Experts(self.rank, self.records_graphs, self.device)

    def _dispatcher(self, kind: str) -> Dispatcher:
        if kind != "flashinfer":
            return make_dispatcher(kind, self.collectives, self.rank, self.budget, self.device)
        from ..dispatchers.flashinfer_alltoall import FlashInferDispatcher

        return FlashInferDispatcher(
            self.collectives,
            self.group,
            self.layout,
            self.rank,
            self.budget.capacity,
            list(self.formats),
            self.peer_timeout_s,
            self.device,
        )

    def _hopper_problem(self) -> str | None:
        major, minor = torch.cuda.get_device_capability(self.device)
        return None if (major, minor) == (9, 0) else f"its GPU is SM{major}{minor}, the kernel needs SM90 (Hopper)"

    def _weights_problem(self, layers: Sequence[MoeLayer], mega: bool) -> str | None:
        try:
            for layer in layers:
                if mega:
                    refuse_experts(layer.experts.module, layer.name, self.quantisation)
                else:
                    refuse_unsupported(layer.experts.module, layer.name, "experts='cutedsl'", "experts='torch'")
        except ConfigError as error:
            return str(error)
        return None


def make_dispatcher(
    kind: str, collectives: Collectives, rank: int, budget: ExchangeBudget, device: torch.device
) -> Dispatcher:
    """The dispatcher of this kind, with its buffers allocated; every rank makes the same kind with the same budget.

    Args:
        kind: `local` for a pool of one rank, `allgather` or `alltoall`.
        collectives: through which everything is sent.
        rank: this rank.
        budget: sizes of the buffers.
        device: where the rows live.
    """
    # Steps run in inference mode and write these buffers; a tensor made inside it could not be written outside.
    with torch.inference_mode(False):
        if kind == "local":
            return LocalDispatcher(budget.capacity)
        if kind == "allgather":
            return AllGatherDispatcher(collectives, rank, budget, device)
        assert kind == "alltoall", kind
        return AllToAllDispatcher(collectives, rank, budget, device)


def make_experts(kind: str, budget: PairBudget | None, device: torch.device) -> ExpertBackend:
    """The expert backend of this kind; every rank makes the same kind with the same budget.

    Args:
        kind: `torch`, or `cutedsl` for QuACK's grouped GEMM pair on Hopper GPUs.
        budget: of the buffers of `cutedsl`.
        device: where the rows live.

    Raises:
        ConfigError: a GPU or a QuACK that `cutedsl` does not run on.
    """
    if kind == "torch":
        return TorchExperts(device)
    assert kind == "cutedsl", kind
    assert budget is not None, "CuTe DSL experts have buffers"
    from ..experts.quack_experts import QuackExperts

    return QuackExperts(budget, device)


def copy_bytes(layers: Sequence[MoeLayer], quantisation: QuantisationKind) -> int:
    """Bytes of the weights of these layers in the mega kernel's layout, as far as they are a copy.

    In bfloat16 the second projection is the model's own tensor seen the other way round; in fp8 both are new, a byte
    a number.
    """
    if quantisation == "none":
        return sum(layer.parameters["gate_up_proj"].nbytes for layer in layers)
    return sum(weights.numel() for layer in layers for weights in layer.parameters.values())


def _import_problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # libraries for GPUs raise whatever they like where there is none
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


def _peer_problem(device: torch.device) -> str | None:
    """Only for GPUs that this process sees: with Ray's isolation it sees its own."""
    own = device.index or 0
    for peer in range(torch.cuda.device_count()):
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return f"its GPU {own} cannot reach the memory of GPU {peer}"
    return None


def _link_problem() -> str | None:
    """What FlashInfer's all-to-all asks of the current GPU, which it says to its log alone; raises what NVML does."""
    from flashinfer.comm.mnnvl import MnnvlMemory

    if MnnvlMemory.supports_mnnvl():
        return None
    return "its GPU has no NVLink to peers, or not all are up (`nvidia-smi nvlink --status`)"
