"""This rank's share of a model's weights, on its device."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from ...dispatch.moe import MoeExchange
from ..kernels.fused_layers import fuse_layers
from ..kernels.fused_norms import fuse_norms
from ..model.checkpoint import load_sharded_model
from ..model.random_weights import make_random_model
from ..rank_config import RankConfig, ReadFile


def read_weights(
    config: RankConfig, exchange: MoeExchange, device: torch.device
) -> tuple[PreTrainedModel, tuple[ReadFile, ...]]:
    """This rank's share of the model on its device, bound to the exchange, and what was read of each file."""
    spec = config.spec
    mesh = init_device_mesh("cpu", (config.layout.world_size, 1), mesh_dim_names=("ep", "tp"))
    files: tuple[ReadFile, ...] = ()
    if config.weights == "random":
        model = make_random_model(spec, exchange, mesh["ep"], mesh["tp"], exchange.rank, device)
    else:
        on_host, files = load_sharded_model(spec, exchange, mesh["ep"], mesh["tp"])
        model = on_host.to(device)
    if device.type == "cuda":
        dtype = getattr(torch, spec.dtype)
        fuse_norms(model, dtype)
        fuse_layers(model, dtype)
    return model, files
