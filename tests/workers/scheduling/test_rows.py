"""Rows of a step: what a row has is said once, and packing, sending and taking apart follow from it."""

from dataclasses import fields

import pytest
import torch
from expert_pool.workers.request import Generated, GeneratedSoFar
from expert_pool.workers.scheduling.rows import Row, RowFailure, StepRows
from hypothesis import given
from hypothesis import strategies as st

ROWS = st.lists(st.tuples(st.integers(0, 2**31), st.sampled_from([0, *RowFailure])), max_size=20)


def step_rows(rows: list[tuple[int, int]]) -> StepRows:
    token_ids, failures = zip(*rows, strict=True) if rows else ((), ())
    return StepRows(torch.tensor(token_ids, dtype=torch.int64), torch.tensor(failures, dtype=torch.int64))


def test_each_column_of_what_is_generated_is_a_tensor_of_the_rows():
    tensors = {one.name for one in fields(StepRows)}
    assert tensors == {f"{name}_N" for name in Generated.__struct_fields__} | {"failures_N"}


@pytest.mark.parametrize("column", fields(StepRows), ids=lambda column: column.name)
def test_a_row_is_packed_as_eight_bytes_a_field(column):
    assert column.metadata["dtype"] in (torch.int64, torch.float64)


@given(ROWS)
def test_rows_are_the_same_after_they_were_packed(rows):
    packed = step_rows(rows).packed()
    assert (packed.shape, packed.dtype) == ((len(rows), len(fields(StepRows))), torch.int64)
    assert packed.is_contiguous()
    assert StepRows.unpacked(packed).rows() == step_rows(rows).rows()


@given(ROWS)
def test_a_row_on_the_host_has_a_token_or_says_why_there_is_none(rows):
    assert step_rows(rows).rows() == [
        Row(Generated(), RowFailure(failure)) if failure else Row(Generated((token,))) for token, failure in rows
    ]


def test_the_space_for_the_leaders_rows_is_as_large_as_they_are_packed():
    assert StepRows.none(torch.device("cpu")).rows() == []
    assert StepRows._space(3, torch.device("cpu")).shape == step_rows([(1, 0)] * 3).packed().shape


@given(st.lists(st.lists(st.integers(0, 9), max_size=5)), st.integers(0, 9))
def test_what_is_generated_grows_by_what_comes_and_is_reported_from_anywhere_on(parts, num_tokens):
    whole = tuple(token for part in parts for token in part)
    grown = GeneratedSoFar(Generated(tuple(parts[0])) if parts else Generated())
    for part in parts[1:]:
        grown.extend(Generated(tuple(part)))
    assert len(grown) == len(whole)
    assert grown.since(0) == Generated(whole)
    assert grown.since(num_tokens) == Generated(whole[num_tokens:])
