"""The exceptions of the package. Native code raises them, with the codes of ``src/errors.rs``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BatchError",
    "Closed",
    "InvalidArgument",
    "Leased",
    "NoSpace",
    "NotFound",
    "PeerUnreachable",
    "PermissionDenied",
    "SnowskinError",
    "Timeout",
    "TransferUnknown",
]


class SnowskinError(Exception):
    """Why an operation failed. The message says what to do next.

    The class tells what kind of failure it is, and :attr:`code` which one exactly.

    >>> try:
    ...     store.put("empty", b"")
    ... except snowskin.SnowskinError as error:
    ...     error.code, isinstance(error, ValueError)
    ('invalid_argument', True)
    """

    code: str
    """Stable name of the failure, such as ``"no_space"`` or ``"peer_unreachable"``; never renamed."""
    key: str | None
    """The key that it concerns, if it concerns one."""
    retryable: bool
    """Whether the same call may succeed later."""

    def __init__(
        self, message: str = "", *, code: str = "internal", key: str | None = None, retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.key = key
        self.retryable = retryable

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.key is None else f"{self.key!r}: {message}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process boundaries: concurrent.futures, multiprocessing.
        state = {"code": self.code, "key": self.key, "retryable": self.retryable}
        return (type(self), self.args, state)


class NotFound(SnowskinError):
    """Something that was named does not exist. (A miss of a get is not an error, but ``None``.)"""


class NoSpace(SnowskinError):
    """There is no room: in the store, in the memory for leases, in a table. Mostly :attr:`retryable`: readers
    return leases, and evictions make room."""


class Leased(SnowskinError):
    """A reader holds the object, or a writer still writes it."""


class Closed(SnowskinError):
    """What was used is closed, or belongs to the process from which this one was forked."""


class PeerUnreachable(SnowskinError):
    """The master, a node or a peer does not answer, or no rail reaches it."""


class TransferUnknown(SnowskinError):
    """The outcome of a transfer is not known. With the code ``fence_needed``, bytes may still land at the
    peer: call :meth:`Peer.fence` before its memory is used for anything else. With ``buffer_held``, a rail
    may still write a local buffer, which is refused until it no longer does."""


class InvalidArgument(SnowskinError, ValueError):
    """An argument is refused before anything is sent."""


class Timeout(SnowskinError, TimeoutError):
    """The time is up. The operation itself goes on and keeps its buffers until its end."""


class PermissionDenied(SnowskinError, PermissionError):
    """A secret is wrong or missing, or the rights to memory do not allow the operation."""


class BatchError(SnowskinError):
    """Items of a batch failed: :attr:`errors` has them by index. Raised by :meth:`Results.raise_errors`."""

    errors: dict[int, SnowskinError]

    def __init__(self, message: str = "", *, errors: Mapping[int, SnowskinError] | None = None) -> None:
        errors = dict(errors or {})
        first = next(iter(errors.values()), None)
        code = "internal" if first is None else first.code
        retryable = bool(errors) and all(error.retryable for error in errors.values())
        super().__init__(message, code=code, retryable=retryable)
        self.errors = errors

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"code": self.code, "key": self.key, "retryable": self.retryable, "errors": self.errors}
        return (type(self), self.args, state)


for _name in __all__:
    # Where users find them, and where pickles look them up.
    globals()[_name].__module__ = "snowskin"
