"""The dense part of layers through torch.compile: of every family, held to what it computes, refused where it differs.

PyTorch's `eager` backend runs what the compiler was given as it is. So these tests are of what is traced and compared;
`make test-long` has a pool whose layers Inductor compiles, and tests/gpu what GPUs run.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.dispatch.errors import ConfigError
from expert_pool.dispatch.moe import MoeExchange
from expert_pool.workers.compiled.greedy import compile_greedy
from expert_pool.workers.compiled.regions import compile_regions, compiled_modules
from expert_pool.workers.compiled.shared_products import SharedLinear, share_products
from expert_pool.workers.compiled.trial import Trial
from expert_pool.workers.model.checkpoint import load_sharded_model
from expert_pool.workers.model.inspection import inspect_model
from models import ALL_FAMILIES
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("ep", "tp"))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Loaded:
    """A family's model of one rank, bound to an exchange, and its trial."""

    def __init__(self, path: str, mesh: DeviceMesh, dtype: str = "float32"):
        self.spec = inspect_model(path, dtype)
        self.exchange = MoeExchange(Layout(1), 0, None, None)  # no step is run: neither path nor collectives
        self.model, _ = load_sharded_model(self.spec, self.exchange, mesh["ep"], mesh["tp"], torch.device("cpu"))
        self.exchange.describe_layers(self.model, self.spec)
        self.trial = Trial(self.model, self.exchange, self.spec.vocab_size, CPU)

    def compile(self, backend: Any = "eager") -> Any:
        return compile_regions(self.model, self.exchange, self.spec.vocab_size, CPU, backend)


@pytest.mark.skipif(not os.environ.get("EXPERT_POOL_FULL_MATRIX"), reason="`make test-matrix` runs every family")
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_all_layers_of_a_family_are_compiled_once_for_one_token_and_once_for_any_number(family, random_models, mesh):
    loaded = Loaded(random_models[family], mesh)
    expected = {size: loaded.trial.run(size) for size in (1, 2, 7, 40, 64)}
    compiled = loaded.compile()
    layers = [name for name in compiled.modules if name.endswith("DecoderLayer")]
    assert sum(compiled.modules[name] for name in layers) == loaded.model.config.num_hidden_layers
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for size, logits in expected.items():
        torch.testing.assert_close(loaded.trial.run(size), logits, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "a size was compiled for itself"


def sabotaged(target: Any, stand_in: Any) -> Any:
    """A backend that computes something else in the place of one operation."""

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in module.graph.nodes:
            if node.target is target:
                node.target = stand_in
        module.recompile()
        return module.forward

    return backend


def test_a_fusion_that_computes_otherwise_is_refused_and_the_model_runs_as_before(random_models, mesh):
    loaded = Loaded(random_models["qwen3_moe"], mesh)
    expected = loaded.trial.run(5)
    with pytest.raises(ConfigError, match=r"model\.layers\.0.* computes otherwise when compiled: .* rows are off"):
        loaded.compile(sabotaged(torch.rsqrt, lambda x: torch.rsqrt(x) * 1.001))
    assert all(module._compiled_call_impl is None for module in compiled_modules(loaded.model))
    torch.testing.assert_close(loaded.trial.run(5), expected, rtol=1e-5, atol=1e-5)


def test_a_compiler_that_fails_is_refused_with_its_reason(random_models, mesh):
    def failing(module: torch.fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("no such target")

    loaded = Loaded(random_models["qwen3_moe"], mesh)
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM cannot be compiled: .*no such target"):
        loaded.compile(failing)
    assert all(module._compiled_call_impl is None for module in compiled_modules(loaded.model))


def test_projections_of_the_same_rows_become_views_of_one_weight(random_models, mesh):
    loaded = Loaded(random_models["qwen3_moe"], mesh)
    named = dict(loaded.model.named_parameters())
    before = {name: value.clone() for name, value in named.items()}
    expected = loaded.trial.run(9)
    assert share_products(loaded.model, lambda: loaded.trial.run(9)) == loaded.model.config.num_hidden_layers
    torch.testing.assert_close(loaded.trial.run(9), expected, rtol=1e-5, atol=1e-5)
    assert dict(loaded.model.named_parameters()).keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.named_parameters())
    attention = loaded.model.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert all(type(part) is SharedLinear for part in parts)
    assert type(attention.o_proj) is torch.nn.Linear
    (storage,) = {part.weight.untyped_storage().data_ptr() for part in parts}
    assert storage == parts[0].product.weight_NH.untyped_storage().data_ptr()
    assert parts[0].product.rows is None, "no rows are kept between steps"


def test_a_layer_that_gets_other_rows_than_the_first_multiplies_them_itself():
    class Projections(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 4), torch.nn.Linear(8, 6)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x), self.second(y)

    module, x, y = Projections(), torch.randn(3, 8), torch.randn(3, 8)
    with torch.no_grad():
        same, other = module(x, x), module(x, y)
        assert share_products(module, lambda: module(x, x)) == 1
        for found, expected in zip((*module(x, x), *module(x, y)), (*same, *other), strict=True):
            torch.testing.assert_close(found, expected)


def test_tied_weights_and_unlike_layers_share_nothing():
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
            self.biased, self.unbiased = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.second(x) + self.biased(x) + self.unbiased(x)

    module = Odd()
    assert share_products(module, lambda: module(torch.randn(2, 8))) == 0


def test_the_compiled_choice_of_tokens_is_held_to_ties_and_rows_that_are_not_finite(random_models):
    spec = inspect_model(random_models["qwen3_moe"], "float32")
    assert compile_greedy(spec, CPU, "eager")(torch.eye(spec.vocab_size)[:3])[:, 0].tolist() == [0, 1, 2]

    def last_of_equals(x: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
        return x.shape[-1] - 1 - x.flip(-1).argmax(dim=dim, keepdim=keepdim)

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in module.graph.nodes:
            if node.op == "call_method" and node.target == "argmax":
                node.op, node.target = "call_function", last_of_equals
        module.recompile()
        return module.forward

    with pytest.raises(ConfigError, match="the compiled choice of tokens differs"):
        compile_greedy(spec, CPU, backend)
