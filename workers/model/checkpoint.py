"""From safetensors files to a sharded model: a rank reads dense weights in full, and of the experts only its own.

Model code, name conversion and sharded reading are Transformers'. This module shows it the files as the checkpoint's
format has them (`formats`), says what is wrong with them before anything starts, and plugs our dispatch into the
expert-parallel hook while the model is still on the meta device, so that the loader never reads an expert that lives
elsewhere.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.distributed.expert_parallel import EPImplementationInterface, apply_expert_parallelism
from transformers.modeling_utils import LoadStateDictConfig

from ...dispatch.budgets.stored_coding import StoredCoding
from ...dispatch.errors import CheckpointError
from ...dispatch.experts.kept_experts import empty_stacks
from ...dispatch.moe import ExpertParallelExperts, MoeExchange
from ..attention.paged import ATTENTION_NAME, register_attention
from ..rank_config import ReadFile
from .formats.contract import Header, StoredTensor
from .formats.expanded import ExpandedTensor
from .formats.registry import format_of
from .inspection import build_meta_model, expert_parallel_plan, read_config
from .kept_weights import KeptWeights, StackSources, stacks_of
from .renaming import Renaming
from .spec import ModelSpec, MoeShape
from .weight_files import headers_of, open_slices
from .weights_digest import WeightsDigest

EP_IMPLEMENTATION_NAME = "expert_pool"
EXPERTS_IMPLEMENTATION = "grouped_mm"


class _ShapeOf:
    """A lazy tensor without values, which remembers whether the loader takes it."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype):
        self.is_taken = False
        self._shape, self._dtype = list(shape), dtype

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, key: Any) -> torch.Tensor:
        self.is_taken = True
        return torch.empty(self._shape, dtype=self._dtype, device="meta")


