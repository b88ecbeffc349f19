"""The ways to the experts of the house, a line each; read by `dispatch.registry` at the first look."""

from ..dispatchers.allgather import AllGatherDispatcher
from ..dispatchers.alltoall import AllToAllDispatcher
from ..dispatchers.flashinfer_alltoall import FlashInferDispatcher
from ..dispatchers.local import LocalDispatcher
from ..experts.cutedsl import CuteDslWay
from ..experts.nvfp4 import Nvfp4Way
from ..experts.torch_experts import TorchExperts
from ..registry import register
from .measured import MeasuredPath
from .mega import MegaPath

register(LocalDispatcher)
register(AllGatherDispatcher)
register(AllToAllDispatcher)
register(FlashInferDispatcher)
register(MegaPath)
register(MeasuredPath)
register(TorchExperts)
register(CuteDslWay)
register(Nvfp4Way)
