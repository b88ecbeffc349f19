"""Ordinary random weights over vLLM's dummy ones, in the process that holds the model.

vLLM's dummy values lie within 1e-3, norms included, and come from one seed for every tensor: all layers share a router,
so batches hit fewer experts than they would. A module of its own, so that vLLM's processes find the function by name.
"""

from typing import Any


def draw_ordinary(model: Any) -> dict[str, int]:
    """Norms 1, all else N(0, 0.02), each tensor from its own seed.

    Returns:
        how many parameters were drawn, and how many routers and distinct routers there are.
    """
    import torch

    drawn, routers = 0, []
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            drawn += parameter.numel()
            if "norm" in name:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(1000 + index)
            parameter.normal_(0.0, 0.02, generator=generator)
            if name.endswith(("mlp.gate.weight", "router.weight")):
                routers.append(parameter.float().flatten()[:64].cpu())
    distinct = len({tuple(router.tolist()) for router in routers})
    return {"parameters": drawn, "routers": len(routers), "distinct_routers": distinct}


def problem_of(found: dict[str, int]) -> str | None:
    """Why numbers over these weights would be worth nothing."""
    if not found["parameters"]:
        return "no parameter was drawn"
    if not found["routers"]:
        return "no router was found among the parameters"
    if found["distinct_routers"] != found["routers"]:
        return f"only {found['distinct_routers']} of {found['routers']} routers are distinct"
    return None
