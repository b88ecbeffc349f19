"""Every error the pool raises on purpose. Each message names the value seen, the bound, and the setting to change."""


class ExpertPoolError(Exception):
    """Root of the hierarchy: `except ExpertPoolError` catches whatever the pool refuses or reports."""


class ConfigError(ExpertPoolError, ValueError):
    """The configuration, a prompt file or an output path cannot work. Nothing was started, but where only the ranks'
    machines show it: ranks raise it while they load, and the pool then ends."""


class CheckpointError(ConfigError):
    """A model folder cannot be served: missing, truncated, incomplete, or of a family that is not supported."""


class PlacementError(ExpertPoolError):
    """The cluster did not offer a place for every rank within the deadline."""


class KernelError(ExpertPoolError):
    """A kernel could not be compiled on a rank; the message ends with the compiler's last lines."""


class GeometryError(ExpertPoolError):
    """Ranks disagree about a step, or one holds something else than all agreed on.

    What follows from numbers that all ranks have is raised on every rank alike, before any collective of that step.
    What one rank alone can see (its rows, its buffers, what its recording did) is raised there alone: it sends nothing
    more, and the driver, which hears of it, ends the others or gives the capture up on all of them, with its reason.
    """


class RankError(ExpertPoolError):
    """A rank died, raised or stalled; the message names the rank and the cause."""


class DriverRestartError(RankError):
    """The pool's driver actor ended and may come back: what was in flight is lost, and may be asked for again."""
