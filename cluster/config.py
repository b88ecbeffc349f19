"""The one thing a user writes: `PoolConfig`, from Python, from YAML or JSON, or from the command line's options."""

import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ..dispatch.budgets.capacity import CAPACITY_VARIABLE
from ..dispatch.budgets.layout import Layout
from ..dispatch.budgets.limits import Limits, QuantisationKind
from ..dispatch.errors import ConfigError
from ..dispatch.paths.capacity import dispatch_capacity
from ..dispatch.paths.problems import path_problems
from ..dispatch.paths.tuning import Tuning
from ..dispatch.registry import (
    AUTO,
    LOCAL,
    MEASURED,
    PLAIN_EXPERTS,
    experts_of,
    load_plugins,
    refuse_unknown_names,
    way_kinds,
)
from ..workers.config import (
    MAX_SECONDS,
    CacheConfig,
    DeviceName,
    DTypeName,
    GenerationConfigName,
    StoredWeightsName,
    WeightsName,
    WorkerConfig,
)
from ..workers.model.spec import ModelSpec
from ..workers.rank_config import RankConfig
from ..workers.request import SamplingParams
from ..workers.sizes.attention import records_prefill
from ..workers.sizes.kv_blocks import bytes_per_token
from .decoding import decode, read_mapping
from .driver.recovery import RecoveryConfig
from .stored_weights import stored_problems, with_stored_weights

_LABEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]*/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")

_MAX_PER_RANK = 1e6


class PlacementConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each rank asks of the cluster, and how long to wait for it.

    Attributes:
        cpus_per_rank: logical CPUs; unset: the rank's threads.
        gpus_per_rank: logical GPUs; 0 with worker.device `cuda` means 1.
        gpu_memory_bytes: what the GPU of a rank has, on GPUs: a pool that cannot fit is refused before anything starts.
            Unset: found out at start.
        domain_label: a label of Ray nodes; all ranks are placed on nodes that have the same value of it. Name the label
            that tells NVLink domains apart where one spans hosts. Unset: ranks are packed on as few nodes as possible.
        timeout_s: how long to wait for a place for every rank; on an autoscaled cluster, for nodes to come.
        start_timeout_s: how long ranks may take to start, meet and load.
    """

    cpus_per_rank: float | None = None
    gpus_per_rank: float = 0
    gpu_memory_bytes: int | None = None
    domain_label: str | None = None
    timeout_s: float = 600.0
    start_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("timeout_s", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"placement.{name}={getattr(self, name)} is not above 0")
            if not getattr(self, name) <= MAX_SECONDS:
                raise ConfigError(f"placement.{name}={getattr(self, name)} is not at most {MAX_SECONDS:g}")
        for name in ("cpus_per_rank", "gpus_per_rank"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"placement.{name}={getattr(self, name)} is below 0")
            if not (getattr(self, name) or 0) <= _MAX_PER_RANK:
                raise ConfigError(f"placement.{name}={getattr(self, name)} is not at most {_MAX_PER_RANK:g}")
        if self.domain_label is not None and not _LABEL.fullmatch(self.domain_label):
            raise ConfigError(
                f"placement.domain_label={self.domain_label!r} is not a label's key, like ray.io/gpu-domain"
            )
        if self.gpu_memory_bytes is not None and self.gpu_memory_bytes < 1:
            raise ConfigError(f"placement.gpu_memory_bytes={self.gpu_memory_bytes} is below 1")


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pool of ranks that serves one model.

    Attributes:
        model: a folder in Hugging Face format, at the same path on every node.
        ranks: how many ranks; `dp_size * attn_tp_size`. Every layer's experts are divided over all of them.
        min_ranks: the fewest that `resize` may make of them, and the fewest to go on with where a node does not come
            back; unset: any number for `resize`, and recovery waits for all.
        max_ranks: the most that `resize` may make of them; unset: any number.
        attn_tp_size: ranks that share one batch; `ranks / attn_tp_size` batches run side by side.
        dtype: of weights and computation; unset: the checkpoint's.
        weights: `checkpoint`, or `random` to measure a pool with nothing but the model's `config.json`.
        stored_weights: of quantised checkpoints: `expand` holds experts in the model's dtype; `keep` holds them in the
            bytes of their files, or refuses what cannot be kept; `auto` keeps them on GPUs where kernels read them. It
            is no default while those kernels have not run on a GPU here.
        dispatch: how tokens reach their experts. `measured` measures the ways there are at start-up and takes the best
            for each number of rows; `auto` is that on GPUs, and the all-gather on CPUs.
        experts: what computes them; `auto` is PyTorch, and where paths are measured whatever is fastest. `cutedsl` is
            QuACK's grouped GEMM pair, on Hopper GPUs in bf16; `triton` is our own, in bf16 and fp16.
        quantisation: in which experts are computed, from weights in the model's dtype: `fp8` (e4m3, one scale a weight
            tensor of an expert, calibrated scales for activations) and `fp8_blockwise` (scales of 128-blocks) are those
            of the mega kernel on Hopper; `nvfp4` is for CuTe DSL experts behind FlashInfer's all-to-all on Blackwell.
        tuning: how `measured` chooses.
        plugins: Python modules that register ways to the experts of their own (`dispatch.registry`); the process that
            launches the pool, its driver and every rank import them.
        address: HOST:PORT of a Ray cluster's GCS; unset: the session that this process is in, else the cluster that
            `RAY_ADDRESS` names, else one that is found, else a local one that holds the ranks. `local` starts one. In a
            process that is in a session already, any other address is refused.
        limits: bounds of a step.
        cache: size of the KV cache.
        worker: how a rank computes.
        placement: what ranks ask of the cluster.
        recovery: how often the ranks are started anew after a failure.
        generation_config: `model` makes what the model's generation_config.json says of sampling, lengths and stop
            texts the defaults of prompts that do not say, and refuses a model that asks for what is not supported.
            `ignore` serves it with a line that says what is not applied. End-of-sequence tokens are taken from it in
            both.
    """

    model: str
    ranks: int = 1
    min_ranks: int | None = None
    max_ranks: int | None = None
    attn_tp_size: int = 1
    dtype: DTypeName | None = None
    weights: WeightsName = "checkpoint"
    stored_weights: StoredWeightsName = "expand"
    dispatch: str = AUTO
    experts: str = AUTO
    quantisation: QuantisationKind = "none"
    plugins: tuple[str, ...] = ()
    address: str | None = None
    limits: Limits = Limits()
    cache: CacheConfig = CacheConfig()
    worker: WorkerConfig = WorkerConfig()
    placement: PlacementConfig = PlacementConfig()
    tuning: Tuning = Tuning()
    recovery: RecoveryConfig = RecoveryConfig()
    generation_config: GenerationConfigName = "ignore"

    @property
    def layout(self) -> Layout:
        return Layout(world_size=self.ranks, attn_tp_size=self.attn_tp_size)

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one rank's placement-group bundle."""
        cpus = self.placement.cpus_per_rank
        gpus = self.placement.gpus_per_rank or (1.0 if self.worker.device == "cuda" else 0.0)
        wanted = {"CPU": float(self.worker.threads) if cpus is None else cpus, "GPU": gpus}
        return {name: amount for name, amount in wanted.items() if amount}


def load_config(path: str | None, overrides: dict[str, Any] | None = None) -> PoolConfig:
    """Read a YAML or JSON file and lay the command line's options over it.

    Args:
        path: the file; `None` starts from nothing.
        overrides: nested like the file; `None` values and empty sections leave the file's.

    Raises:
        ConfigError: unreadable, a key that is there twice, an unknown one (with the nearest known one), or a value of
            another type or out of bounds.
    """
    source = f"--config {path}" if path is not None else "configuration"
    written = read_mapping(path, source) if path is not None else {}
    # A section whose lines are all commented out is as if it were not there.
    settings = {key: value for key, value in written.items() if value is not None}
    return _with_known_names(decode(_merge(settings, overrides or {}), PoolConfig, source), source)


