"""From safetensors files to a sharded model: a rank reads dense weights in full, and of the experts only its own.

Model code, name conversion and sharded reading are Transformers'. This module finds the files, says what is wrong with
them before anything starts, and plugs our dispatch into the expert-parallel hook while the model is still on the meta
device, so that the loader never reads an expert that lives elsewhere.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.distributed.expert_parallel import EPImplementationInterface, apply_expert_parallelism
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ...dispatch.errors import CheckpointError
from ...dispatch.moe import ExpertParallelExperts, MoeExchange
from ..attention.paged import ATTENTION_NAME, register_attention
from ..rank_config import ReadFile
from .inspection import build_meta_model, expert_parallel_plan, read_config
from .spec import ModelSpec, MoeShape
from .weights_digest import DigestedSlice, WeightsDigest

EP_IMPLEMENTATION_NAME = "expert_pool"
EXPERTS_IMPLEMENTATION = "grouped_mm"
_FLOATS = ("F64", "F32", "F16", "BF16")


def weight_files(path: str) -> list[Path]:
    """The safetensors files of a model folder, in order, as Transformers prefers them: what `transformers_weights` of
    `config.json` names, a single file, an index with its shards.

    Raises:
        CheckpointError: there are none, or what the configuration or the index names is missing or no such file.
    """
    folder = Path(path)
    first = _named_in_config(folder)
    if first is None:
        has_index = not (folder / SAFE_WEIGHTS_NAME).is_file() and (folder / SAFE_WEIGHTS_INDEX_NAME).is_file()
        first = SAFE_WEIGHTS_INDEX_NAME if has_index else SAFE_WEIGHTS_NAME
    is_index = first.endswith(".index.json")
    files = [folder / first]
    if is_index and files[0].is_file():
        try:
            weight_map: dict[str, str] = json.loads(files[0].read_text())["weight_map"]
            files = [folder / name for name in sorted(set(weight_map.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"model={path!r}: {first} cannot be read: {error!r}") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        hint = "" if is_index else " (weights have to be in safetensors format)"
        raise CheckpointError(f"model={path!r}: weight files missing: {', '.join(missing)}{hint}")
    return files


def _named_in_config(folder: Path) -> str | None:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"model={str(folder)!r}: its config.json cannot be read: {error}") from error
    name = config.get("transformers_weights") if isinstance(config, dict) else None
    if name is None:
        return None
    endings = (".safetensors", ".safetensors.index.json")
    if not isinstance(name, str) or not name.endswith(endings) or Path(name).name != name:
        raise CheckpointError(
            f"model={str(folder)!r}: transformers_weights={name!r} in its config.json names no file of the folder "
            f"that ends in {' or '.join(endings)}"
        )
    return name


def open_slices(path: str, digest: WeightsDigest | None = None) -> dict[str, Any]:
    """Every tensor of the checkpoint as a lazy slice, by its name in the file; only headers are read.

    `pread` instead of the default memory map: a mapped file counts towards the rank's memory as it is read.

    Args:
        path: of the model folder.
        digest: takes in whatever is read of them.

    Raises:
        CheckpointError: a file is missing, truncated or not in safetensors format.
    """
    slices: dict[str, Any] = {}
    for file in weight_files(path):
        try:
            handle = safe_open(file, framework="pt", device="cpu", backend="pread")
            opened = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"model={path!r}: {file.name} is truncated or not in safetensors format: {error}"
            ) from error
        if digest is not None:
            opened = {name: DigestedSlice(piece, file.name, name, digest) for name, piece in opened.items()}
        slices.update(opened)
    return slices


class _ShapeOf:
    """A lazy tensor without values, which remembers whether the loader takes it."""

    def __init__(self, piece: Any, dtype: torch.dtype):
        self.file_dtype: str = piece.get_dtype()
        self.is_taken = False
        self._shape, self._dtype = piece.get_shape(), dtype

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, key: Any) -> torch.Tensor:
        self.is_taken = True
        return torch.empty(self._shape, dtype=self._dtype, device="meta")


def check_weights(spec: ModelSpec) -> None:
    """Refuse a checkpoint that is incomplete, by a dry run of the loader on shapes; reads headers only.

    Raises:
        CheckpointError: a file is missing or truncated, or weights are missing, of the wrong shape or no floats.
    """
    slices = open_slices(spec.path)
    if absent := absent_expert_weights(slices, spec.moe):
        raise CheckpointError(f"model={spec.path!r}: {len(absent)} weight(s) missing: {_listed(absent)}")
    config = read_config(spec.path)
    model = build_meta_model(config, getattr(torch, spec.dtype))
    shapes = {name: _ShapeOf(piece, getattr(torch, spec.dtype)) for name, piece in slices.items()}
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
    refuse_incomplete(spec.path, loading_info.to_dict() | {"conversion_errors": loading_info.conversion_errors})
    _refuse_casts(spec.path, shapes, model)


def _refuse_casts(path: str, shapes: Mapping[str, _ShapeOf], model: PreTrainedModel) -> None:
    """The loader casts whatever it takes: integers to floats, as quantised weights without their scales."""
    integers = {name.rpartition(".")[2] for name, held in model.state_dict().items() if not held.is_floating_point()}
    cast = [
        f"{name} is {shape.file_dtype}"
        for name, shape in sorted(shapes.items())
        if shape.is_taken and shape.file_dtype not in _FLOATS and name.rpartition(".")[2] not in integers
    ]
    if cast:
        raise CheckpointError(
            f"model={path!r}: {len(cast)} weight(s) of a dtype that is not {', '.join(_FLOATS[:-1])} or {_FLOATS[-1]}: "
            f"{_listed(cast)}"
        )


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
    for what, names in problems.items():
        if names:
            raise CheckpointError(f"model={path!r}: {len(names)} weight(s) {what}: {_listed(names)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def load_sharded_model(
    spec: ModelSpec, exchange: MoeExchange, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh
) -> tuple[PreTrainedModel, tuple[ReadFile, ...]]:
    """Load this rank's share of the model, ready for inference with our attention and dispatch.

    Args:
        spec: what the folder holds; equal on every rank.
        exchange: this rank's dispatcher and step geometry; every experts module is bound to it.
        ep_mesh: all ranks.
        tp_mesh: a mesh of one rank: batches are shared by our own scatter, not by Transformers' tensor parallelism.

    Returns:
        The model, and what was read of each file.

    Raises:
        CheckpointError: weights are missing or of the wrong shape.
    """
    digest = WeightsDigest()
    sharded_class = sharded_class_of(spec, exchange, ep_mesh, tp_mesh)
    model, loading_info = sharded_class.from_pretrained(
        None,
        config=read_config(spec.path),
        state_dict=open_slices(spec.path, digest),
        dtype=getattr(torch, spec.dtype),
        attn_implementation=ATTENTION_NAME,
        experts_implementation=EXPERTS_IMPLEMENTATION,
        distributed_config=DistributedConfig(),
        output_loading_info=True,
    )
    refuse_incomplete(spec.path, loading_info)
    keep_local_shards(model)
    return model.eval().requires_grad_(False), digest.summed()


def sharded_class_of(
    spec: ModelSpec, exchange: MoeExchange, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh
) -> type[PreTrainedModel]:
    """The model's class, with its experts modules bound to `exchange`."""
    register_attention()
    EPImplementationInterface.register(EP_IMPLEMENTATION_NAME, partial(ExpertParallelExperts, exchange=exchange))
    model_class = type(build_meta_model(read_config(spec.path), getattr(torch, spec.dtype)))
    return _with_expert_parallelism(model_class, ep_mesh, tp_mesh)


