"""This rank's share of a model's weights, on its device."""

import importlib.util
import logging

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from ...dispatch.moe import MoeExchange
from ..kernels.routers import fuse_routers, mask_padding_in_routers
from ..model.checkpoint import load_sharded_model
from ..model.random_weights import make_random_model
from ..rank_config import RankConfig, ReadFile

logger = logging.getLogger(__name__)


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
        model, files = load_sharded_model(spec, exchange, mesh["ep"], mesh["tp"], device, config.stored)
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        logger.warning("the choice of experts stays many small kernels: Triton is not installed")
    elif device.type == "cuda":
        num_fused = fuse_routers(model, getattr(torch, spec.dtype))
        masked = ", which masks padding too" if mask_padding_in_routers(model, exchange, device) else ""
        logger.info("%d routers choose in one kernel%s", num_fused, masked)
    return model, files