def checked(config: PoolConfig) -> PoolConfig:
    """A configuration written in Python, held to the same types as one from a file; sections may be mappings.

    Raises:
        ConfigError: a value of another type, or out of bounds.
    """
    source = "configuration"
    return _with_known_names(decode(msgspec.to_builtins(config, enc_hook=str), PoolConfig, source), source)


def _with_known_names(config: PoolConfig, source: str) -> PoolConfig:
    """The configuration, whose plugins are imported and whose ways to the experts exist.

    Raises:
        ConfigError: a plugin that cannot be imported, or a name that nobody registered, with the known ones.
    """
    try:
        load_plugins(config.plugins)
        refuse_unknown_names(config.dispatch, config.experts)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return config


def resolve(config: PoolConfig, spec: ModelSpec, environment: Mapping[str, str] = os.environ) -> RankConfig:
    """Settle every default that depends on the model or the environment, and refuse what cannot work.

    Called once, on the driver's side: ranks get the result and look nothing up, so none can differ.

    Raises:
        ConfigError: experts that cannot be divided over the ranks, or a step that could exceed a buffer; names every
            such problem.
    """
    rank_config = resolve_unchecked(config, spec, environment)
    asked = spec.generation.problems(spec.path, config.generation_config)
    stored = stored_problems(config.stored_weights, rank_config)
    problems = (*bounds_problems(config), *asked, *stored, *configuration_problems(rank_config))
    if problems:
        raise ConfigError("; ".join(problems))
    return rank_config


def bounds_problems(config: PoolConfig) -> list[str]:
    """What is wrong with the sizes that the pool may have, each with the setting to change."""
    problems = []
    if config.min_ranks is not None and not 1 <= config.min_ranks <= config.ranks:
        problems.append(f"min_ranks={config.min_ranks} is not between 1 and ranks={config.ranks}: set it so")
    if config.max_ranks is not None and config.max_ranks < config.ranks:
        problems.append(f"max_ranks={config.max_ranks} is below ranks={config.ranks}: set it to that or more")
    return problems


