"""Enumerations, configurations and other values of the native module."""

from __future__ import annotations

import operator
import pickle
from typing import Any

import pytest

pytestmark = pytest.mark.cluster


def test_members_have_the_arithmetic_of_the_replaced_classes() -> None:
    import mooncake.engine as engine
    from mooncake.engine import TransferEngine, TransferOpcode

    assert TransferEngine.TransferOpcode is TransferOpcode
    assert engine.Read is TransferOpcode.Read and engine.Write is TransferOpcode.Write
    assert (int(engine.Write), operator.index(engine.Write), engine.Write.value) == (1, 1, 1)
    assert [10, 20][engine.Write] == 20
    assert (str(engine.Read), repr(engine.Read), engine.Read.name) == (
        "TransferOpcode.Read",
        "<TransferOpcode.Read: 0>",
        "Read",
    )
    assert engine.Read < engine.Write and engine.Write >= engine.Read
    assert engine.Read != 0 and not engine.Read == 0  # noqa: SIM201
    assert TransferOpcode(1) == engine.Write and TransferOpcode(1) is not engine.Write
    assert hash(TransferOpcode(1)) == hash(engine.Write)
    with pytest.raises(TypeError):
        engine.Read | 1
    with pytest.raises(TypeError):
        engine.Read < 1  # noqa: B015
    assert list(TransferOpcode.__members__) == ["Read", "Write"]
    assert repr(TransferOpcode(7)) == "<TransferOpcode.???: 7>"


def test_members_of_other_classes_have_no_order() -> None:
    from mooncake.store import ReplicaStatus, TaskStatus

    with pytest.raises(TypeError):
        ReplicaStatus.FAILED < ReplicaStatus.COMPLETE  # noqa: B015
    assert ReplicaStatus.FAILED != TaskStatus.FAILED
    # The last class whose members a module has wins.
    import mooncake.store as store

    assert store.FAILED is TaskStatus.FAILED and store.PROCESSING is TaskStatus.PROCESSING
    assert not hasattr(store, "ENABLE")


@pytest.mark.parametrize(
    "name", ["ObjectDataType", "SoftPinAction", "ReplicaStatus", "TaskType", "TaskStatus"]
)
def test_members_can_be_pickled(name: str) -> None:
    import mooncake.store as store

    for member in getattr(store, name).__members__.values():
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(member, protocol)) == member


def test_the_configuration_of_a_put() -> None:
    from mooncake.store import ObjectDataType, ReplicateConfig, SoftPinAction

    config = ReplicateConfig()
    assert (config.replica_num, config.preferred_segment, config.preferred_segments) == (1, "", [])
    assert (config.soft_pin_action, config.soft_pin_ttl_ms) == (SoftPinAction.PRESERVE, None)
    assert (config.group_ids, config.data_type) == (None, ObjectDataType.UNKNOWN)
    assert str(config) == (
        "ReplicateConfig: { replica_num: 1, nof_replica_num: 0, dfs_replica_num: 0, soft_pin_action: PRESERVE, "
        "soft_pin_ttl_ms: default, with_hard_pin: 0, preferred_segments: [], preferred_nof_segments: [], "
        "prefer_alloc_in_same_node: 0, data_type: UNKNOWN }"
    )
    config.preferred_segment = "a:1"
    assert config.preferred_segments == []
    assert "[preferred_segment (deprecated): a:1, ]" in str(config) or "a:1" in str(config)
    config.group_ids = ("g", "h")
    assert config.group_ids == ["g", "h"]
    config.group_ids = None
    config.with_soft_pin = True
    assert config.soft_pin_action == SoftPinAction.ENABLE
    config.with_soft_pin = False
    assert config.soft_pin_action == SoftPinAction.PRESERVE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("replica_num", -1),
        ("replica_num", 2**64),
        ("replica_num", "2"),
        ("soft_pin_ttl_ms", -1),
        ("soft_pin_ttl_ms", 2**64),
        ("soft_pin_action", 1),
        ("data_type", 1),
        ("preferred_segments", [1]),
        ("preferred_segment", None),
        ("group_ids", "text"),
    ],
)
def test_a_value_that_an_attribute_cannot_have_is_a_type_error(name: str, value: Any) -> None:
    from mooncake.store import ReplicateConfig

    with pytest.raises(TypeError, match=name):
        setattr(ReplicateConfig(), name, value)


