"""Errors that a user can act on. The command line prints one as a single line and exits with 1."""


class SpecbuildError(Exception):
    """What failed, the value, what was expected, what to do: one line."""


class ConfigError(SpecbuildError):
    """The YAML, or a combination of its values, cannot work."""


class CheckpointError(SpecbuildError):
    """A model directory is incomplete, damaged or not of a kind that is supported."""


class EngineError(SpecbuildError):
    """An engine cannot be built, opened or run."""


class ServingError(SpecbuildError):
    """A server did not start, did not answer, or answered with an error."""
