"""What a rank is built from and what it reports; free of PyTorch, since the driver carries both."""

import zlib

import msgspec

from ..dispatch.budgets.layout import Layout
from ..dispatch.budgets.limits import Limits, QuantisationKind
from ..dispatch.budgets.stored_coding import StoredCoding
from ..dispatch.paths.tuning import Tuning
from .config import WeightsName, WorkerConfig
from .model.spec import ModelSpec
from .request import SamplingParams

SUMS_MODULO = 1 << 128


class RankConfig(msgspec.Struct, frozen=True):
    """Everything a rank is built from; equal on every rank, and compared by its digest in every agreement.

    Attributes:
        spec: the model.
        layout: the arrangement of ranks.
        limits: bounds of a step, what the environment sets included.
        worker: how ranks compute.
        dispatch: resolved: a dispatcher, `local` for one rank, a fused way, or `measured`.
        experts: what computes the experts, resolved.
        quantisation: in which experts are computed.
        plugins: modules that register ways to the experts; imported before anything looks for one.
        tuning: how paths are chosen where they are measured.
        capacity: the most rows one rank may dispatch in one step, resolved; not multiplied by `ep_size`.
        block_size: tokens of a KV block.
        num_blocks: KV blocks, the padding block included; with `gpu_memory_utilization`, the most there may be. Ranks
            that have measured replace it by what they agreed on, which is then part of every agreement.
        weights: where they come from.
        stored: how experts are kept that stay in the bytes of their checkpoint; `None`: they are expanded.
        gpu_memory_utilization: the share of a GPU's memory to fill; `None`: `num_blocks` is settled.
        start_timeout_s: how long a rank waits for the slowest to read its weights; see `PlacementConfig`.
        default_sampling: of prompts that do not say; the ranks themselves get each request's own.
    """

    spec: ModelSpec
    layout: Layout
    limits: Limits
    worker: WorkerConfig
    dispatch: str
    experts: str
    quantisation: QuantisationKind
    tuning: Tuning
    capacity: int
    block_size: int
    num_blocks: int
    plugins: tuple[str, ...] = ()
    weights: WeightsName = "checkpoint"
    stored: StoredCoding | None = None
    gpu_memory_utilization: float | None = None
    start_timeout_s: float = 1800.0
    default_sampling: SamplingParams = SamplingParams()

    @property
    def held_as(self) -> str:
        """How ranks hold weights that are stored otherwise, for people; empty where files hold them in floats."""
        spec = self.spec
        if self.weights != "checkpoint" or spec.expanded_from is None:
            return ""
        expanded = f"{spec.expanded_from} expanded to {spec.dtype}"
        return (
            expanded if self.stored is None else f"experts kept as {self.stored.format} stores them, other {expanded}"
        )

    @property
    def expert_bytes(self) -> int:
        """Of all experts, as ranks hold them, all together."""
        return self.spec.expert_bytes if self.stored is None else self.spec.kept_expert_bytes(self.stored)

    @property
    def digest(self) -> int:
        return zlib.crc32(msgspec.msgpack.encode(self))


class KernelStatus(msgspec.Struct, frozen=True):
    """A kernel that a rank needs and that is compiled on first use.

    Attributes:
        label: what it is for.
        name: of the module that is compiled.
        is_built: whether this node's cache has it.
        cached_in: folder of that cache.
    """

    label: str
    name: str
    is_built: bool
    cached_in: str


class ReadFile(msgspec.Struct, frozen=True):
    """What one rank has read of a weight file; see `workers.model.weights_digest`.

    Attributes:
        name: of the file.
        dense: sum of hashes, modulo `SUMS_MODULO`, in hexadecimal, over tensors that every rank reads in full; equal on
            every rank.
        experts: likewise, over this rank's own experts.
    """

    name: str
    dense: str
    experts: str


class LoadReport(msgspec.Struct, frozen=True):
    """What a rank holds after loading. Bytes; seconds.

    Attributes:
        rank: which rank.
        dense_bytes: parameters held in full.
        expert_bytes: parameters of its own experts.
        kv_cache_bytes: keys and values.
        kv_cache_tokens: tokens that they are of, the padding block's not counted; equal on every rank.
        exchange_bytes: dispatch and expert buffers.
        load_seconds: time to load the weights.
        peak_memory_before: peak resident memory of the process before the weights were read.
        peak_memory: peak resident memory of the process after.
        layers: lines about what runs in each layer, and how long compiling took.
        experts: lines about the paths to the experts that were chosen and dropped; the same on every rank.
        files: what the rank has read of each weight file; empty with `weights: random`.
        held_as: how weights are held that files store otherwise; empty where they do not. Equal on every rank.
    """

    rank: int
    dense_bytes: int
    expert_bytes: int
    kv_cache_bytes: int
    kv_cache_tokens: int
    exchange_bytes: int
    load_seconds: float
    peak_memory_before: int
    peak_memory: int
    layers: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    files: tuple[ReadFile, ...] = ()
    held_as: str = ""


class Rendezvous(msgspec.Struct, frozen=True):
    """Where ranks meet, and what makes them known to each other there.

    Attributes:
        host: an address of rank 0's node.
        port: of it.
        secret: new for every set of ranks; what ranks leave in the store is sealed with it.
    """

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        return f"Rendezvous({self.host}:{self.port})"
