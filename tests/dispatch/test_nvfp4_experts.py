"""NVFP4 experts for Blackwell, as far as a machine without one can tell: sizes, layouts, refusals."""

import msgspec
import pytest
import torch
from expert_pool.cluster import CacheConfig, Limits, PoolConfig, WorkerConfig
from expert_pool.cluster.config import configuration_problems, resolve_unchecked
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.experts.nvfp4 import architecture_problem
from expert_pool.dispatch.experts.nvfp4_experts import routing_for, up_gate, wrapper_settings
from expert_pool.dispatch.paths.table import candidate_paths
from expert_pool.dispatch.paths.tuning import Tuning
from expert_pool.workers.model.inspection import inspect_model
from layers import layer_of

SHAPE = MoeShape("experts", 16, 256, 3, "float32", intermediate_size=128)
SECOND_OF_FOUR = layer_of(SHAPE, ep_size=4, rank=1)


def problems_of(model: str, intermediate_size: int | None = None) -> tuple[str, ...]:
    config = PoolConfig(
        model=model,
        ranks=2,
        dispatch="flashinfer",
        dtype="bfloat16",
        quantisation="nvfp4",
        limits=Limits(max_running_requests=4),
        cache=CacheConfig(num_tokens=512),
        worker=WorkerConfig(device="cuda"),
    )
    spec = inspect_model(config.model, config.dtype)
    if intermediate_size is not None:
        layers = tuple(msgspec.structs.replace(layer, intermediate_size=intermediate_size) for layer in spec.moe)
        spec = msgspec.structs.replace(spec, moe=layers)
    return configuration_problems(resolve_unchecked(config, spec))


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_blackwell_is_taken(capability):
    assert architecture_problem(capability) is None


def test_hopper_is_refused_with_the_reason():
    assert architecture_problem((9, 0)) == "its GPU is SM90, NVFP4 experts need SM100 or SM103 (Blackwell)"


@pytest.mark.parametrize("records_graphs", [True, False])
def test_the_wrapper_holds_graph_resources_only_where_graphs_are_recorded(records_graphs):
    settings = wrapper_settings(SECOND_OF_FOUR, records_graphs, torch.device("cuda", 0))
    assert settings["use_cuda_graph"] is records_graphs
    assert (settings["num_experts"], settings["num_local_experts"], settings["local_expert_offset"]) == (16, 4, 4)


def test_the_first_projection_is_turned_to_up_before_gate():
    gate, up = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    turned = up_gate(torch.cat([gate, up], dim=1))
    assert turned.is_contiguous()
    assert torch.equal(turned[:, :5], up)
    assert torch.equal(turned[:, 5:], gate)


def test_slots_with_nothing_to_compute_go_to_an_expert_of_another_rank_with_no_weight():
    ids = torch.tensor([[4, 7, 8], [-1, -1, -1], [3, 2**30, 5]])
    weights = torch.tensor([[0.5, 0.25, 0.25], [float("nan")] * 3, [0.1, float("nan"), 0.2]])
    routed, weighed = routing_for(SECOND_OF_FOUR, ids, weights)
    assert routed.tolist() == [[4, 7, 8], [8, 8, 8], [8, 8, 5]]
    assert weighed.tolist() == [[0.5, 0.25, 0.0], [0.0] * 3, [0.0, 0.0, pytest.approx(0.2)]]
    assert routed.dtype == torch.int32
    assert weighed.dtype == torch.float32


def test_the_last_rank_sends_them_to_the_first():
    routed, _ = routing_for(layer_of(SHAPE, ep_size=4, rank=3), torch.tensor([[12, 15, 3]]), torch.ones(1, 3))
    assert routed.tolist() == [[12, 15, 0]]


def test_the_only_path_in_nvfp4_is_the_all_to_all():
    assert list(map(str, candidate_paths(Tuning(), "cuda", "torch", "nvfp4", 512, 2))) == ["flashinfer+nvfp4"]


def test_aligned_gated_experts_pass_and_others_are_refused(tiny_moe, random_models):
    assert problems_of(tiny_moe, intermediate_size=256) == ()
    [width] = problems_of(tiny_moe)
    assert "intermediate size 64 is no multiple of 128, as quantisation='nvfp4' needs" in width
    [traits] = problems_of(random_models["gpt_oss"])
    assert "they have biases" in traits
