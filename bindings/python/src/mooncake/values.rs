//! Classes of values: what calls are configured with, and what they return.

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use snowskin_compat::store as compat;

use super::enums::{Enumeration as _, ObjectDataType, ReplicaStatus, SoftPinAction, TaskStatus, TaskType};

/// `ReplicaStatus.COMPLETE`.
const REPLICA_COMPLETE: i64 = 3;

/// The error for a value that an attribute cannot have.
fn refused(attribute: &str, given: &Bound<'_, PyAny>, wanted: &str) -> PyErr {
    let text = format!("{attribute}: {} is not {wanted}", super::shown(given));
    PyTypeError::new_err(text)
}

fn uint(attribute: &str, given: &Bound<'_, PyAny>) -> PyResult<u64> {
    given.extract().map_err(|_| refused(attribute, given, "int from 0 to 2**64 - 1"))
}

fn int(attribute: &str, given: &Bound<'_, PyAny>) -> PyResult<i32> {
    given.extract().map_err(|_| refused(attribute, given, "int of 32 bits"))
}

fn texts(attribute: &str, given: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    given.extract().map_err(|_| refused(attribute, given, "list[str]"))
}

fn text(attribute: &str, given: &Bound<'_, PyAny>) -> PyResult<String> {
    given.extract().map_err(|_| refused(attribute, given, "str"))
}

fn flag(attribute: &str, given: &Bound<'_, PyAny>) -> PyResult<bool> {
    given.extract().map_err(|_| refused(attribute, given, "bool"))
}

