"""The flag that every rank holds while graphs are recorded; set and cleared by the driver for all ranks."""

from ..dispatch.errors import GeometryError


class CaptureMode:
    """Whether this rank is capturing, and on whose behalf.

    It nests: a draft capture runs inside a target's, and each is left by whoever entered it.
    """

    def __init__(self) -> None:
        self._owners: list[str] = []

    @property
    def depth(self) -> int:
        return len(self._owners)

    @property
    def is_on(self) -> bool:
        return bool(self._owners)

    def enter(self, owner: str) -> None:
        self._owners.append(owner)

    def leave(self, owner: str) -> None:
        """Raises GeometryError where another capture is innermost: it would be cut short."""
        if not self._owners or self._owners[-1] != owner:
            raise GeometryError(f"capture mode is left by {owner!r}, the innermost capture is of {self._owners}")
        self._owners.pop()

    def clear(self) -> None:
        """Leave all captures; for the driver, after something went wrong."""
        self._owners.clear()
