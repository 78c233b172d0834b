"""The examples in docstrings and in the documentation."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import snowskin
import snowskin.aio
import snowskin.tensor
import snowskin.testing
from snowskin.testing import Cluster

MODULES = [snowskin, snowskin.aio, snowskin.tensor, snowskin.testing]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
ROOT = Path(__file__).resolve().parents[3]
#: Pages with examples, and at least how many blocks of Python each has.
PAGES = {"README.md": 1, "docs/python.md": 12, "bindings/python/README.md": 1}


def native_classes() -> Iterator[type]:
    for name in snowskin.__all__:
        value = getattr(snowskin, name)
        if isinstance(value, type) and value.__module__ == "snowskin":
            yield value


def examples(value: object, name: str, names: dict[str, object]) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    module = value if isinstance(value, ModuleType) else False
    return [test for test in finder.find(value, name, module=module, globs=names) if test.examples]  # type: ignore[arg-type]


def run(tests: list[doctest.DocTest]) -> int:
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    report: list[str] = []
    for test in tests:
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
    return runner.tries


@pytest.fixture
def names(store: snowskin.Store, master: str) -> dict[str, object]:
    store.remove_matching(".", force=True)
    return {"snowskin": snowskin, "store": store, "master": master, "np": np}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_of_modules(module: ModuleType, names: dict[str, object]) -> None:
    # Among the package's are those of the native classes, of the errors, and of the configuration.
    least = 30 if module is snowskin else 1
    assert run(examples(module, module.__name__, names)) >= least


def test_everything_public_is_documented() -> None:
    missing = []
    for value in [
        *native_classes(),
        snowskin.aio.Store,
        snowskin.aio.Connecting,
        snowskin.Config,
        snowskin.Results,
    ]:
        if not value.__doc__:
            missing.append(value.__name__)
        for name, member in vars(value).items():
            if not name.startswith("_") and callable(member) and not member.__doc__:
                missing.append(f"{value.__name__}.{name}")
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_pages(page: str) -> None:
    """The blocks of Python of a page, in order, in one namespace; a block that begins with ``# not run`` is
    compiled only."""
    blocks = (ROOT / page).read_text().split("```python\n")[1:]
    assert len(blocks) >= PAGES[page]
    with Cluster(memory="64MiB") as cluster:
        names: dict[str, object] = {"MASTER": cluster.master}
        for block in blocks:
            source = block.split("```")[0].replace('"127.0.0.1:50051"', "MASTER")
            code = compile(source, page, "exec")
            if not source.startswith("# not run"):
                exec(code, names)
        for value in list(names.values()):
            if isinstance(value, (snowskin.Store, snowskin.Engine)):
                value.close()