def resolve_unchecked(config: PoolConfig, spec: ModelSpec, environment: Mapping[str, str] = os.environ) -> RankConfig:
    """As `resolve`, for configurations that may not work: `plan` shows those too."""
    load_plugins(config.plugins)
    refuse_unknown_names(config.dispatch, config.experts)
    layout = config.layout
    limits = with_environment(config.limits, environment)
    dispatch = resolve_dispatch(config)
    experts = PLAIN_EXPERTS if config.experts == AUTO else config.experts
    block_size = config.cache.block_size
    blocks_of_one_context = -(-spec.context_length // block_size)
    utilization = None
    if config.cache.num_tokens is not None:
        num_blocks = -(-config.cache.num_tokens // block_size)
    else:
        num_blocks = blocks_of_one_context * config.limits.max_running_requests
        if config.worker.device == "cuda":
            utilization = config.cache.gpu_memory_utilization
    resolved = RankConfig(
        spec=spec,
        layout=layout,
        limits=limits,
        worker=config.worker,
        dispatch=dispatch,
        experts=experts,
        quantisation=config.quantisation,
        plugins=config.plugins,
        tuning=config.tuning,
        capacity=dispatch_capacity(limits, layout, dispatch, experts),
        block_size=block_size,
        num_blocks=num_blocks + 1,
        weights=config.weights,
        gpu_memory_utilization=utilization,
        start_timeout_s=config.placement.start_timeout_s,
        default_sampling=spec.generation.sampling if config.generation_config == "model" else SamplingParams(),
    )
    resolved = with_stored_weights(config.stored_weights, config.experts, resolved)
    if limits.mixed_steps is None:
        settled = msgspec.structs.replace(limits, mixed_steps=records_prefill(resolved))
        resolved = msgspec.structs.replace(resolved, limits=settled)
    if config.cache.num_tokens is None and utilization is None:
        affordable = config.cache.max_bytes // (bytes_per_token(resolved) * block_size)
        num_blocks = max(blocks_of_one_context, min(num_blocks, affordable))
        resolved = msgspec.structs.replace(resolved, num_blocks=num_blocks + 1)
    return resolved


def configuration_problems(config: RankConfig) -> tuple[str, ...]:
    """Why these ranks would not work together, each with the setting to change; empty when they would."""
    problems = []
    try:
        config.spec.check_experts_divide(config.layout.world_size)
    except ConfigError as error:
        problems.append(str(error))
    return (*problems, *path_problems(config))


def refuse_unbuilt(limits: Limits, experts: str = AUTO, device: DeviceName = "cuda") -> None:
    """Refuse what can be planned for but not launched.

    Raises:
        ConfigError: a role other than `none`, or experts that the device does not have.
    """
    if limits.disaggregation_mode != "none":
        raise ConfigError(
            f"limits.disaggregation_mode={limits.disaggregation_mode!r} can be planned for, not launched: pools that "
            "hand requests over to each other do not exist yet; set it to 'none'"
        )
    if experts != AUTO and device not in experts_of(experts).devices:
        way = experts_of(experts)
        raise ConfigError(
            f"experts={experts!r} does not run on worker.device={device!r}, only on {way.runs_on}: set experts to "
            f"'auto' or {PLAIN_EXPERTS!r}, or worker.device to {next(iter(way.devices))!r}"
        )


def with_environment(limits: Limits, environment: Mapping[str, str]) -> Limits:
    """The limits with what the environment sets where they leave it open; an explicit setting wins.

    Raises:
        ConfigError: a value that is not an integer of 1 or more.
    """
    given = environment.get(CAPACITY_VARIABLE)
    if limits.max_dispatch_tokens_per_rank is not None or given is None:
        return limits
    try:
        capacity = int(given)
    except ValueError:
        raise ConfigError(
            f"the environment's {CAPACITY_VARIABLE}={given!r} is not an integer: set it to the most rows one rank may "
            "dispatch in one step, or unset it"
        ) from None
    if capacity < 1:
        raise ConfigError(f"the environment's {CAPACITY_VARIABLE}={capacity} is below 1: set it to 1 or more")
    return msgspec.structs.replace(limits, max_dispatch_tokens_per_rank=capacity)


def resolve_dispatch(config: PoolConfig) -> str:
    """The dispatcher a pool uses; `auto` is the all-gather on CPUs, and what measures best on GPUs.

    One rank has nothing to exchange. It measures experts where `measured` is named, or `auto` stands for that and no
    experts are named; quantised experts are behind an exchange alone.

    Raises:
        ConfigError: a dispatcher that the device does not have.
    """
    wanted, device = config.dispatch, config.worker.device
    available = way_kinds(device)
    if config.layout.world_size == 1:
        is_open = wanted == AUTO and config.experts == AUTO and available[0] == MEASURED
        return MEASURED if config.quantisation == "none" and (wanted == MEASURED or is_open) else LOCAL
    if wanted == AUTO:
        return available[0]
    if wanted not in available:
        raise ConfigError(f"dispatch={wanted!r} does not run on worker.device={device!r}: use one of {available}")
    return wanted


def _merge(settings: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for key, value in overrides.items():
        if isinstance(value, dict):
            section = merged.get(key, {})
            if not isinstance(section, dict):
                continue  # refused by its type later
            value = _merge(section, value)
            if not value and key not in merged:
                continue
        elif value is None:
            continue
        merged[key] = value
    return merged
