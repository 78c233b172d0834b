"""Names, arguments, defaults and answers, compared with those of the distribution that is replaced."""

from __future__ import annotations

import inspect

import cluster
import pytest
import returns
import surface


def test_the_file_is_read_as_it_was_written() -> None:
    text = surface.DATA.read_text()
    assert surface.write(surface.read(text)) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("self: mooncake.store.X, key: str, n: int = 3", "key, n=3"),
        ("self, hint: str = '', *args, config: C = <mooncake.store.ReplicateConfig object at 0x7f>", None),
        ("a, b: dict[str, list[int]] = None", "a, b=None"),
        ('a: str = "x, (y"', "a='x, (y'"),
    ],
)
def test_texts_of_arguments(text: str, shown: str | None) -> None:
    expected = "hint='', *args, config=ReplicateConfig()" if shown is None else shown
    assert surface.render(surface.parameters(text)) == expected


def test_what_the_comparison_finds() -> None:
    wanted = surface.read(
        "os.path\n  join(a, *p)\n  no_such_name\n  class splitext\n    no_such_member\n  basename(other)\n"
    )
    report = surface.compare(wanted)
    assert report.missing == ["os.path.no_such_name", "os.path.splitext.no_such_member"]
    assert any("os.path.basename" in finding for finding in report.different)


@pytest.mark.cluster
def test_no_name_argument_or_default_is_missing() -> None:
    report = surface.compare(surface.read(surface.DATA.read_text()))
    assert (report.missing, report.different, report.extra) == ([], [], [])
    assert (report.names, report.functions) > (400, 200)


@pytest.mark.cluster
def test_arguments_that_connectors_look_for() -> None:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    # vllm-ascend asks the signature, and where there is none, the documentation.
    assert "enable_ssd_offload" in inspect.signature(MooncakeDistributedStore.setup).parameters
    assert "enable_ssd_offload" in (MooncakeDistributedStore.setup.__doc__ or "")
    assert hasattr(ReplicateConfig, "group_ids")


@pytest.mark.cluster
def test_answers_are_those_of_the_table() -> None:
    with cluster.Master() as master:
        count, found = returns.differences(master.address)  # type: ignore[attr-defined]
        assert found == []
        assert count > 110


@pytest.mark.cluster
def test_a_master_that_is_gone_is_minus_900_in_bounded_time() -> None:
    with cluster.Master() as master, cluster.store(master) as store:  # type: ignore[arg-type]
        memory = cluster.Memory(4096)
        assert store.register_buffer(memory.address, memory.size) == 0
        assert store.put("k", b"x") == 0
        master.kill()
        first = cluster.eventually(lambda: store.is_exist("q") not in (0, 1), "the store notices")
        assert first
        assert store.is_exist("k") == -900
        assert store.get("k") == b""
        assert store.put("q", b"x") == -900
        assert store.get_into("k", memory.address, memory.size) == -900
        assert store.batch_is_exist(["a", "b"]) == [-900, -900]
        assert store.batch_get_into_multi_buffers(["a"], [[memory.address]], [[8]]) == [-900]
        assert store.batch_put_from_multi_buffers(["a"], [[memory.address]], [[8]]) == [-900]
        assert store.remove("k") == -900
        assert store.get_size("k") == -900
        assert store.health_check() == 2
        assert store.remove_all() == -900
        assert store.close() == 0
