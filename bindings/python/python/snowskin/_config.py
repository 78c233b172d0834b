"""How a store is opened."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _native

if TYPE_CHECKING:
    from . import aio

_SECRETS = ("secret", "cluster_secret", "admin_secret")


@dataclasses.dataclass(frozen=True, repr=False)
class Config:
    """The settings of a store, checked, comparable and picklable: for other processes, and for files.

    Its ``repr`` shows no secrets. Its pickle contains them, because the other process needs them: treat it
    like the secrets.

    >>> config = snowskin.Config(master, pool="64MiB", secret="s3cret")
    >>> "s3cret" in repr(config)
    False
    >>> import pickle
    >>> pickle.loads(pickle.dumps(config)) == config
    True
    >>> snowskin.Config("no port")
    Traceback (most recent call last):
        ...
    snowskin.InvalidArgument: master: `no port` is not an address: write host:port or unix:/path, several of
    them separated by commas, or etcd://host:port/CLUSTER
    """

    master: str | None = None
    """Address of the master: ``"host:port"`` or ``"unix:/path"``; several masters are separated by commas.
    Default: ``"127.0.0.1:50051"``."""
    memory: int | str | None = dataclasses.field(default=None, kw_only=True)
    """Memory that this process lends to the store, bytes or a text such as ``"4GiB"``. It is withdrawn, with
    the objects in it, when the store is closed. Default: none is lent."""
    rails: str | Sequence[str] = dataclasses.field(default="auto", kw_only=True)
    """The rails to use: ``"auto"``, or names such as ``"shm,tcp"``, which then must start."""
    local: str | os.PathLike[str] | None = dataclasses.field(default=None, kw_only=True)
    """Path of the socket of the node on this machine, or ``"auto"`` for its default path. The store then has
    no engine of its own: the node moves the bytes. ``list``, ``scan``, ``stat`` and ``remove_matching`` also
    need ``master``. Default: an engine of its own."""
    tenant: str = dataclasses.field(default="default", kw_only=True)
    """The tenant to act for."""
    secret: str | bytes | None = dataclasses.field(default=None, kw_only=True)
    """The tenant's secret."""
    cluster_secret: str | bytes | None = dataclasses.field(default=None, kw_only=True)
    """The cluster secret, which nodes that have one demand."""
    admin_secret: str | bytes | None = dataclasses.field(default=None, kw_only=True)
    """The admin secret."""
    listen: str = dataclasses.field(default="127.0.0.1:0", kw_only=True)
    """Address at which nodes and clients reach this process: ``"IP:PORT"``, port 0 for any. With ``memory``,
    the port is that of the memory."""
    advertise: str | None = dataclasses.field(default=None, kw_only=True)
    """The host that others use in place of that of ``listen``; required when ``listen`` is
    ``"0.0.0.0:…"``."""
    node_name: str | None = dataclasses.field(default=None, kw_only=True)
    """Name of the memory that is lent, unique in the cluster. Default: host name, process number and a
    number."""
    pool: int | str = dataclasses.field(default="1GiB", kw_only=True)
    """Most memory for leases, bytes. It is reserved, and used from the first lease on that needs it."""
    connect_timeout: float = dataclasses.field(default=2.0, kw_only=True)
    """Longest time to connect to the master, seconds."""
    call_timeout: float = dataclasses.field(default=5.0, kw_only=True)
    """Longest wait for an answer of the master, seconds."""
    transfer_timeout: float = dataclasses.field(default=10.0, kw_only=True)
    """Longest time that moving the bytes of one operation may take, seconds."""
    gpu_library: str | os.PathLike[str] | None = dataclasses.field(default=None, kw_only=True)
    """The library of the GPU's driver. Default: ``libcuda.so.1`` or ``libamdhip64.so``, where the dynamic
    linker has it."""

    def __post_init__(self) -> None:
        _native.check_config(self)

    def connect(self) -> _native.Store:
        """Opens a :class:`Store`."""
        return _native.Store.connect(self)

    def connect_async(self) -> aio.Connecting:
        """Opens a :class:`snowskin.aio.Store`: to be awaited, or used with ``async with``."""
        from . import aio

        return aio.Connecting(self)

    def __repr__(self) -> str:
        def shown(field: dataclasses.Field[Any]) -> str:
            value = getattr(self, field.name)
            return "'***'" if field.name in _SECRETS else repr(value)

        given = [field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        return f"Config({', '.join(f'{field.name}={shown(field)}' for field in given)})"


Config.__module__ = "snowskin"
