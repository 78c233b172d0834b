"""The results of bulk operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar, overload

from ._errors import BatchError, SnowskinError
from ._native import Lease

T = TypeVar("T")


class Results(Sequence[T], Generic[T]):
    """One result per item, in the order of the items, and the errors of those that failed.

    A failed item has the value of a miss (``None``, or ``False``) in its place, so a cache that treats every
    failure as a miss needs nothing else. Others look at :attr:`errors`, or call :meth:`raise_errors`.

    ``with`` releases the leases among the results.

    >>> results = store.get_many(["no such block"])
    >>> list(results), results.errors
    ([None], {})
    """

    __slots__ = ("_errors", "_values")

    def __init__(self, values: list[T], errors: dict[int, SnowskinError]) -> None:
        self._values = values
        self._errors = errors

    @property
    def errors(self) -> dict[int, SnowskinError]:
        """The errors by index of the item."""
        return self._errors

    def raise_errors(self) -> None:
        """Raises :exc:`BatchError` if an item failed."""
        if self._errors:
            index, first = next(iter(self._errors.items()))
            count = len(self._errors)
            raise BatchError(
                f"{count} of {len(self._values)} items failed; item {index}: {first}", errors=self._errors
            ) from first

    def release(self) -> None:
        """Releases the leases among the results."""
        for value in self._values:
            if isinstance(value, Lease):
                value.release()

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[T]:
        return iter(self._values)

    def __enter__(self) -> Results[T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __repr__(self) -> str:
        errors = f", {len(self._errors)} errors" if self._errors else ""
        return f"<snowskin.Results of {len(self._values)}{errors}>"


Results.__module__ = "snowskin"
