"""benchmarks/decode_kernels.py: names, counts and the floor; the script itself on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SCRIPT = REPOSITORY / "benchmarks" / "decode_kernels.py"
sys.path[:0] = [str(REPOSITORY / "benchmarks")]

from decode_kernels import PROFILED_REPLAYS, floor_ms, kernels_of, recorded_events, short_name  # noqa: E402


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 2>(float*, int)", "CatArrayBatchedCopy"),
        (
            "void at::native::elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
            "elementwise_kernel [CUDAFunctor_add]",
        ),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("nvjet_tst_64x8_64x16", "nvjet_tst_64x8_64x16"),
    ],
)
def test_names_are_short_and_say_what_is_computed(name, short):
    assert short_name(name) == short


def test_kernels_are_counted_a_layer_and_a_replay_the_slowest_first():
    events = [("mm", 10.0), ("add", 1.0), ("add", 3.0)] * PROFILED_REPLAYS
    mm, add = kernels_of(events, PROFILED_REPLAYS, layers=2)
    assert (mm.name, mm.count_a_layer, mm.us_each, mm.us_a_layer) == ("mm", 0.5, 10.0, 5.0)
    assert (add.name, add.count_a_layer, add.us_each, add.us_a_layer) == ("add", 1.0, 2.0, 2.0)


def test_the_profiler_is_read_over_all_replays():
    class Replayed:
        def replay(self) -> None:
            torch.ones(4, 4) @ torch.ones(4, 4)

    found = {one.name: one for one in kernels_of(recorded_events(Replayed(), on_gpu=False), PROFILED_REPLAYS, 1)}
    assert (found["mm"].count_a_layer, found["ones"].count_a_layer) == (1.0, 2.0)


def test_the_script_prints_graphs_and_keeps_the_floor(tmp_path):
    results = tmp_path / "results"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--layers", "2", "--requests", "1,2"]
    done = subprocess.run([*command, "--results", str(results)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = map(json.loads, results.read_text().splitlines())
    assert "1 requests: graph" in done.stdout
    # 8 experts, top-2: a row hits 2 of them, two rows 3.5; an expert is 3 matrices of 64 x 32 in float32.
    assert two["weight_bytes"] - one["weight_bytes"] == pytest.approx(2 * 1.5 * 3 * 64 * 32 * 4)
    assert one["floor_ms"] == pytest.approx(floor_ms(one["weight_bytes"], 4.3))
    assert one["kernels_a_layer"] == pytest.approx(sum(kernel["count_a_layer"] for kernel in one["kernels"]))
