"""What the calls of a store return: a table of calls, and of what the replaced distribution returns for them.

    python returns.py MASTER_ADDRESS   makes the calls against that master; status 1 when an answer differs

The answers of the other distribution were recorded with one client, 64 MiB of memory in the store, a local
buffer of 16 MiB and leases of 500 ms. The rows run in their order, each on what those before it have left. A
row where the answer here is another one, on purpose, has ``why``.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SEGMENT = 64 << 20
LOCAL_BUFFER = 16 << 20
MEMORY = 65536
LEASE_S = 0.5
UNSUPPORTED = "incompatible function arguments. The following argument types are supported:"


@dataclass(frozen=True)
class Raises:
    """An exception with this first line."""

    kind: str
    line: str


@dataclass(frozen=True)
class Row:
    """One call. ``there`` is the recorded answer; ``here``, with ``why``, ours where it is another one."""

    call: str
    there: Any
    here: Any = None
    why: str = ""

    @property
    def wanted(self) -> Any:
        return self.here if self.why else self.there


def rows(address: str) -> list[Row]:
    """The table. ``s`` is a store, ``p`` the address of 64 KiB, ``C`` makes a configuration."""
    setup = f"s.setup('127.0.0.1', 'P2PHANDSHAKE', {SEGMENT}, {LOCAL_BUFFER}, 'tcp', '', '{address}')"
    nothing = (
        "nothing is there: an answer for an object that needs the memory of the process would be a crash"
    )
    return [
        # Before setup.
        Row("s.health_check()", 1),
        Row("s.close()", 0),
        Row("s.put('a', b'x')", "a crash", -600, nothing),
        Row("s.is_exist('a')", "a crash", -600, nothing),
        Row("s.batch_is_exist(['a', 'b'])", "a crash", [-600, -600], nothing),
        Row("s.get_size('a')", "a crash", -600, nothing),
        Row("s.get_buffer('a')", "a crash", None, nothing),
        Row("s.get_into('a', p, 1)", "a crash", -600, nothing),
        Row("s.register_buffer(p, 65536)", "a crash", -600, nothing),
        Row("s.get_hostname()", "a crash", "", nothing),
        Row("s.remove('a')", "a crash", -600, nothing),
        Row("s.get('a')", b""),
        Row("s.get_batch(['a', 'b'])", [b""], [b"", b""], "an answer for each key"),
        Row("s.put_from('a', p, 8)", -600),
        Row("s.upsert('a', b'x')", -600),
        Row("s.put_tensor('a', None)", -600),
        Row("s.get_tensor('a')", None),
        Row("s.batch_put_from_multi_buffers(['a'], [[p]], [[8]])", []),
        Row("s.batch_get_session_start(['a'])", []),
        Row("s.batch_put_session_start(['a'], [8])", []),
        Row("s.batch_get_session_end(['a'])", -1),
        # Objects.
        Row(setup, 0),
        Row("s.health_check()", 0),
        Row("':' in s.get_hostname()", True),
        Row("s.put('a', b'hello')", 0),
        Row("s.put('a', b'other')", 0),
        Row("s.get('a')", b"hello"),
        Row("s.put('e', b'')", -600),
        Row("s.get('e')", b""),
        Row("s.is_exist('e')", 0),
        Row("s.get_size('e')", -704),
        Row("s.put('', b'x')", -600),
        Row("s.put('mv', memoryview(b'abc'))", 0),
        Row("s.put('ba', bytearray(b'abc'))", 0),
        Row("s.put('st', 'abc')", Raises("TypeError", f"put(): {UNSUPPORTED}")),
        Row("s.get('zz')", b""),
        Row("s.get_batch(['a', 'zz'])", [b"hello", b""]),
        Row("s.get_size('a')", 5),
        Row("s.get_size('zz')", -704),
        Row("s.is_exist('a')", 1),
        Row("s.is_exist('zz')", 0),
        Row("s.batch_is_exist(['a', 'zz'])", [1, 0]),
        Row("s.batch_is_exist([])", []),
        Row("s.get_buffer('zz')", None),
        Row("type(s.get_buffer('a')).__name__", "BufferHandle"),
        Row("(lambda h: (len(h), h.size(), bytes(h)))(s.get_buffer('a'))", (5, 5, b"hello")),
        Row("(lambda m: (m.format, m.readonly, m.itemsize))(memoryview(s.get_buffer('a')))", ("b", False, 1)),
        Row("[type(h).__name__ for h in s.batch_get_buffer(['a', 'zz'])]", ["BufferHandle", "NoneType"]),
        # Addresses.
        Row("s.get_into('a', p, 65536)", 5),
        Row("s.register_buffer(p, 65536)", 0),
        Row("s.register_buffer(p, 65536)", -600),
        Row("s.get_into('a', p, 65536)", 5),
        Row("s.get_into('zz', p, 65536)", -704),
        Row("s.get_into('a', p, 3)", -600),
        Row("s.batch_get_into(['a', 'zz'], [p, p + 100], [100, 100])", [5, -704]),
        Row("s.batch_get_into(['a', 'zz'], [p], [100])", [-600, -600]),
        Row("s.put_from('pf', p, 16)", 0),
        Row("s.put_from('pf', p, 16)", 0),
        Row("s.put_from('pf0', p, 0)", 0),
        Row("s.batch_put_from(['b1', 'b2', 'pf'], [p, p + 8, p + 16], [8, 8, 8])", [0, 0, 0]),
        Row("s.batch_put_from(['b1', 'b2'], [p], [8])", [-600, -600]),
        Row("s.batch_put_from([], [], [])", []),
        Row("s.batch_put_from_multi_buffers(['m1', 'm2'], [[p, p + 8], [p + 16]], [[8, 8], [8]])", [0, 0]),
        Row("s.batch_put_from_multi_buffers(['m1'], [[p, p + 8]], [[8, 8]])", [0]),
        Row(
            "s.batch_get_into_multi_buffers(['m1', 'zz'], [[p, p + 8], [p + 16]], [[8, 8], [8]])", [16, -704]
        ),
        Row("s.batch_get_into_multi_buffers(['m1'], [[p]], [[8]])", [-600]),
        Row("s.batch_get_into_multi_buffers(['m1'], [[p, p + 8, p + 16]], [[8, 8, 8]])", [-800]),
        # Parts, batches, upserts.
        Row("s.put_parts('pp', b'ab', b'cd', bytearray(b'ef'))", 0),
        Row("s.get('pp')", b"abcdef"),
        Row("s.put_parts('pp0')", 0),
        Row("s.put_batch(['k1', 'k2'], [b'1', b'22'])", 0),
        Row("s.put_batch(['k1', 'k3'], [b'1', b'3'])", 0),
        Row("s.put_batch(['k1', 'k4'], [b'1'])", -600),
        Row("s.upsert('a', b'HELLO2')", 0),
        Row("s.get('a')", b"HELLO2"),
        Row("s.upsert_batch(['a', 'n'], [b'x', b'y'])", 0),
        Row("s.batch_upsert_from(['n'], [p], [4])", [0]),
        # Replicas.
        Row(
            "[(r.status.name, r.is_memory_replica(), r.is_disk_replica(), r.is_local_disk_replica())"
            " for r in s.get_replica_desc('a')]",
            [("COMPLETE", True, False, False)],
        ),
        Row("s.get_replica_desc('a')[0].get_memory_descriptor().buffer_descriptor.size", 1),
        Row(
            "repr(s.get_replica_desc('a')[0].get_memory_descriptor().buffer_descriptor).split('=')[0:2]",
            ["<Descriptor size", "1 buffer_address"],
        ),
        Row("s.get_replica_desc('zz')", []),
        Row("{k: len(v) for k, v in s.batch_get_replica_desc(['a', 'zz']).items()}", {"a": 1}),
        Row(
            "s.get_replica_desc('a')[0].get_disk_descriptor()",
            Raises("RuntimeError", "Expected DiskDescriptor"),
        ),
        # Removal.
        Row("s.get('a') and s.remove('a')", -706),
        Row("s.remove('a', True)", 0),
        Row("s.remove('zz')", -704),
        Row("s.batch_remove(['b1', 'zz'], True)", [0, -704]),
        Row("s.remove_by_regex('^k', True)", 3),
        Row("s.remove_by_regex('(', True)", -600),
        Row("s.get('pp') and s.batch_replica_clear(['pp', 'zz'])", []),
        # Configurations.
        Row("s.put('r2', b'x', C(replica_num=2))", 0),
        Row("s.put('r0', b'x', C(replica_num=0))", -600),
        Row("s.put('rp', b'x', C(preferred_segment='nope:1'))", 0),
        # Tasks.
        Row("s.create_copy_task('zz', ['x:1'])", ((0, 0), -704)),
        Row("s.create_copy_task('pp', ['nope:1'])", ((0, 0), -600)),
        Row("s.query_task((1, 2))", (None, -1400)),
        # Sessions.
        Row("s.batch_get_session_start(['m1', 'zz'])", [0, -704]),
        Row("s.batch_get_into_multi_buffer_ranges(['m1'], [[p]], [[4]], [[2]])", [4]),
        Row("s.batch_get_into_multi_buffer_ranges(['m2'], [[p]], [[4]], [[2]])", [-600]),
        Row("s.batch_get_session_end(['m1', 'zz'])", 0),
        Row("s.batch_put_session_start(['ps', 'm1'], [16, 16])", [0, -705]),
        Row("s.batch_put_from_multi_buffer_ranges(['ps'], [[p, p + 8]], [[8, 8]], [[0, 8]])", [16]),
        Row("s.is_exist('ps')", 0),
        Row("s.batch_put_session_end(['ps'])", [0]),
        Row("s.is_exist('ps')", 1),
        Row("s.batch_put_session_end(['ps'])", [-600]),
        Row("s.batch_put_session_revoke(['ps'])", [-600]),
        Row("s.batch_put_session_revoke(['qq'])", [-600]),
        Row(
            "s.get_into_ranges([p], [['m1', 'zz']], [[[0, 8], [20]]], [[[0, 4], [0]]], [[[4, 4], [4]]])",
            [[[4, 4], [-704]]],
        ),
        # Memory and segments.
        Row("s.unregister_buffer(p)", 0),
        Row("s.unregister_buffer(p)", -600),
        Row("s.alloc_from_mem_pool(1024)", 0),
        Row("s.get_offload_rpc_read_count()", 0),
        Row(
            "(lambda d: (d['ret'], len(d['segment_ids']), d['allocated_size']))"
            "(s.allocate_and_mount_segment(16 << 20))",
            (0, 1, 16 << 20),
        ),
        Row("s.unmount_segment(['00000000-0000-0000-0000-000000000001'])", -1),
        Row("s.mount_segment('/nope/x', 4096)", {"ret": -1, "segment_ids": []}),
        # The end.
        Row("s.remove_all(True) > 0", True),
        Row("s.close()", 0),
        Row("s.close()", 0),
        Row("s.health_check()", 1),
        Row(
            "s.setup({'local_hostname': '127.0.0.1', 'metadata_server': 'P2PHANDSHAKE', "
            "'global_segment_size': '32mb', 'local_buffer_size': 16 << 20, 'protocol': 'tcp', "
            f"'rdma_devices': '', 'master_server_addr': '{address}'}})",
            0,
        ),
        Row("s.close()", 0),
        Row("s.setup({'local_hostname': '127.0.0.1'})", -600),
        Row("s.setup('127.0.0.1', 'P2PHANDSHAKE', 16 << 20, 16 << 20, 'tcp', '', '127.0.0.1:1')", -1),
        Row(
            "s.setup('127.0.0.1', 'P2PHANDSHAKE', 16 << 20, 16 << 20, 'tcp', '', '127.0.0.1:1', bogus=1)",
            Raises("TypeError", f"setup(): {UNSUPPORTED}"),
        ),
    ]


def answer(call: Callable[[], Any]) -> Any:
    """What a call returns, or raises."""
    try:
        return call()
    except Exception as error:
        return Raises(type(error).__name__, str(error).splitlines()[0])


def differences(address: str) -> tuple[int, list[str]]:
    """How many calls were made, and those whose answers are not those of the table."""
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    def configured(**fields: Any) -> Any:
        config = ReplicateConfig()
        for name, value in fields.items():
            setattr(config, name, value)
        return config

    memory = (ctypes.c_char * MEMORY)()
    names = {"s": MooncakeDistributedStore(), "p": ctypes.addressof(memory), "C": configured}
    table = rows(address)
    found = []
    for row in table:
        given = answer(lambda row=row: eval(row.call, names))  # type: ignore[misc]
        if given != row.wanted or type(given) is not type(row.wanted):
            found.append(f"{row.call}: {given!r} here, {row.wanted!r} in the table")
            if row.call.startswith("s.setup("):
                # The log says why. All other calls would only say that there is no store.
                found.append("no further call was made: there is no store")
                break
    names["s"].close()
    return len(table), found


def main(words: list[str]) -> int:
    if len(words) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    began = time.monotonic()
    count, found = differences(words[0])
    for row in found:
        print(f"different: {row}")
    exceptions = [row for row in rows(words[0]) if row.why]
    print(f"{count} calls in {time.monotonic() - began:.1f} s: {len(found)} different,")
    print(
        f"{len(exceptions)} with another answer on purpose ({len({row.why for row in exceptions})} reasons)"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
