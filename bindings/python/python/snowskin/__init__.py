"""Snowskin: the KV-cache data plane of an LLM serving cluster.

===================  ====================================================================================
:class:`Store`       objects with names in the memory of many machines: put, get, leases, batches
:mod:`snowskin.aio`  the same for asyncio
:class:`Engine`      one-sided reads and writes of the memory of other processes
:mod:`snowskin.tensor`  tensors of NumPy and torch in a store, with type and shape
===================  ====================================================================================

>>> with snowskin.Store.connect(master) as s:
...     s.put("first", b"kv block")
...     with s.get("first") as lease:
...         bytes(lease)
PutResult(stored=True)
b'kv block'

Errors are :exc:`SnowskinError` and its subclasses. Log messages of native code go to the loggers below
``snowskin`` of :mod:`logging`.
"""

import atexit as _atexit

from . import _logging as _logging  # creates the logger before native code logs
from ._config import Config
from ._errors import (
    BatchError,
    Closed,
    InvalidArgument,
    Leased,
    NoSpace,
    NotFound,
    PeerUnreachable,
    PermissionDenied,
    SnowskinError,
    Timeout,
    TransferUnknown,
)
from ._native import (
    Batch,
    Engine,
    Lease,
    Listing,
    Notification,
    ObjectInfo,
    Peer,
    PutResult,
    Region,
    RemoteRegion,
    Report,
    Store,
    TensorView,
    __version__,
    update_log_level,
)
from ._native import (
    close_everything as _close_everything,
)
from ._results import Results

__all__ = [
    "Batch",
    "BatchError",
    "Closed",
    "Config",
    "Engine",
    "InvalidArgument",
    "Lease",
    "Leased",
    "Listing",
    "NoSpace",
    "NotFound",
    "Notification",
    "ObjectInfo",
    "Peer",
    "PeerUnreachable",
    "PermissionDenied",
    "PutResult",
    "Region",
    "RemoteRegion",
    "Report",
    "Results",
    "SnowskinError",
    "Store",
    "TensorView",
    "Timeout",
    "TransferUnknown",
    "__version__",
    "update_log_level",
]

# Registered first of all that the program registers later, so it runs after them.
_atexit.register(_close_everything)


def __getattr__(name: str) -> object:
    # `snowskin.aio` and `snowskin.tensor` without an import: importing this package stays fast.
    if name in ("aio", "tensor"):
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