def keep_local_shards(model: PreTrainedModel) -> None:
    """Plain tensors of this rank's own share in the place of distributed ones."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, DTensor):
                module._parameters[name] = torch.nn.Parameter(parameter.to_local(), requires_grad=False)


def _with_expert_parallelism(
    model_class: type[PreTrainedModel], ep_mesh: DeviceMesh, tp_mesh: DeviceMesh
) -> type[PreTrainedModel]:
    """The model class with expert parallelism alone as its distribution: no tensor parallelism, no FSDP."""

    def prepare_distribute_model(
        cls: type, distributed_config: DistributedConfig, device_map: Any = None
    ) -> tuple[Any, Any, None]:
        return distributed_config, device_map, None

    def maybe_distribute_model(
        cls: type, model: PreTrainedModel, distributed_config: DistributedConfig, mesh_manager: Any
    ) -> PreTrainedModel:
        return apply_expert_parallelism(model, ep_mesh, tp_mesh, expert_parallel_plan(model), EP_IMPLEMENTATION_NAME)

    methods = {
        "prepare_distribute_model": classmethod(prepare_distribute_model),
        "maybe_distribute_model": classmethod(maybe_distribute_model),
        "__module__": model_class.__module__,
    }
    return type(model_class.__name__, (model_class,), methods)


def expert_bytes(model: PreTrainedModel) -> int:
    """Bytes of expert parameters that this rank holds."""
    plan = expert_parallel_plan(model)
    return sum(parameter.nbytes for name, parameter in model.named_parameters() if name in plan)
