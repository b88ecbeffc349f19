"""What ranks have to hold alike of their way to the experts: compared at every step, and frozen by every recording."""

import msgspec


class HeldAlike(msgspec.Struct, frozen=True):
    """What a rank holds of its way to the experts; equal on every rank in every field.

    Attributes:
        dispatcher: how rows travel, by name.
        expert_backend: what computes, by name.
        capacity: rows a rank that its buffers were made for.
        workspace_bytes: of this rank's buffers.
        tuning: of what computes, the table of paths where there is one; empty where nothing is tuned.
        quantisation_scales: constants with which ranks decode what others sent; empty where there are none.
    """

    dispatcher: str
    expert_backend: str
    capacity: int
    workspace_bytes: int
    tuning: str = ""
    quantisation_scales: tuple[float, ...] = ()
