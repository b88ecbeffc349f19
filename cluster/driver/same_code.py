"""Whether a pool's driver and those who call it run the same code.

What they send each other is taken apart by position: settings of a request, or of a pool, would be read as others.
"""

from ...dispatch.errors import ConfigError
from ...workers.start.code_digest import DISTRIBUTION, WHOLE, code_digest

# Read while the modules are: another version may be installed under a program that goes on.
_OWN = code_digest(WHOLE)


def own_code() -> str:
    """One name for the code that this process runs."""
    return _OWN


def require_same_code(callers: str, drivers: str) -> None:
    """
    Args:
        callers: `own_code` of a process that calls the driver.
        drivers: that of the driver actor.

    Raises:
        ConfigError: they differ.
    """
    if callers != drivers:
        raise ConfigError(
            f"the code of the process that calls this pool ({callers}) is not that of its driver actor ({drivers}): "
            f"each would read what the other sends as something else; install the same {DISTRIBUTION} on all nodes, "
            "and where the pool's own is the older, shut it down and launch it anew"
        )