/// `None`, or what `convert` makes of another value.
fn optional<T>(
    attribute: &str,
    given: &Bound<'_, PyAny>,
    convert: impl Fn(&str, &Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<Option<T>> {
    if given.is_none() { Ok(None) } else { convert(attribute, given).map(Some) }
}

fn optional_uint(attribute: &str, given: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    optional(attribute, given, uint)
}

fn optional_texts(attribute: &str, given: &Bound<'_, PyAny>) -> PyResult<Option<Vec<String>>> {
    optional(attribute, given, texts)
}

/// How an object is stored: replicas, where they are, pins, what it is.
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.store", subclass)]
#[derive(Clone, Debug, Default)]
pub(super) struct ReplicateConfig(Wishes);

/// What a configuration says. Fields that the store does not know are kept for those who read them.
#[derive(Clone, Debug, Default)]
struct Wishes {
    store: compat::ReplicateConfig,
    preferred_nof_segments: Vec<String>,
    preferred_segment: String,
    data_type: i64,
}

impl ReplicateConfig {
    /// What the store shall do.
    pub(super) fn wishes(&self) -> compat::ReplicateConfig {
        let mut wishes = self.0.store.clone();
        if !self.0.preferred_segment.is_empty() {
            wishes.preferred_segments.push(self.0.preferred_segment.clone());
        }
        wishes
    }
}

/// Getters and setters of fields, each converted by one of the functions above.
macro_rules! fields {
    ($class:ident { $($by_hand:tt)* } $( $(#[doc = $doc:literal])+ $field:ident / $setter:ident at ($($path:tt)+): $kind:ty = $convert:expr; )+) => {
        #[pymethods]
        impl $class {
            $($by_hand)*
            $(
                $(#[doc = $doc])+
                #[getter]
                fn $field(&self) -> $kind {
                    self.0.$($path)+.clone()
                }

                #[setter($field)]
                fn $setter(&mut self, value: &Bound<'_, PyAny>) -> PyResult<()> {
                    self.0.$($path)+ = $convert(stringify!($field), value)?;
                    Ok(())
                }
            )+
        }
    };
}

fields! {
    ReplicateConfig {
        #[new]
        fn new() -> Self {
            Self::default()
        }

        /// What the put does to the soft pin.
        #[getter]
        fn soft_pin_action(&self) -> SoftPinAction {
            SoftPinAction::of(match self.0.store.soft_pin_action {
                compat::SoftPin::Preserve => 0,
                compat::SoftPin::Enable => 1,
                compat::SoftPin::Disable => 2,
            })
        }

        #[setter(soft_pin_action)]
        fn set_soft_pin_action(&mut self, value: &Bound<'_, PyAny>) -> PyResult<()> {
            let action = value.cast::<SoftPinAction>().ok().map(|action| action.get().number());
            self.0.store.soft_pin_action = match action {
                Some(0) => compat::SoftPin::Preserve,
                Some(1) => compat::SoftPin::Enable,
                Some(2) => compat::SoftPin::Disable,
                _ => return Err(refused("soft_pin_action", value, "a member of SoftPinAction")),
            };
            Ok(())
        }

        /// Whether the put sets the soft pin: the former name of `soft_pin_action = SoftPinAction.ENABLE`.
        #[getter]
        fn with_soft_pin(&self) -> bool {
            matches!(self.0.store.soft_pin_action, compat::SoftPin::Enable)
        }

        #[setter(with_soft_pin)]
        fn set_with_soft_pin(&mut self, value: &Bound<'_, PyAny>) -> PyResult<()> {
            if flag("with_soft_pin", value)? {
                self.0.store.soft_pin_action = compat::SoftPin::Enable;
            } else if self.with_soft_pin() {
                self.0.store.soft_pin_action = compat::SoftPin::Preserve;
            }
            Ok(())
        }

        /// What the object is.
        #[getter]
        fn data_type(&self) -> ObjectDataType {
            ObjectDataType::of(self.0.data_type)
        }

        #[setter(data_type)]
        fn set_data_type(&mut self, value: &Bound<'_, PyAny>) -> PyResult<()> {
            let kind = value.cast::<ObjectDataType>();
            let kind = kind.map_err(|_| refused("data_type", value, "a member of ObjectDataType"))?;
            self.0.data_type = kind.get().number();
            Ok(())
        }

        fn __str__(&self) -> String {
            self.0.shown()
        }

        fn _copy(&self) -> Self {
            self.clone()
        }
    }

    /// How many replicas in memory there shall be; as many as there is room for.
    replica_num / set_replica_num at (store.replica_num): u64 = uint;
    /// How many replicas on NVMe over Fabrics there shall be; this store has none.
    nof_replica_num / set_nof_replica_num at (store.nof_replica_num): u64 = uint;
    /// How many replicas in a distributed file system there shall be; this store has none.
    dfs_replica_num / set_dfs_replica_num at (store.dfs_replica_num): u64 = uint;
    /// How long a soft pin lasts, milliseconds; `None` for the master's default.
    soft_pin_ttl_ms / set_soft_pin_ttl_ms at (store.soft_pin_ttl_ms): Option<u64> = optional_uint;
    /// Whether the object is never evicted.
    with_hard_pin / set_with_hard_pin at (store.with_hard_pin): bool = flag;
    /// Names of the segments that shall have the replicas, one for each.
    preferred_segments / set_preferred_segments at (store.preferred_segments): Vec<String> = texts;
    /// Names of segments on NVMe over Fabrics; this store has none.
    preferred_nof_segments / set_preferred_nof_segments at (preferred_nof_segments): Vec<String> = texts;
    /// Name of the segment that shall have a replica.
    preferred_segment / set_preferred_segment at (preferred_segment): String = text;
    /// Whether the replicas of a batch shall be on one node.
    prefer_alloc_in_same_node / set_prefer_alloc_in_same_node at (store.prefer_alloc_in_same_node): bool = flag;
    /// The eviction group of each key of the call.
    group_ids / set_group_ids at (store.group_ids): Option<Vec<String>> = optional_texts;
}

impl Wishes {
    /// What `str` shows of it.
    fn shown(&self) -> String {
        let store = &self.store;
        let action = SoftPinAction::MEMBERS[store.soft_pin_action as usize].0;
        let ttl = store.soft_pin_ttl_ms.map_or_else(|| "default".to_owned(), |ttl| ttl.to_string());
        let preferred = match self.preferred_segment.as_str() {
            "" => String::new(),
            segment => format!("preferred_segment (deprecated): {segment}, "),
        };
        format!(
            "ReplicateConfig: {{ replica_num: {}, nof_replica_num: {}, dfs_replica_num: {}, soft_pin_action: \
             {action}, soft_pin_ttl_ms: {ttl}, with_hard_pin: {}, preferred_segments: [{}], {preferred}\
             preferred_nof_segments: [{}], prefer_alloc_in_same_node: {}, data_type: {} }}",
            store.replica_num,
            store.nof_replica_num,
            store.dfs_replica_num,
            u8::from(store.with_hard_pin),
            store.preferred_segments.join(", "),
            self.preferred_nof_segments.join(", "),
            u8::from(store.prefer_alloc_in_same_node),
            ObjectDataType::of(self.data_type).name_of(),
        )
    }
}

/// Where a replica in memory is.
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.store", get_all, set_all)]
#[derive(Clone, Debug, Default)]
pub(super) struct Descriptor {
    /// Length, bytes.
    size: u64,
    /// Address in the memory of its node.
    buffer_address: u64,
    /// The name of the node's segment.
    transport_endpoint: String,
}

#[pymethods]
impl Descriptor {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __repr__(&self) -> String {
        format!(
            "<Descriptor size={} buffer_address={} transport_endpoint={}>",
            self.size, self.buffer_address, self.transport_endpoint
        )
    }
}

/// A replica in memory.
#[pyclass(module = "mooncake.store", get_all)]
#[derive(Clone, Debug)]
pub(super) struct MemoryDescriptor {
    /// Where it is.
    buffer_descriptor: Descriptor,
}

/// A replica in a file.
#[pyclass(module = "mooncake.store", get_all, set_all)]
#[derive(Clone, Debug)]
pub(super) struct DiskDescriptor {
    /// Its path on its node.
    file_path: String,
    /// Length, bytes.
    object_size: u64,
}

/// One replica of an object.
#[pyclass(module = "mooncake.store", frozen)]
#[derive(Debug)]
pub(super) struct ReplicaDescriptor(compat::Replica);

impl ReplicaDescriptor {
    pub(super) const fn of(replica: compat::Replica) -> Self {
        Self(replica)
    }
}

#[pymethods]
impl ReplicaDescriptor {
    /// The state of the replica: those that can be read are listed.
    #[getter]
    #[allow(clippy::unused_self, reason = "a property of the object")]
    fn status(&self) -> ReplicaStatus {
        ReplicaStatus::of(REPLICA_COMPLETE)
    }

    /// is_memory_replica(self: mooncake.store.ReplicaDescriptor) -> bool
    ///
    /// Whether the replica is in memory. This store keeps all replicas there.
    #[allow(clippy::unused_self, reason = "a method of the object")]
    const fn is_memory_replica(&self) -> bool {
        true
    }

    /// is_disk_replica(self: mooncake.store.ReplicaDescriptor) -> bool
    ///
    /// Whether the replica is in a file that all nodes can read.
    #[allow(clippy::unused_self, reason = "a method of the object")]
    const fn is_disk_replica(&self) -> bool {
        false
    }

    /// is_local_disk_replica(self: mooncake.store.ReplicaDescriptor) -> bool
    ///
    /// Whether the replica is on a disk of its node.
    #[allow(clippy::unused_self, reason = "a method of the object")]
    const fn is_local_disk_replica(&self) -> bool {
        false
    }

    /// get_memory_descriptor(self: mooncake.store.ReplicaDescriptor) -> mooncake.store.MemoryDescriptor
    ///
    /// Where the replica is.
    fn get_memory_descriptor(&self) -> MemoryDescriptor {
        let compat::Replica { segment, addr, len } = self.0.clone();
        let at = Descriptor { size: len, buffer_address: addr, transport_endpoint: segment };
        MemoryDescriptor { buffer_descriptor: at }
    }

    /// get_disk_descriptor(self: mooncake.store.ReplicaDescriptor) -> mooncake.store.DiskDescriptor
    ///
    /// Where a replica in a file is. Raises RuntimeError for others.
    #[allow(clippy::unused_self, reason = "a method of the object")]
    fn get_disk_descriptor(&self) -> PyResult<DiskDescriptor> {
        Err(PyRuntimeError::new_err("Expected DiskDescriptor"))
    }
}

/// What is known of a task.
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.store", frozen)]
#[derive(Debug, Default)]
pub(super) struct QueryTaskResponse {
    id: (u64, u64),
    kind: i64,
    status: i64,
    created_ms: u64,
    seen_ms: u64,
    node: u64,
    message: String,
}

impl From<compat::Task> for QueryTaskResponse {
    fn from(task: compat::Task) -> Self {
        Self {
            id: task.number,
            kind: i64::from(task.is_move),
            status: match task.progress {
                compat::Progress::Pending => 0,
                compat::Progress::Processing => 1,
                compat::Progress::Failed => 2,
                compat::Progress::Done => 3,
            },
            created_ms: task.created_ms,
            seen_ms: task.seen_ms,
            node: task.node,
            message: task.message,
        }
    }
}

#[pymethods]
impl QueryTaskResponse {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// The task: two numbers.
    #[getter]
    const fn id(&self) -> (u64, u64) {
        self.id
    }

    /// What it does.
    #[getter]
    fn r#type(&self) -> TaskType {
        TaskType::of(self.kind)
    }

    /// Its state.
    #[getter]
    fn status(&self) -> TaskStatus {
        TaskStatus::of(self.status)
    }

    /// When it was created, milliseconds since 1970.
    #[getter]
    const fn created_at_ms_epoch(&self) -> u64 {
        self.created_ms
    }

    /// When it was seen in its state, milliseconds since 1970.
    #[getter]
    const fn last_updated_at_ms_epoch(&self) -> u64 {
        self.seen_ms
    }

    /// The node that carries it out: two numbers.
    #[getter]
    const fn assigned_client(&self) -> (u64, u64) {
        (0, self.node)
    }

    /// Why it failed, if it did.
    #[getter]
    fn message(&self) -> &str {
        &self.message
    }

    fn __repr__(&self) -> String {
        let Self { id, kind, status, created_ms, seen_ms, node, message } = self;
        format!(
            "QueryTaskResponse(id={}-{}, type={kind}, status={status}, created_at={created_ms}, \
             last_updated_at={seen_ms}, assigned_client=0-{node}, message=\"{message}\")",
            id.0, id.1
        )
    }
}

/// One axis along which a tensor, or a model, is divided: "tp", "dp", "ep" or "pp".
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.store")]
#[derive(Clone, Debug)]
pub(super) struct ParallelAxis(Axis);

#[derive(Clone, Debug)]
struct Axis {
    kind: String,
    rank: i32,
    size: i32,
    split_dim: Option<i32>,
    expert_id: Option<i32>,
    stage_id: Option<i32>,
}

fn optional_int(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Option<i32>> {
    optional(name, value, int)
}

fields! {
    ParallelAxis {
        #[new]
        fn new() -> Self {
            let kind = String::new();
            Self(Axis { kind, rank: 0, size: 1, split_dim: None, expert_id: None, stage_id: None })
        }
    }

    /// "tp", "dp", "ep" or "pp".
    kind / set_kind at (kind): String = text;
    /// The place of this part among `size`, from 0.
    rank / set_rank at (rank): i32 = int;
    /// The number of parts.
    size / set_size at (size): i32 = int;
    /// The dimension of the tensor that a "tp" axis divides.
    split_dim / set_split_dim at (split_dim): Option<i32> = optional_int;
    /// The expert of an "ep" axis.
    expert_id / set_expert_id at (expert_id): Option<i32> = optional_int;
    /// The stage of a "pp" axis.
    stage_id / set_stage_id at (stage_id): Option<i32> = optional_int;
}

/// How a tensor is divided: its axes.
///
/// The axes are those that were assigned, copied: an axis that is changed afterwards does not change this. A
/// list that `axes` returns has the axes themselves.
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.store")]
#[derive(Debug, Default)]
pub(super) struct TensorParallelism {
    axes: Vec<Py<ParallelAxis>>,
}

impl TensorParallelism {
    /// A copy with axes of its own.
    fn copied(&self, py: Python<'_>) -> PyResult<Self> {
        let copy = |axis: &Py<ParallelAxis>| Py::new(py, axis.try_borrow(py)?.clone());
        Ok(Self { axes: self.axes.iter().map(copy).collect::<PyResult<_>>()? })
    }
}

#[pymethods]
impl TensorParallelism {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// The axes, in the order of the ranks' layout.
    #[getter]
    fn axes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.axes.iter().map(|axis| axis.bind(py)))
    }

    #[setter]
    fn set_axes(&mut self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let axes: Vec<Bound<'_, ParallelAxis>> =
            value.extract().map_err(|_| refused("axes", value, "list[mooncake.store.ParallelAxis]"))?;
        let copy = |axis: &Bound<'_, ParallelAxis>| Py::new(py, axis.try_borrow()?.clone());
        self.axes = axes.iter().map(copy).collect::<PyResult<_>>()?;
        Ok(())
    }
}

/// What a read of a tensor wants: "as_stored", "shard" or "full", and of which parallelism.
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.store")]
#[derive(Debug)]
pub(super) struct ReadTarget {
    mode: &'static str,
    parallelism: Option<Py<TensorParallelism>>,
}

const MODES: [&str; 3] = ["as_stored", "shard", "full"];

#[pymethods]
impl ReadTarget {
    #[new]
    fn new() -> Self {
        Self { mode: MODES[0], parallelism: None }
    }

    /// "as_stored", "shard" or "full".
    #[getter]
    fn mode(&self) -> &'static str {
        self.mode
    }

    #[setter]
    fn set_mode(&mut self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let wanted = text("mode", value)?.to_lowercase();
        let mode = MODES.into_iter().find(|mode| *mode == wanted);
        self.mode = mode.ok_or_else(|| {
            PyRuntimeError::new_err(format!(
                "Unsupported ReadTarget mode {wanted:?}: use {}",
                MODES.map(|mode| format!("{mode:?}")).join(", ")
            ))
        })?;
        Ok(())
    }

    /// The parallelism of the reader, or `None`.
    #[getter]
    fn parallelism(&self, py: Python<'_>) -> Option<Py<TensorParallelism>> {
        self.parallelism.as_ref().map(|parallelism| parallelism.clone_ref(py))
    }

    #[setter]
    fn set_parallelism(&mut self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        self.parallelism = optional("parallelism", value, |name, value| {
            let wanted = "mooncake.store.TensorParallelism or None";
            let given = value.cast::<TensorParallelism>().map_err(|_| refused(name, value, wanted))?;
            Py::new(py, given.try_borrow()?.copied(py)?)
        })?;
        Ok(())
    }
}

/// Adds the classes to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ReplicateConfig>()?;
    module.add_class::<Descriptor>()?;
    module.add_class::<MemoryDescriptor>()?;
    module.add_class::<DiskDescriptor>()?;
    module.add_class::<ReplicaDescriptor>()?;
    module.add_class::<QueryTaskResponse>()?;
    module.add_class::<ParallelAxis>()?;
    module.add_class::<TensorParallelism>()?;
    module.add_class::<ReadTarget>()
}
