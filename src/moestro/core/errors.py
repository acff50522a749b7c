"""Every error a user can meet, as types of our own.

Each message names the thing, what was found, and what is possible instead; the CLI prints the
message alone and exits with the class's ``exit_code``.
"""

from __future__ import annotations


class MoestroError(Exception):
    """Base of all errors Moestro raises on purpose."""

    exit_code = 1


class CheckpointError(MoestroError):
    """A file is missing, truncated, corrupt, inconsistent, or holds non-finite weights."""

    exit_code = 3


class StorageError(MoestroError):
    """A file that experts are read from while the model runs fails, or was cut or changed."""

    exit_code = 9


class UnsupportedFormat(MoestroError):
    """A weight type or quantization that no format here reads (or not without loss)."""

    exit_code = 4


class UnsupportedArchitecture(MoestroError):
    """A model family, or an option of one, that is not implemented."""

    exit_code = 5


class UnsupportedOp(MoestroError):
    """An op that a device does not implement, or not for these arguments."""

    exit_code = 6


class OutOfBudget(MoestroError):
    """The request needs more memory than the budget allows; raised before anything is allocated."""

    exit_code = 7


class InvalidRequest(MoestroError):
    """A request or an option that cannot be carried out as asked."""

    exit_code = 2


class SelfCheckError(MoestroError):
    """A kernel of this CPU does not give what its format says; raised before weights are read."""

    exit_code = 8
