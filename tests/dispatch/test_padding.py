"""Padding is routed to no expert: by layers, or by routers that mask it themselves; either way it counts no load."""

import pytest
import torch
from expert_pool.dispatch.budgets.geometry import StepGeometry
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.dispatch.dispatchers.contract import INVALID_EXPERT_ID
from expert_pool.dispatch.expert_load import ExpertLoad
from expert_pool.dispatch.moe import MoeExchange

ROUTED = torch.tensor([[0, 2], [1, 2], [3, 0], [3, 1]])
NUM_VALID = 2


@pytest.mark.parametrize("is_masked_by_routers", [False, True])
def test_padding_reaches_no_expert_and_counts_for_none(is_masked_by_routers):
    exchange = MoeExchange(Layout(1), 0, None, None)  # neither path nor collectives: no rows are sent
    exchange.load = ExpertLoad([4], torch.device("cpu"))
    ids = ROUTED.clone()
    if is_masked_by_routers:
        exchange.num_valid = torch.zeros(1, dtype=torch.int32)
    exchange.begin_step(StepGeometry.eager(Layout(1), (4,), capacity=8), torch.tensor([NUM_VALID], dtype=torch.int32))
    if exchange.num_valid is not None:
        ids[exchange.num_valid.item() :] = INVALID_EXPERT_ID  # as routers do
    masked = exchange.without_padding(ids)
    exchange.count_load(0, ids)
    assert torch.equal(masked[:NUM_VALID], ROUTED[:NUM_VALID])
    assert (masked[NUM_VALID:] == INVALID_EXPERT_ID).all()
    exchange.load.settle()
    assert list(memoryview(exchange.load.latest).cast("q")) == [1, 1, 2, 0]


def test_routers_mask_nothing_where_a_step_has_no_padding():
    exchange = MoeExchange(Layout(1), 0, None, None)
    exchange.num_valid = torch.zeros(1, dtype=torch.int32)
    exchange.begin_step(StepGeometry.eager(Layout(1), (4,), capacity=8), None)
    assert exchange.num_valid.item() == torch.iinfo(torch.int32).max
