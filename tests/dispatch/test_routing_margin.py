"""The checkpoints that GPU kernels are judged on: routing that no rounding changes, parts that all count."""

import sys
from pathlib import Path

import pytest
from models import FAMILIES
from routed_models import save_routed_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from check_families import COMMON, SIZES, sequences
from family_reference import margins


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "deepseek_v3" else pytest.mark.long) for name in FAMILIES]
)
def test_bf16_routes_as_float32_does_and_two_swapped_experts_are_seen(family: str, tmp_path: Path) -> None:
    save_routed_model(family, tmp_path, **COMMON, **SIZES[family])
    row = margins(family, str(tmp_path), "cpu", sequences(COMMON["vocab_size"], 6))
    assert row[-1] == "ok", row
