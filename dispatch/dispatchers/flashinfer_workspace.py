"""What FlashInfer's NVLink one-sided all-to-all takes and holds, known before any GPU is asked for."""

from collections.abc import Sequence

from ..budgets.budget import RowFormat, exchange_rows
from ..budgets.path_settings import PathSettings, row_formats, rows_of
from ..budgets.planned_buffer import PlannedBuffer
from ..dtypes import dtype_bytes

_CONTROL_ALIGNMENT = 128
_PAYLOAD_ALIGNMENT = 256
_MAX_PAYLOADS = 4
_INT32_BYTES = 4
# What its kernels are compiled for: `_SUPPORTED_TOP_K` of FlashInfer 0.7.4, in `communication.py` as below.
_TOP_K = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 22)


def top_k_problem(top_k: int) -> str | None:
    """Why tokens that go to so many experts cannot be sent, if they cannot."""
    if top_k in _TOP_K:
        return None
    return f"FlashInfer's all-to-all sends a token to one of {', '.join(map(str, _TOP_K))} experts, and not to {top_k}"


def planned_workspace(settings: PathSettings) -> list[PlannedBuffer]:
    """The workspaces of a rank, as plans show them."""
    layout, capacity, formats = settings.layout, settings.capacity, row_formats(settings.spec)
    num_formats = len({(one.hidden_size, one.top_k, one.dtype) for one in formats})
    made_of = rows_of(settings)
    return [
        PlannedBuffer(
            "dispatch: FlashInfer workspace",
            exchange_rows(layout, capacity),
            flashinfer_workspace_bytes(layout.world_size, capacity, formats),
            made_of if num_formats == 1 else f"{made_of}, for each of {num_formats} row formats",
        )
    ]


def flashinfer_workspace_bytes(ep_size: int, capacity: int, formats: Sequence[RowFormat]) -> int:
    """Bytes of one rank's workspaces for unquantised rows: layers of one row format share one, others have their own.

    The rule is that of FlashInfer 0.7.4: `NVLinkOneSidedAlltoAll.__init__`
    (moe_ep/backends/split/comm/nvlink_one_sided/communication.py) sizes the two payload regions, each of
    `ep_size * max_tokens_per_rank` rows, and `calculateWorkspaceLayout` (csrc/nvlink_one_sided_alltoall.cu) lays them
    out behind the control regions. The factor `ep_size` is inside; `capacity` comes without it. Holds for its fence
    transport, the one that Hopper has; the transports of newer GPUs add regions. The driver rounds the allocation up
    to its granularity. Instances share a workspace only where its whole layout is equal (`_acquire_workspace`), into
    which hidden size, top-k and the element's size enter; the number of experts does not.

    Args:
        ep_size: ranks, equal on every rank.
        capacity: `max_tokens_per_rank`, the rows one rank dispatches at most; equal on every rank.
        formats: of each MoE layer, equal on every rank.
    """
    layouts = {(row_format.hidden_size, row_format.top_k, dtype_bytes(row_format.dtype)) for row_format in formats}
    return sum(_workspace_bytes(ep_size, capacity, *layout) for layout in layouts)


def _workspace_bytes(ep_size: int, capacity: int, hidden_size: int, top_k: int, element_bytes: int) -> int:
    rows = ep_size * capacity
    # A token travels as its hidden state, its expert ids (int32) and its routing weights (float32).
    dispatched_bytes = rows * (hidden_size * element_bytes + 2 * top_k * 4) + _MAX_PAYLOADS * _PAYLOAD_ALIGNMENT
    # Expert outputs come back at 16 bits an element or more.
    combined_bytes = rows * hidden_size * max(element_bytes, 2)
    routes_bytes = capacity * top_k * _INT32_BYTES
    flags_bytes = ep_size * _INT32_BYTES

    # A round counter, a token counter, rows sent to each rank, and rows received from each in two alternating rounds.
    end = 2 * _INT32_BYTES + 3 * flags_bytes
    end = _align(end, _CONTROL_ALIGNMENT) + flags_bytes
    for _ in ("target ranks", "target rows"):
        end = _align(end, _CONTROL_ALIGNMENT) + routes_bytes
    end = _align(end, _PAYLOAD_ALIGNMENT) + _align(dispatched_bytes, _PAYLOAD_ALIGNMENT)
    end = _align(end, _CONTROL_ALIGNMENT) + flags_bytes
    return _align(end, _PAYLOAD_ALIGNMENT) + _align(combined_bytes, _PAYLOAD_ALIGNMENT)


def _align(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