def check_weights(spec: ModelSpec) -> None:
    """Refuse a checkpoint that is incomplete, by a dry run of the loader on shapes; reads headers only.

    Raises:
        CheckpointError: a file is missing or truncated, or weights are missing, or of a shape or a dtype that the model
            or the checkpoint's format does not have.
    """
    checkpoint_format, headers = format_of(spec), headers_of(open_slices(spec.path))
    stored = checkpoint_format.tensors(headers)
    if absent := absent_expert_weights(stored, spec.moe):
        raise CheckpointError(f"model={spec.path!r}: {len(absent)} weight(s) missing: {_listed(absent)}")
    config = read_config(spec.path)
    model = build_meta_model(config, getattr(torch, spec.dtype))
    shapes = {name: _ShapeOf(one.shape, getattr(torch, spec.dtype)) for name, one in stored.items()}
    load_config = LoadStateDictConfig(
        dtype=getattr(torch, spec.dtype),
        weight_mapping=get_model_conversion_mapping(model),
        device_map={"": torch.device("meta")},
        ignore_mismatched_sizes=True,
    )
    loading_info, _ = convert_and_load_state_dict_in_model(model, shapes, load_config)
    model.mark_tied_weights_as_initialized(loading_info)
    model.tie_weights(missing_keys=loading_info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(loading_info)
    taken = {name: stored[name] for name, shape in sorted(shapes.items()) if shape.is_taken}
    _refuse_parts(spec.path, taken, headers, model)
    refuse_incomplete(spec.path, loading_info.to_dict() | {"conversion_errors": loading_info.conversion_errors})
    if problems := checkpoint_format.header_problems(headers, _are_projections(model, taken)):
        raise CheckpointError(f"model={spec.path!r}: {'; '.join(problems)}")


def _are_projections(model: PreTrainedModel, names: Iterable[str]) -> dict[str, bool]:
    """Of tensors that the loader takes, by their names in the files: whether they are weights of linear modules or of
    experts."""
    renamed = Renaming(model)
    experts = {name for name in expert_parallel_plan(model) if name in renamed.state and renamed.state[name].dim() == 3}
    linear = {f"{name}.weight" for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    projections = experts | linear
    return {name: renamed(name)[0] in projections for name in names}


def _refuse_parts(
    path: str, taken: Mapping[str, StoredTensor], headers: Mapping[str, Header], model: PreTrainedModel
) -> None:
    """Hold files to what their format has in them.

    The loader casts whatever it takes as it is: integers to floats, as quantised weights without their scales.
    """
    integers = {name.rpartition(".")[2] for name, held in model.state_dict().items() if not held.is_floating_point()}
    problems: dict[str, list[str]] = {}
    for name, tensor in taken.items():
        for part in tensor.parts.values():
            header = headers.get(part.name)
            if header is None:
                problems.setdefault("missing", []).append(part.name)
            elif header.dtype not in part.dtypes:
                if tensor.expand is not None or name.rpartition(".")[2] not in integers:
                    of_dtype = f"of a dtype that is not {_either(part.dtypes)}"
                    problems.setdefault(of_dtype, []).append(f"{part.name} is {header.dtype}")
            elif header.shape != part.shape:
                said = f"{part.name} is {list(header.shape)}, its format has {list(part.shape)}"
                problems.setdefault("of the wrong shape", []).append(said)
    _refuse(path, problems)


def _either(names: Sequence[str]) -> str:
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def absent_expert_weights(names: Iterable[str], moe: Sequence[MoeShape]) -> list[str]:
    """Names, as a file would spell them, of single experts' weights that are missing beside those that are there.

    Layers may differ in their number of experts; a file may name them otherwise than the model, but numbers them alike.

    The loader stacks the experts of a layer, so its own report names the stack and not the expert. Checkpoints that
    store stacks have no such names, and nothing is found here.
    """
    fewest = min(layer.num_experts for layer in moe)
    num_experts = {_layer_number(layer.name): layer.num_experts for layer in moe}
    numbers: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := re.match(r"(.*\bexperts\.)(\d+)(\..*)", name):
            numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
    return sorted(
        f"{prefix}{number}{suffix}"
        for (prefix, suffix), present in numbers.items()
        for number in range(num_experts.get(_layer_number(prefix), fewest))
        if number not in present
    )


def _layer_number(name: str) -> int | None:
    match = re.search(r"\.(\d+)\.", name)
    return int(match[1]) if match else None


def refuse_incomplete(path: str, loading_info: dict[str, Any]) -> None:
    """A weight that is missing would be initialised at random; refuse instead."""
    failed: dict[str, str] = loading_info.get("conversion_errors") or {}
    problems = {
        "missing": sorted(set(loading_info["missing_keys"]) - failed.keys()),
        "of the wrong shape": sorted(
            f"{name} is {list(found)}, the model has {list(wanted)}"
            for name, found, wanted in loading_info["mismatched_keys"]
        ),
        "whose parts do not fit together": sorted(
            f"{name} ({error.strip().splitlines()[-1]})" for name, error in failed.items()
        ),
    }
    _refuse(path, problems)


def _refuse(path: str, problems: Mapping[str, list[str]]) -> None:
    for what, names in problems.items():
        if names:
            raise CheckpointError(f"model={path!r}: {len(names)} weight(s) {what}: {_listed(names)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def load_sharded_model(
    spec: ModelSpec,
    exchange: MoeExchange,
    ep_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    device: torch.device,
    coding: StoredCoding | None = None,
) -> tuple[PreTrainedModel, tuple[ReadFile, ...]]:
    """Load this rank's share of the model, ready for inference with our attention and dispatch.

    Args:
        spec: what the folder holds; equal on every rank.
        exchange: this rank's dispatcher and step geometry; every experts module is bound to it.
        ep_mesh: all ranks.
        tp_mesh: a mesh of one rank: batches are shared by our own scatter, not by Transformers' tensor parallelism.
        device: where the model goes.
        coding: of experts that are kept as they are stored, equal on every rank; `None`: they are expanded.

    Returns:
        The model, and what was read of each file.

    Raises:
        CheckpointError: weights are missing, of the wrong shape, or stored as no weights can be.
    """
    digest, dtype = WeightsDigest(), getattr(torch, spec.dtype)
    slices = open_slices(spec.path, digest)
    stored = format_of(spec).tensors(headers_of(slices))
    kept = None if coding is None else _kept_of(spec, coding, stored)
    sharded_class = sharded_class_of(spec, exchange, ep_mesh, tp_mesh, keeps_experts=kept is not None)
    expanded = {name: one for name, one in stored.items() if kept is None or name not in kept.tensors}
    try:
        model, loading_info = sharded_class.from_pretrained(
            None,
            config=read_config(spec.path),
            state_dict=_as_plain(expanded, slices, dtype),
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=EXPERTS_IMPLEMENTATION,
            distributed_config=DistributedConfig(),
            output_loading_info=True,
        )
        if kept is not None:
            loading_info["missing_keys"] = set(loading_info["missing_keys"]) - kept.parameters
        refuse_incomplete(spec.path, loading_info)
        keep_local_shards(model)
        model = model.to(device)
        if kept is not None:
            kept.read_into(exchange, model, slices, dtype)
    except CheckpointError as error:  # of a tensor, which does not know the folder
        named = f"model={spec.path!r}: "
        raise CheckpointError(named + str(error).removeprefix(named)) from error
    return model.eval().requires_grad_(False), digest.summed()


def _kept_of(spec: ModelSpec, coding: StoredCoding, stored: Mapping[str, StoredTensor]) -> KeptWeights:
    model = build_meta_model(read_config(spec.path), getattr(torch, spec.dtype))
    stacks = stacks_of(model, spec.moe)
    wanted = [name for names in stacks.values() for name in names.values()]
    return KeptWeights(coding, stored, StackSources(model).find(list(stored), wanted), stacks)


def _as_plain(stored: Mapping[str, StoredTensor], slices: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Lazy tensors as a plain checkpoint of this dtype would have them, by name."""
    return {
        name: slices[one.as_it_is] if one.as_it_is is not None else ExpandedTensor(one, slices, dtype)
        for name, one in stored.items()
    }


def sharded_class_of(
    spec: ModelSpec,
    exchange: MoeExchange,
    ep_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    keeps_experts: bool = False,
) -> type[PreTrainedModel]:
    """The model's class, with its experts modules bound to `exchange`; without their projections where those are kept
    as they are stored."""
    register_attention()
    EPImplementationInterface.register(EP_IMPLEMENTATION_NAME, partial(ExpertParallelExperts, exchange=exchange))
    model_class = type(build_meta_model(read_config(spec.path), getattr(torch, spec.dtype)))
    empty = [shape.name for shape in spec.moe] if keeps_experts else []
    return _with_expert_parallelism(model_class, ep_mesh, tp_mesh, empty)


def keep_local_shards(model: PreTrainedModel) -> None:
    """Plain tensors of this rank's own share in the place of distributed ones."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, DTensor):
                module._parameters[name] = torch.nn.Parameter(parameter.to_local(), requires_grad=False)


def _with_expert_parallelism(
    model_class: type[PreTrainedModel], ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, empty: Sequence[str]
) -> type[PreTrainedModel]:
    """The model class with expert parallelism alone as its distribution: no tensor parallelism, no FSDP.

    Args:
        model_class: of the model.
        ep_mesh, tp_mesh: see `load_sharded_model`.
        empty: experts modules that are loaded without their stacked projections.
    """

    def prepare_distribute_model(
        cls: type, distributed_config: DistributedConfig, device_map: Any = None
    ) -> tuple[Any, Any, None]:
        return distributed_config, device_map, None

    def maybe_distribute_model(
        cls: type, model: PreTrainedModel, distributed_config: DistributedConfig, mesh_manager: Any
    ) -> PreTrainedModel:
        model = apply_expert_parallelism(model, ep_mesh, tp_mesh, expert_parallel_plan(model), EP_IMPLEMENTATION_NAME)
        for name in empty:
            empty_stacks(model.get_submodule(name))
        return model

    methods = {
        "prepare_distribute_model": classmethod(prepare_distribute_model),
        "maybe_distribute_model": classmethod(maybe_distribute_model),
        "__module__": model_class.__module__,
    }
    return type(model_class.__name__, (model_class,), methods)


def expert_bytes(model: PreTrainedModel) -> int:
    """Bytes of expert parameters that this rank holds; of those that are kept as they are stored, see `KeptExperts`."""
    plan = expert_parallel_plan(model)
    return sum(parameter.nbytes for name, parameter in model.named_parameters() if name in plan)