def test_an_attribute_that_does_not_exist_is_an_error() -> None:
    from mooncake.store import ReplicateConfig

    with pytest.raises(AttributeError):
        ReplicateConfig().replicas = 2  # type: ignore[attr-defined]


def test_axes_belong_to_what_they_were_assigned_to() -> None:
    from mooncake.store import ParallelAxis, ReadTarget, TensorParallelism

    axis = ParallelAxis()
    assert (axis.kind, axis.rank, axis.size, axis.split_dim) == ("", 0, 1, None)
    axis.kind, axis.size, axis.split_dim = "tp", 4, 0
    parallelism = TensorParallelism()
    parallelism.axes = [axis]
    axis.rank = 3
    assert parallelism.axes[0].rank == 0
    parallelism.axes[0].rank = 2
    assert parallelism.axes[0].rank == 2
    target = ReadTarget()
    assert (target.mode, target.parallelism) == ("as_stored", None)
    target.mode, target.parallelism = "Shard", parallelism
    parallelism.axes[0].rank = 1
    assert (target.mode, target.parallelism.axes[0].rank) == ("shard", 2)
    with pytest.raises(RuntimeError, match="Unsupported ReadTarget mode"):
        target.mode = "half"


def test_names_that_do_not_work_say_why() -> None:
    import mooncake.engine as engine
    import mooncake.store as store

    for call in (
        engine.RpcInterface,
        engine.create_rpc_client,
        engine.create_rpc_server,
        lambda: engine.SharedSegment.create("s", 1, 1, 0),
        lambda: store.EngramStore(0, store.EngramStoreConfig()),
        lambda: store.MooncakeDistributedNoFRegister().real_register("n", 1, "a", 2, 3, 4, "m"),
    ):
        with pytest.raises(NotImplementedError, match="Snowskin"):
            call()
    assert engine.SharedSegment.supported() is False
    assert engine.CoroRPCInterface is engine.RpcInterface
    for name in ("InnerTransferEngine", "ReceivedData", "ReceivedTensor"):
        with pytest.raises(TypeError):
            getattr(engine, name)()


def test_modules_can_be_imported_in_either_order() -> None:
    import cluster

    for order in ("store, engine", "engine, store"):
        first, second = order.split(", ")
        code = (
            f"import mooncake.{first}, mooncake.{second}\n"
            "from mooncake.engine import TransferEngine\n"
            "from mooncake.store import MooncakeDistributedStore, ReplicateConfig\n"
            "import mooncake; assert mooncake.BufferPool is mooncake.RegisteredBufferPool\n"
        )
        with cluster.python(code) as running:
            assert running.child.wait(30) == 0, running.log()


def test_classes_can_be_derived_from() -> None:
    from mooncake.store import MooncakeDistributedStore

    class Derived(MooncakeDistributedStore):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    derived = Derived("n")
    assert (derived.name, derived.health_check(), derived.close()) == ("n", 1, 0)


def test_numbers_that_are_no_addresses_are_type_errors() -> None:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    for arguments in ((-1, 8), (2**64, 8), ("0", 8), (1.5, 8), (None, 8)):
        with pytest.raises(TypeError, match="register_buffer"):
            store.register_buffer(*arguments)
    with pytest.raises(TypeError, match="is missing"):
        store.register_buffer(1)
    with pytest.raises(TypeError, match="passed twice"):
        store.register_buffer(1, 2, size=2)
    with pytest.raises(TypeError, match="are possible"):
        store.register_buffer(1, 2, 3)
    with pytest.raises(TypeError, match="keys"):
        store.batch_is_exist("text")
