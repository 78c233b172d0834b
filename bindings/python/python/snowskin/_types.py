"""Types of arguments."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TypeAlias

__all__ = ["Buffer", "Key", "Value"]

if sys.version_info >= (3, 12):
    from collections.abc import Buffer as _Exporter
else:

    class _Exporter(Protocol):
        """The buffer protocol, of which Python code knows nothing before 3.12."""

        def __buffer__(self, flags: int, /) -> memoryview: ...


class _Tensor(Protocol):
    """The array API's exchange of tensors."""

    def __dlpack__(self, *arguments: Any, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class _CudaArray(Protocol):
    """An array in memory of a CUDA device, of a library without DLPack."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


#: Contiguous memory: the buffer protocol, ``__dlpack__``, or ``__cuda_array_interface__``. Memory of a GPU has
#: to be ready when it is passed: what writes it has ended.
Buffer: TypeAlias = _Exporter | _Tensor | _CudaArray
#: What a put stores: a buffer, or several that are joined.
Value: TypeAlias = Buffer | list[Buffer] | tuple[Buffer, ...]
#: The name of an object.
Key: TypeAlias = str | bytes
