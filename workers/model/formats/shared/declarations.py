"""What of a checkpoint's declarations is known and served; everything else is refused by its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....observing.printable import one_line


@dataclass(frozen=True)
class Served:
    """Values of a setting that are served.

    Attributes:
        test: whether a value is; `None` is asked about where the setting is absent.
        text: which are, for messages.
    """

    test: Callable[[Any], bool]
    text: str


def either(*values: Any) -> Served:
    """One of these; `None` among them: it may be absent."""
    listed = " or ".join(repr(value) for value in values if value is not None)
    return Served(lambda given: any(type(given) is type(one) and given == one for one in values), listed)


def unset_or_empty(*values: Any) -> Served:
    """Absent, empty, or one of these."""
    return Served(lambda given: given in (None, False, {}, [], *values), "none or an empty one")


ANYTHING = Served(lambda given: True, "anything")
"""Of what has no effect on weights, or is looked at elsewhere."""


def setting_problems(where: str, settings: Any, served: Mapping[str, Served]) -> list[str]:
    """What of some settings is not served, and which are not known.

    Args:
        where: they are, for messages.
        settings: as they are in the file.
        served: all that are known, by name.
    """
    if not isinstance(settings, dict):
        return [f"{where} is {settings!r:.60}, which is no mapping"]
    problems = [
        f"{name}={settings.get(name)!r:.60} of {where} is not served, {one.text} alone"
        for name, one in served.items()
        if not one.test(settings.get(name))
    ]
    return problems + [
        f"{one_line(name, 60)}={value!r:.60} of {where} is not known"
        for name, value in settings.items()
        if name not in served
    ]
