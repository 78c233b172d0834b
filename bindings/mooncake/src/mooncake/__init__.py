"""The package ``mooncake``, served by Snowskin.

``mooncake.engine`` has the transfer engine, ``mooncake.store`` the object store. Both are views of one native
module, ``snowskin._native.mooncake``, so that ``store.setup(..., engine=engine.get_engine())`` works
whichever of them is imported first. The other modules are Python:

========================== ====================================================================
``mooncake.async_store``   the store with an awaitable ``async_NAME`` for each method ``NAME``
``mooncake.mooncake_config`` the configuration file and the environment variables of connectors
``mooncake.http_metadata_server`` the metadata server for ``http://HOST:PORT/metadata``
``mooncake.cli`` and others the console scripts
========================== ====================================================================

The package may be spread over several directories of ``sys.path`` (``extend_path``), as with the distribution
that it replaces. It refuses to be imported beside that distribution, because both own these files.
"""

from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

from mooncake._refuse import refuse_beside_other

if TYPE_CHECKING:
    from mooncake.store import BufferPool, RegisteredBufferPool

__path__ = extend_path(__path__, __name__)

refuse_beside_other()

__all__ = ["BufferPool", "RegisteredBufferPool"]


def __getattr__(name: str) -> Any:
    # The pools are native: they are looked up when they are asked for, so that the modules which need no
    # native code (the configuration, the metadata server, the console scripts) start without it.
    if name in __all__:
        from mooncake import buffer_pool

        return getattr(buffer_pool, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
