"""A layer is a value: with its weights in the format that they are stored in, whichever that is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expert_pool.cluster import CacheConfig, Limits, PoolConfig
from expert_pool.dispatch.budgets.geometry import StepGeometry
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.dispatchers.contract import Dispatched
from expert_pool.dispatch.dispatchers.local import LocalDispatcher
from expert_pool.dispatch.errors import ConfigError
from expert_pool.dispatch.experts.cutedsl import refuse_experts as refuse_cutedsl
from expert_pool.dispatch.experts.expert_weights import DOWN, GATE_UP, PLAIN, ExpertWeights, plain_weights
from expert_pool.dispatch.experts.torch_experts import TorchExperts
from expert_pool.dispatch.experts.triton_way import refuse_experts as refuse_triton
from expert_pool.dispatch.moe_layer import MoeLayer
from expert_pool.dispatch.paths.mega import refuse_experts as refuse_mega
from expert_pool.dispatch.paths.path import DispatchedPath
from expert_pool.dispatch.probe import HostGroup
from expert_pool.workers.engine import RankEngine
from handle import exchange_of
from layers import layer_of
from plain_ranks import ForkedRanks
from torch.nn.functional import silu

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, ROWS = 4, 256, 128, 2, 6
SHAPE = MoeShape("experts", EXPERTS, HIDDEN, TOP_K, "float32", INTERMEDIATE)


@pytest.fixture(scope="module")
def rank_set(random_models: dict[str, str]) -> Iterator[ForkedRanks]:
    config = PoolConfig(
        model=random_models["qwen3_moe"], ranks=2, limits=Limits(max_running_requests=4), cache=CacheConfig(512)
    )
    with ForkedRanks(config, graphs=False) as ranks:
        yield ranks


class CodedExperts:
    """Experts whose weights are int8 codes with a scale an expert, and no parameter of any module."""

    name, num_bytes, tuning = "experts of codes", 0, ""

    def __init__(self) -> None:
        self.adopted: dict[int, tuple[torch.Tensor, ...]] = {}

    def adopt(self, layer: MoeLayer) -> None:
        if layer.weights.format != "int8":
            raise ConfigError(f"{layer.name} is stored as {layer.weights.format}")
        names = ("gate_up_codes", "gate_up_scales", "down_codes", "down_scales")
        self.adopted[layer.index] = tuple(map(layer.weights.tensor, names))

    def prepare(self, group: HostGroup | None) -> None:
        """Nothing is compiled."""

    def run(self, layer: MoeLayer, dispatched: Dispatched) -> torch.Tensor:
        gate_up, gate_up_scales, down, down_scales = self.adopted[layer.index]
        plain = gate_up.float() * gate_up_scales, down.float() * down_scales
        ids, weights = dispatched.local_ids_RK, dispatched.expert_weights_RK
        return computed(dispatched.x_RH, ids, weights, *plain)


def computed(
    x_RH: torch.Tensor, ids_RK: torch.Tensor, weights_RK: torch.Tensor, *projections: torch.Tensor
) -> torch.Tensor:
    gate_up_EFH, down_EHI = projections
    y_RH = torch.zeros_like(x_RH)
    for row, (ids, weights) in enumerate(zip(ids_RK.tolist(), weights_RK.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (gate_up_EFH[expert] @ x_RH[row]).chunk(2)
            y_RH[row] += weight * (down_EHI[expert] @ (silu(gate) * up))
    return y_RH


def coded(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weights.abs().amax(dim=(1, 2), keepdim=True) / 127
    return (weights / scales).round().to(torch.int8), scales


def test_experts_of_another_stored_format_are_handed_its_tensors_by_its_names():
    generator = torch.Generator().manual_seed(1)
    gate_up, gate_up_scales = coded(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator))
    down, down_scales = coded(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator))
    stored = {
        "gate_up_codes": gate_up,
        "gate_up_scales": gate_up_scales,
        "down_codes": down,
        "down_scales": down_scales,
    }
    layer = layer_of(SHAPE, index=3, weights=ExpertWeights("experts", "int8", stored))
    path = DispatchedPath(LocalDispatcher(ROWS), CodedExperts())
    path.adopt(layer)
    path.prepare(None)
    x_TH = torch.randn(ROWS, HIDDEN, generator=generator)
    weights_TK, ids_TK = torch.rand(ROWS, EXPERTS, generator=generator).topk(TOP_K)
    found = path.run(layer, x_TH, ids_TK, weights_TK, StepGeometry.eager(Layout(1), (ROWS,), capacity=ROWS))
    expected = computed(x_TH, ids_TK, weights_TK, gate_up.float() * gate_up_scales, down.float() * down_scales)
    assert expected.abs().max() > 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "refuse",
    [refuse_cutedsl, refuse_triton, lambda layer: refuse_mega(layer, "none")],
    ids=["cutedsl", "triton", "mega"],
)
def test_kernels_on_plain_weights_refuse_other_formats_by_name(refuse):
    codes = {"codes": torch.zeros(2, dtype=torch.uint8)}
    with pytest.raises(ConfigError, match=r"cannot run experts: their weights are stored as mxfp4; use "):
        refuse(layer_of(SHAPE, weights=ExpertWeights("experts", "mxfp4", codes)))
    plain = {GATE_UP: torch.zeros(1, dtype=torch.bfloat16), DOWN: torch.zeros(1, dtype=torch.bfloat16)}
    refuse(layer_of(SHAPE, weights=ExpertWeights("experts", PLAIN, plain)))


@pytest.mark.parametrize(
    ("refuse", "dtype", "computes"),
    [(refuse_cutedsl, torch.float16, "bfloat16"), (refuse_triton, torch.float32, "bfloat16 or float16")],
)
def test_kernels_refuse_weights_of_a_dtype_that_they_do_not_read(refuse, dtype, computes):
    stored = {GATE_UP: torch.zeros(1, dtype=dtype), DOWN: torch.zeros(1, dtype=dtype)}
    with pytest.raises(ConfigError, match=rf"cannot run experts: they are not in {computes}; use experts='torch'"):
        refuse(layer_of(SHAPE, weights=ExpertWeights("experts", PLAIN, stored)))
    half = {name: tensor.half() for name, tensor in stored.items()}
    refuse_triton(layer_of(SHAPE, weights=ExpertWeights("experts", PLAIN, half)))


def test_a_tensor_that_the_format_does_not_have_is_named_with_those_that_it_has():
    weights = ExpertWeights("model.layers.0.mlp.experts", "mxfp4", {"codes": torch.zeros(1), "scales": torch.zeros(1)})
    with pytest.raises(
        ConfigError, match=r"model\.layers\.0\.mlp\.experts are stored as mxfp4, with codes, scales: .* 'down'"
    ):
        weights.tensor(DOWN)


def test_weights_that_are_released_leave_the_model_and_stay_with_whoever_took_them():
    module = torch.nn.Module()
    for name in ("gate_up_proj", "down_proj"):
        module.register_parameter(name, torch.nn.Parameter(torch.ones(2, 3, 4), requires_grad=False))
    weights = plain_weights(module, "experts")
    kept = weights.tensor(GATE_UP)
    weights.release()
    assert [parameter.numel() for parameter in module.parameters()] == [0, 0]
    assert torch.equal(kept, torch.ones(2, 3, 4))


def described(engine: RankEngine) -> list[tuple[Any, ...]]:
    return [
        (layer.index, layer.name, layer.shape.text, layer.num_local, layer.first_expert, layer.weights.format)
        for layer in exchange_of(engine).layers
    ]


def test_layers_have_the_same_indices_and_shapes_on_every_rank_in_the_order_of_the_model(rank_set):
    first, second = rank_set.call(described)
    assert [layer[0] for layer in first] == list(range(3))
    assert [layer[1] for layer in first] == [f"model.layers.{index}.mlp.experts" for index in range(3)]
    assert all(layer[3] > 0 and layer[4] == 0 and layer[5] == PLAIN for layer in first)
    own = [(*layer[:4], layer[3], layer[5]) for layer in first]
    assert second == own, "the same, but for the first of its experts"


def what_computes_a_layer(engine: RankEngine) -> list[float]:
    """Differences of what a layer computes as the model calls it, and as a value handed to plain experts."""
    layers = exchange_of(engine).layers
    found = []
    for layer in layers:
        x_RH = torch.randn(5, layer.shape.hidden_size, generator=torch.Generator().manual_seed(layer.index))
        ids = torch.arange(5).unsqueeze(1) % layer.num_local
        dispatched = Dispatched(x_RH, ids, torch.ones(5, 1), None, None)  # type: ignore[arg-type]
        plain = [layer.weights.tensor(name) for name in (GATE_UP, DOWN)]
        y_RH = TorchExperts(engine.device).run(layer, dispatched)
        found.append(float((y_RH - computed(x_RH, ids, torch.ones(5, 1), *plain)).abs().max()))
    return found


def test_the_weights_of_a_layer_are_those_that_its_model_computes_with(rank_set):
    for differences in rank_set.call(what_computes_a_layer):
        assert len(differences) == 3
        assert all(difference < 1e-4 for difference in differences)
