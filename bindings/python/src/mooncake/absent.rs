//! Names that exist and do not work here, each with the reason: no connector that is known calls them.

use pyo3::exceptions::PyNotImplementedError;
use pyo3::prelude::*;

use super::signature::{Arguments, Call, Parameter, Signature, default_of, python_methods};

const RPC: &str = "Snowskin has no RPC between Python processes: use a library for that, or the notifications of \
                   TransferEngine for messages that belong to transfers";
const SHARED: &str = "Snowskin does not share device memory between processes: memory of a TransferEngine on the \
                      same host is shared by its fabric `shm`";
const ENGRAM: &str =
    "Snowskin has no Engram tables: store them as objects, and read rows with get_into_ranges";
const NOF: &str =
    "Snowskin does not take over namespaces of NVMe over Fabrics: give a node a directory on the device";

/// The error of every call of this module.
fn absent<T>(why: &str) -> PyResult<T> {
    Err(PyNotImplementedError::new_err(why.to_owned()))
}

/// Declares the body of the methods of a class.
macro_rules! absent_body {
    ($name:ident, $class:ident, $why:expr) => {
        fn $name(_: &Bound<'_, $class>, _: &Arguments<'_, '_>) -> PyResult<()> {
            absent($why)
        }
    };
}

/// Messages between Python processes. Not available: the constructor raises NotImplementedError.
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.engine", frozen)]
pub(super) struct RpcInterface;

absent_body!(rpc, RpcInterface, RPC);

python_methods! {
    impl RpcInterface as "mooncake.engine.RpcInterface" {
        #[new]
        fn new() -> PyResult<Self> {
            absent(RPC)
        }

        #[doc = concat!(
            "send_data_async(self: mooncake.engine.RpcInterface, target_address: str, data: ",
            "object, loop: object) -> object",
        )]
        ///
        /// Not available.
        fn send_data_async(&self, target_address: &str, data: &Bound<'_, PyAny>, r#loop: &Bound<'_, PyAny>) -> PyResult<()> {
            let _ = (target_address, data, r#loop);
            absent(RPC)
        }

        #[doc = concat!(
            "send_tensor_async(self: mooncake.engine.RpcInterface, target_address: str, ",
            "tensor: object, loop: object) -> object",
        )]
        ///
        /// Not available.
        fn send_tensor_async(&self, target_address: &str, tensor: &Bound<'_, PyAny>, r#loop: &Bound<'_, PyAny>) -> PyResult<()> {
            let _ = (target_address, tensor, r#loop);
            absent(RPC)
        }
    }

    /// Not available.
    fn initialize(
        listen_address: "str" = "''", thread_count: "int" = "0", timeout_seconds: "int" = "30",
        pool_size: "int" = "100"
    ) -> "bool" => rpc;

    /// Not available.
    fn initialize_client(pool_size: "int" = "100", timeout_seconds: "int" = "30") -> "bool" => rpc;

    /// Not available.
    fn initialize_server(
        listen_address: "str", thread_count: "int" = "8", timeout_seconds: "int" = "30"
    ) -> "bool" => rpc;

    /// Not available.
    fn send_data(target_address: "str", data: "object") -> "int" => rpc;

    /// Not available.
    fn send_tensor(target_address: "str", tensor: "object") -> "int" => rpc;

    /// Not available.
    fn set_data_receive_callback(callback: "Callable") -> "None" => rpc;

    /// Not available.
    fn set_tensor_receive_callback(callback: "Callable") -> "None" => rpc;

    /// Not available.
    fn start_server() -> "bool" => rpc;

    /// Not available.
    fn start_server_async() -> "bool" => rpc;

    /// Not available.
    fn stop_server() -> "None" => rpc;
}

/// Bytes that `RpcInterface` received. Not available.
#[pyclass(module = "mooncake.engine", frozen)]
pub(super) struct ReceivedData;

absent_body!(data, ReceivedData, RPC);

python_methods! {
    impl ReceivedData as "mooncake.engine.ReceivedData" {
        /// Not available.
        #[getter]
        fn source_address(&self) -> PyResult<String> {
            absent(RPC)
        }

        /// Not available.
        #[getter]
        fn data_size(&self) -> PyResult<u64> {
            absent(RPC)
        }
    }

    /// Not available.
    fn get_bytes() -> "bytes" => data;

    /// Not available.
    fn get_memory_view() -> "memoryview" => data;
}

/// A tensor that `RpcInterface` received. Not available.
#[pyclass(module = "mooncake.engine", frozen)]
pub(super) struct ReceivedTensor;

absent_body!(tensor, ReceivedTensor, RPC);

python_methods! {
    impl ReceivedTensor as "mooncake.engine.ReceivedTensor" {
        /// Not available.
        #[getter]
        fn source_address(&self) -> PyResult<String> {
            absent(RPC)
        }

        /// Not available.
        #[getter]
        fn shape(&self) -> PyResult<Vec<u64>> {
            absent(RPC)
        }

        /// Not available.
        #[getter]
        fn dtype(&self) -> PyResult<String> {
            absent(RPC)
        }

        /// Not available.
        #[getter]
        fn total_bytes(&self) -> PyResult<u64> {
            absent(RPC)
        }
    }

    /// Not available.
    fn get_data_as_bytes() -> "bytes" => tensor;

    /// Not available.
    fn get_data_size() -> "int" => tensor;

    /// Not available.
    fn get_memory_view() -> "memoryview" => tensor;
}

