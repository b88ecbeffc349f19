"""A model with random weights, made in place: for sizing a cluster and measuring a pool without a checkpoint."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from ...dispatch.moe import MoeExchange
from ..attention.paged import ATTENTION_NAME
from .checkpoint import EP_IMPLEMENTATION_NAME, EXPERTS_IMPLEMENTATION, keep_local_shards, sharded_class_of
from .inspection import expert_parallel_plan, read_config
from .spec import ModelSpec

_SEED = 0


def make_random_model(
    spec: ModelSpec,
    exchange: MoeExchange,
    ep_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    rank: int,
    device: torch.device,
) -> PreTrainedModel:
    """This rank's share of a model as Transformers initialises it, on the device; no file but `config.json` is read.

    Args:
        spec: what the folder holds; equal on every rank.
        exchange: this rank's dispatcher and step geometry; every experts module is bound to it.
        ep_mesh: all ranks.
        tp_mesh: a mesh of one rank.
        rank: this rank. Dense weights are the same on every rank, experts are each rank's own.
        device: of this rank.
    """
    config = read_config(spec.path)
    config._experts_implementation = EXPERTS_IMPLEMENTATION
    sharded_class = sharded_class_of(spec, exchange, ep_mesh, tp_mesh)
    with torch.device("meta"):
        model = sharded_class._from_config(config, dtype=getattr(torch, spec.dtype), attn_implementation=ATTENTION_NAME)
    plan = expert_parallel_plan(model)
    apply_expert_parallelism(model, ep_mesh, tp_mesh, plan, EP_IMPLEMENTATION_NAME)
    keep_local_shards(model)
    model.to_empty(device=device)
    torch.manual_seed(_SEED)
    model.initialize_weights()
    model.tie_weights()
    torch.manual_seed(_SEED + 1 + rank)
    parameters = dict(model.named_parameters())
    for name in plan:
        if name in parameters and parameters[name].dim() > 1:
            parameters[name].data.normal_(std=config.get_text_config().initializer_range)
    return model.eval().requires_grad_(False)
