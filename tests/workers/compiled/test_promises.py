"""The check of what the documents promise for GPUs, on what a rank would say: it fails for each that is broken."""

from typing import Any

import pytest
from promises import broken_promises

KEPT: dict[str, Any] = {
    "layers": (
        "4 Qwen3MoeDecoderLayer compiled in 18 regions; 4 GEMMs shared by projections (3.0 s, 18 from the cache)",
        "layers 0 to 3: compiled; q_proj+k_proj+v_proj as one GEMM; attention by FlashInfer, keys and values written "
        "in one kernel; choice of experts in one kernel; experts by local, QuACK CuTe DSL grouped GEMM pair, bf16",
    ),
    "recorded": {"decode", "piecewise"},
    "compiled_since": 0,
    "kernels": {"triton_red_fused_0": 3.0, "nvjet_tst": 3.0, "BatchPrefillWithPagedKVCacheKernel": 1.0, "topk": 0.08},
    "experts": "local",
}
LAYERS = KEPT["layers"]


def test_nothing_is_said_where_all_is_kept():
    assert not list(broken_promises(**KEPT))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layers": ()}, "does not say what runs"),
        ({"layers": (LAYERS[1].replace(": compiled", ": uncompiled"),)}, "'compiled' is promised"),
        (
            {"layers": (LAYERS[1].replace("q_proj+k_proj+v_proj", "q_proj+k_proj"),)},
            "'q_proj+k_proj+v_proj as one GEMM'",
        ),
        (
            {"layers": (LAYERS[1].replace("choice of experts in one kernel; ", ""),)},
            "'choice of experts in one kernel'",
        ),
        ({"layers": (LAYERS[1].replace(", keys and values written in one kernel", ""),)}, "'keys and values written"),
        ({"layers": (LAYERS[1].replace("experts by local", "experts by allgather"),)}, "experts by local are promised"),
        ({"recorded": {"decode"}}, "piecewise graphs are promised, and only these were recorded: decode"),
        ({"compiled_since": 2}, "2 regions were compiled after"),
        ({"kernels": {"k": 17.6}}, "launches 18 kernels a step"),
        ({"kernels": {"at::native::index_copy_kernel": 1.0}}, "still launches 1.0 of at::native::index_copy"),
    ],
)
def test_each_promise_that_is_broken_is_said(changed, said):
    (line,) = broken_promises(**KEPT | changed)
    assert said in line