/// Device memory that several processes share. Not available: `supported` is false.
#[pyclass(module = "mooncake.engine", frozen)]
pub(super) struct SharedSegment;

absent_body!(shared, SharedSegment, SHARED);

python_methods! {
    impl SharedSegment as "mooncake.engine.SharedSegment" {
        /// Not available.
        #[staticmethod]
        #[pyo3(signature = (name, size, world_size, rank_id, owner_rank=0, device_id=0, mmap=true, host_register=false))]
        #[allow(clippy::too_many_arguments, reason = "the arguments of the interface that is replaced")]
        fn create(
            name: &str,
            size: u64,
            world_size: u64,
            rank_id: u64,
            owner_rank: u64,
            device_id: i64,
            mmap: bool,
            host_register: bool,
        ) -> PyResult<()> {
            let _ = (name, size, world_size, rank_id, owner_rank, device_id, mmap, host_register);
            absent(SHARED)
        }

        /// Whether segments can be created: no.
        #[staticmethod]
        #[pyo3(signature = (mmap=true, host_register=false))]
        fn supported(mmap: bool, host_register: bool) -> bool {
            let _ = (mmap, host_register);
            false
        }
    }

    /// Not available.
    fn base_addr() -> "int" => shared;

    /// Not available.
    fn complete(blobs: "list[str]") -> "None" => shared;

    /// Not available.
    fn device_addr() -> "int" => shared;

    /// Not available.
    fn ready() -> "bool" => shared;

    /// Not available.
    fn size() -> "int" => shared;
}

/// The size of Engram tables.
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.store", get_all, set_all)]
#[derive(Debug, Default)]
pub(super) struct EngramStoreConfig {
    /// How many rows each table has.
    table_vocab_sizes: Vec<i64>,
    /// How many numbers a row has.
    embedding_dim: i64,
}

#[pymethods]
impl EngramStoreConfig {
    #[new]
    fn new() -> Self {
        Self::default()
    }
}

/// Embedding tables in a store. Not available: the constructor raises NotImplementedError.
///
/// __init__(self, layer_id: int, config: mooncake.store.EngramStoreConfig, store: object = None) -> None
#[pyclass(module = "mooncake.store", frozen)]
pub(super) struct EngramStore;

absent_body!(engram, EngramStore, ENGRAM);

python_methods! {
    impl EngramStore as "mooncake.store.EngramStore" {
        #[new]
        #[pyo3(signature = (layer_id, config, store=None))]
        fn new(layer_id: i64, config: &Bound<'_, PyAny>, store: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
            let _ = (layer_id, config, store);
            absent(ENGRAM)
        }
    }

    /// Not available.
    fn get_embedding_dim() -> "int" => engram;

    /// Not available.
    fn get_num_heads() -> "int" => engram;

    /// Not available.
    fn get_store_keys() -> "list[str]" => engram;

    /// Not available.
    fn get_table_vocab_sizes() -> "list[int]" => engram;

    /// Not available.
    fn lookup(row_ids: "object") -> "numpy.ndarray[numpy.float32]" => engram;

    /// Not available.
    fn populate(embedding_buffers: "list") -> "None" => engram;

    /// Not available.
    fn remove_from_store(force: "bool" = "False") -> "int" => engram;
}

/// Namespaces of NVMe over Fabrics. Not available: its methods raise NotImplementedError.
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.store", frozen)]
pub(super) struct MooncakeDistributedNoFRegister;

absent_body!(nof, MooncakeDistributedNoFRegister, NOF);

python_methods! {
    impl MooncakeDistributedNoFRegister as "mooncake.store.MooncakeDistributedNoFRegister" {
        #[new]
        const fn new() -> Self {
            Self
        }
    }

    /// Not available.
    fn real_register(
        nqn: "str", nsid: "int", traddr: "str", trsvcid: "int", base: "int", size: "int",
        master_server_addr: "str"
    ) -> "int" => nof;

    /// Not available.
    fn real_unregister_by_endpoint(
        nqn: "str", nsid: "int", traddr: "str", trsvcid: "int", master_server_addr: "str"
    ) -> "int" => nof;
}

/// create_rpc_client(local_rank: int = 0, world_size: int = 1) -> mooncake.engine.RpcInterface
///
/// Not available: raises NotImplementedError.
#[pyfunction]
#[pyo3(signature = (local_rank=0, world_size=1))]
fn create_rpc_client(local_rank: u64, world_size: u64) -> PyResult<RpcInterface> {
    let _ = (local_rank, world_size);
    absent(RPC)
}

/// create_rpc_server(local_rank: int = 0, world_size: int = 1) -> mooncake.engine.RpcInterface
///
/// Not available: raises NotImplementedError.
#[pyfunction]
#[pyo3(signature = (local_rank=0, world_size=1))]
fn create_rpc_server(local_rank: u64, world_size: u64) -> PyResult<RpcInterface> {
    let _ = (local_rank, world_size);
    absent(RPC)
}

/// Adds the classes and the functions to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<RpcInterface>()?;
    module.add_class::<ReceivedData>()?;
    module.add_class::<ReceivedTensor>()?;
    module.add_class::<SharedSegment>()?;
    module.add_class::<EngramStoreConfig>()?;
    module.add_class::<EngramStore>()?;
    module.add_class::<MooncakeDistributedNoFRegister>()?;
    module.add_function(wrap_pyfunction!(create_rpc_client, module)?)?;
    module.add_function(wrap_pyfunction!(create_rpc_server, module)?)
}
