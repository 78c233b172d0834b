// Long because: the methods of a class are one `#[pymethods]` block.
//! `MooncakeDistributedStore`.
//!
//! | Module | Methods |
//! |---|---|
//! | `life` | setup, close, health, names |
//! | `bytes` | objects as Python objects: put, get, remove, existence |
//! | `memory` | objects at addresses: registered buffers, batches, scattered buffers, ranges |
//! | `sessions` | puts and gets in steps |
//! | `places` | replicas, tasks, segments |
//! | `tensors` | tensors; their work is done in Python (`snowskin/_mooncake`) |
//! | `awaiting` | the forms of some methods for asyncio |
//!
//! Every call without the GIL, every address trusted as in [`super::engine`], and an answer for every key. A
//! store that is not set up answers with the code for invalid arguments, or with the empty value.

mod awaiting;
mod bytes;
mod life;
mod memory;
mod places;
mod sessions;
mod tensors;

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use snowskin_compat::store::{ReplicateConfig as Config, Store};
use store_client::AsyncClient;

use super::engine::Kept;
use super::signature::{Arguments, Call, Parameter, Signature, default_of, python_methods};
use super::values::ReplicateConfig;
use crate::gil;
use crate::lifecycle::Registered;

pub(super) use life::of_capsule;

/// What arguments that cannot be carried out are answered with, and every call before `setup`.
const INVALID_PARAMS: i32 = -600;

/// Puts and gets objects, and lends memory to the store.
///
/// A store does nothing before `setup`. Calls answer with 0 or a negative code, and calls on lists with one
/// code per key. Methods may be called by any number of threads. Classes may be derived from it.
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.store", subclass, frozen)]
pub(super) struct MooncakeDistributedStore {
    store: Store,
    /// Has the store closed at the end of the process.
    exit: Mutex<Option<Registered>>,
    /// The engine that `setup` was given.
    engine: Mutex<Option<Kept>>,
    /// The client for asyncio, once it is needed.
    client: Arc<Mutex<Option<AsyncClient>>>,
}

impl Drop for MooncakeDistributedStore {
    fn drop(&mut self) {
        let store = self.store.clone();
        // Closing talks to the master: not with the GIL.
        gil::later(move || {
            store.close();
        });
    }
}

type This<'py> = Bound<'py, MooncakeDistributedStore>;
type Given<'a, 'py> = Arguments<'a, 'py>;

/// The store of an object.
fn store_of(slf: &This<'_>) -> Store {
    slf.get().store.clone()
}

/// Runs a call of the store without the GIL.
fn detached<T: Send>(slf: &This<'_>, call: impl FnOnce(&Store) -> T + Send) -> T {
    let store = store_of(slf);
    slf.py().detach(move || call(&store))
}

/// The `config` argument.
fn config(given: &Given<'_, '_>, at: usize) -> PyResult<Config> {
    let Some(value) = given.get(at) else { return Ok(Config::default()) };
    let wanted = "mooncake.store.ReplicateConfig";
    let config = value.cast::<ReplicateConfig>().map_err(|_| given.refuse(at, value, wanted))?;
    Ok(config.try_borrow()?.wishes())
}

/// The signatures that need more than names and defaults.
macro_rules! by_hand {
    ($name:literal, [$($param:literal: $kind:literal $(= $default:expr)?),*], $rest:expr) => {{
        static SIGNATURE: Signature = Signature {
            name: $name,
            class: "mooncake.store.MooncakeDistributedStore",
            parameters: &[$(Parameter {
                name: $param,
                kind: $kind,
                default: by_hand!(@ $($default)?),
            }),*],
            rest_after: $rest,
            returns: "int",
        };
        &SIGNATURE
    }};
    (@) => { None };
    (@ $default:expr) => { Some($default) };
}
use by_hand;

python_methods! {
    impl MooncakeDistributedStore as "mooncake.store.MooncakeDistributedStore" {
        #[new]
        #[pyo3(signature = (*_args, **_kwargs), text_signature = "()")]
        fn new(_args: &Bound<'_, PyTuple>, _kwargs: Option<&Bound<'_, PyDict>>) -> Self {
            // Derived classes may have arguments; `__init__` refuses those that no class takes.
            let (exit, engine) = (Mutex::new(None), Mutex::new(None));
            Self { store: Store::new(), exit, engine, client: Arc::default() }
        }

        #[doc = concat!(
            "setup($self, local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol, ",
            "rdma_devices, master_server_addr, engine=None, enable_ssd_offload=False, ssd_offload_path='', ",
            "tenant_id='default', enable_client_http_server=False, client_http_port=9300)\n--\n\n",
            "setup(self: mooncake.store.MooncakeDistributedStore, local_hostname: str, metadata_server: str, ",
            "global_segment_size: int, local_buffer_size: int, protocol: str, rdma_devices: str, ",
            "master_server_addr: str, engine: object = None, enable_ssd_offload: bool = False, ",
            "ssd_offload_path: str = '', tenant_id: str = 'default', enable_client_http_server: bool = False, ",
            "client_http_port: int = 9300) -> int\n",
            "setup(self: mooncake.store.MooncakeDistributedStore, config: dict) -> int\n"
        )]
        /// Connects to the master, and lends it memory. Returns 0, or a negative code; the log has the
        /// reason.
        ///
        /// `global_segment_size` bytes are lent to the store, `local_buffer_size` bytes are for transfers.
        /// `engine` is the result of `TransferEngine.get_engine`. In the second form the arguments are
        /// members of a dictionary: `local_hostname` and `metadata_server` are required;
        /// `global_segment_size` and
        /// `local_buffer_size` (16 MiB each, numbers or texts such as "32mb"), `protocol` ("tcp"),
        /// `rdma_devices`, `master_server_addr` ("127.0.0.1:50051"), `ipc_socket_path`, `enable_ssd_offload`,
        /// `ssd_offload_path`, `tenant_id`, `enable_client_http_server` and `client_http_port` have defaults.
        #[pyo3(signature = (*args, **kwargs), text_signature = None)]
        fn setup(
            slf: &Bound<'_, Self>,
            args: &Bound<'_, PyTuple>,
            kwargs: Option<&Bound<'_, PyDict>>,
        ) -> PyResult<i32> {
            life::setup(slf, Call { owner: slf.as_any(), args, kwargs })
        }

        #[doc = concat!(
            "put_parts($self, key, *args, config=...)\n--\n\n",
            "put_parts(self: mooncake.store.MooncakeDistributedStore, key: str, *args, ",
            "config: mooncake.store.ReplicateConfig = ...) -> int\n"
        )]
        /// Stores the bytes of all parts, one behind the other, as one object. Returns 0, or a negative code.
        #[pyo3(signature = (*args, **kwargs), text_signature = None)]
        fn put_parts(
            slf: &Bound<'_, Self>,
            args: &Bound<'_, PyTuple>,
            kwargs: Option<&Bound<'_, PyDict>>,
        ) -> PyResult<i32> {
            bytes::put_parts(slf, Call { owner: slf.as_any(), args, kwargs })
        }

        #[doc = concat!(
            "upsert_parts($self, key, *args, config=...)\n--\n\n",
            "upsert_parts(self: mooncake.store.MooncakeDistributedStore, key: str, *args, ",
            "config: mooncake.store.ReplicateConfig = ...) -> int\n"
        )]
        /// As `put_parts`, and replaces an object that is there.
        #[pyo3(signature = (*args, **kwargs), text_signature = None)]
        fn upsert_parts(
            slf: &Bound<'_, Self>,
            args: &Bound<'_, PyTuple>,
            kwargs: Option<&Bound<'_, PyDict>>,
        ) -> PyResult<i32> {
            bytes::upsert_parts(slf, Call { owner: slf.as_any(), args, kwargs })
        }

        #[doc = concat!(
            "load_tensor_from_safetensor($self, key=None, file_name=None)\n--\n\n",
            "load_tensor_from_safetensor(self: mooncake.store.MooncakeDistributedStore, key: object = None, ",
            "file_name: str) -> object\n"
        )]
        /// Stores a tensor of a file, under `key` or the name of the file, and returns it, or `None`.
        #[pyo3(signature = (*args, **kwargs), text_signature = None)]
        fn load_tensor_from_safetensor<'py>(
            slf: &Bound<'py, Self>,
            args: &Bound<'py, PyTuple>,
            kwargs: Option<&Bound<'py, PyDict>>,
        ) -> PyResult<Bound<'py, PyAny>> {
            tensors::load(slf, Call { owner: slf.as_any(), args, kwargs })
        }

        // What the Python half of the tensor methods and `mooncake.async_store` call.

        fn _is_ready(&self) -> bool {
            self.store.is_set_up()
        }

        fn _write_parts(
            slf: &Bound<'_, Self>,
            keys: Vec<String>,
            addresses: Vec<Vec<u64>>,
            sizes: Vec<Vec<u64>>,
            config: Option<PyRef<'_, ReplicateConfig>>,
            upsert: bool,
        ) -> Vec<i32> {
            let config = config.map(|config| config.wishes()).unwrap_or_default();
            memory::write(slf, &keys, &addresses, &sizes, &config, upsert)
        }

        fn _async_get<'py>(slf: &Bound<'py, Self>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
            awaiting::get(slf, key)
        }

        #[pyo3(signature = (key, value, config=None))]
        fn _async_put<'py>(
            slf: &Bound<'py, Self>,
            key: &Bound<'py, PyAny>,
            value: &Bound<'py, PyAny>,
            config: Option<PyRef<'py, ReplicateConfig>>,
        ) -> PyResult<Bound<'py, PyAny>> {
            awaiting::put(slf, key, value, config.map(|config| config.wishes()))
        }

        fn _async_is_exist<'py>(
            slf: &Bound<'py, Self>,
            key: &Bound<'py, PyAny>,
        ) -> PyResult<Bound<'py, PyAny>> {
            awaiting::is_exist(slf, key)
        }

    }

    /// A token for other native code of this process, or `None` before `setup`.
    fn _get_pyclient_capsule() -> "object" => life::capsule;

    /// Connects to the process on this machine that owns memory (`mooncake_client`). Returns 0 or a code.
    fn setup_dummy(mem_pool_size: "int", local_buffer_size: "int", server_address: "str") -> "int"
        => life::setup_dummy;

    /// Lends memory as `setup` does, of a store that has none yet. Returns 0, or a negative code.
    fn init_all(protocol: "str", device_name: "str", mount_segment_size: "int") -> "int" => life::init_all;

    /// Takes the memory of this store back, and disconnects. Returns 0.
    fn close() -> "int" => life::close;

    /// 0: the store can be used. 1: it is not set up. 2: the master does not answer.
    fn health_check() -> "int" => life::health_check;

    /// The name of this store's segment, `host:port`; empty before `setup`.
    fn get_hostname() -> "str" => life::get_hostname;

    /// How many reads other nodes have served from their disks for this store.
    fn get_offload_rpc_read_count() -> "int" => life::get_offload_rpc_read_count;

    /// Stores the bytes of an object with the buffer protocol. The first value of a key stays. Returns 0, or
    /// a negative code.
    fn put(key: "str", value: "Buffer", config: "mooncake.store.ReplicateConfig" = "...") -> "int"
        => bytes::put;

    /// Stores several values. Returns 0, or the first negative code.
    fn put_batch(
        keys: "list[str]", values: "list[Buffer]", config: "mooncake.store.ReplicateConfig" = "..."
    ) -> "int" => bytes::put_batch;

    /// Stores a value, and replaces one that is there; readers see the old or the new one. Returns 0 or a
    /// code.
    fn upsert(key: "str", value: "Buffer", config: "mooncake.store.ReplicateConfig" = "...") -> "int"
        => bytes::upsert;

    /// Stores several values, and replaces those that are there. Returns 0, or the first negative code.
    fn upsert_batch(
        keys: "list[str]", values: "list[Buffer]", config: "mooncake.store.ReplicateConfig" = "..."
    ) -> "int" => bytes::upsert_batch;

    /// The value of a key; empty when there is none.
    fn get(key: "str") -> "bytes" => bytes::get;

    /// The values of several keys; empty for those that have none.
    fn get_batch(keys: "list[str]") -> "list[bytes]" => bytes::get_batch;

    /// The value of a key in memory of its own, or `None`.
    fn get_buffer(key: "str") -> "mooncake.store.BufferHandle" => bytes::get_buffer;

    /// The values of several keys, each in memory of its own, or `None`.
    fn batch_get_buffer(keys: "list[str]") -> "list[mooncake.store.BufferHandle]" => bytes::batch_get_buffer;

    /// The size of a value, bytes, or a negative code.
    fn get_size(key: "str") -> "int" => bytes::get_size;

    /// 1: there is a value. 0: there is none. Negative: a code.
    fn is_exist(key: "str") -> "int" => bytes::is_exist;

    /// For each key, 1, 0, or a negative code.
    fn batch_is_exist(keys: "list[str]") -> "list[int]" => bytes::batch_is_exist;

    /// Removes a value; with `force`, even one that a reader has a lease on. Returns 0, or a negative code.
    fn remove(key: "str", force: "bool" = "False") -> "int" => bytes::remove;

    /// Removes several values. Returns 0 or a negative code for each.
    fn batch_remove(keys: "list[str]", force: "bool" = "False") -> "list[int]" => bytes::batch_remove;

    /// Removes the values whose keys match the pattern. Returns how many, or a negative code.
    fn remove_by_regex(regex_pattern: "str", force: "bool" = "False") -> "int" => bytes::remove_by_regex;

    /// Removes all values; without `force`, except those with leases. Returns how many, or a negative code.
    fn remove_all(force: "bool" = "False") -> "int" => bytes::remove_all;

    /// Removes the replicas of these values, on one segment or on all. Returns the keys that had any.
    fn batch_replica_clear(keys: "list[str]", segment_name: "str" = "''") -> "list[str]"
        => bytes::batch_replica_clear;

    /// Registers memory for transfers without a copy. Returns 0, or a negative code.
    fn register_buffer(buffer_ptr: "int", size: "int") -> "int" => memory::register_buffer;

    /// Ends the registration of the memory at this address. Returns 0, or a negative code.
    fn unregister_buffer(buffer_ptr: "int") -> "int" => memory::unregister_buffer;

    /// Stores `size` bytes at an address. Returns 0, or a negative code.
    fn put_from(
        key: "str", buffer_ptr: "int", size: "int", config: "mooncake.store.ReplicateConfig" = "..."
    ) -> "int" => memory::put_from;

    /// Stores the bytes at two addresses, one behind the other, as one value. Returns 0, or a negative code.
    fn put_from_with_metadata(
        key: "str", buffer_ptr: "int", metadata_buffer_ptr: "int", size: "int", metadata_size: "int",
        config: "mooncake.store.ReplicateConfig" = "..."
    ) -> "int" => memory::put_from_with_metadata;

    /// Stores the bytes at several addresses. Returns 0 or a negative code for each key.
    fn batch_put_from(
        keys: "list[str]", buffer_ptrs: "list[int]", sizes: "list[int]",
        config: "mooncake.store.ReplicateConfig" = "..."
    ) -> "list[int]" => memory::batch_put_from;

    /// As `put_from`, and replaces a value that is there.
    fn upsert_from(
        key: "str", buffer_ptr: "int", size: "int", config: "mooncake.store.ReplicateConfig" = "..."
    ) -> "int" => memory::upsert_from;

    /// As `batch_put_from`, and replaces values that are there.
    fn batch_upsert_from(
        keys: "list[str]", buffer_ptrs: "list[int]", sizes: "list[int]",
        config: "mooncake.store.ReplicateConfig" = "..."
    ) -> "list[int]" => memory::batch_upsert_from;

    /// Reads a value to an address. Returns its size, or a negative code.
    fn get_into(key: "str", buffer_ptr: "int", size: "int") -> "int" => memory::get_into;

    /// Reads several values to addresses. Returns the size or a negative code of each.
    fn batch_get_into(keys: "list[str]", buffer_ptrs: "list[int]", sizes: "list[int]") -> "list[int]"
        => memory::batch_get_into;

    /// Reads ranges of several values to offsets from several addresses. Returns the size or a negative code
    /// of each range; of a value that is missing, one code.
    fn get_into_ranges(
        buffer_ptrs: "list[int]", all_keys: "list[list[str]]", all_dst_offsets: "list[list[list[int]]]",
        all_src_offsets: "list[list[list[int]]]", all_sizes: "list[list[list[int]]]"
    ) -> "list[list[list[int]]]" => memory::get_into_ranges;

    /// Stores values that are each in several places. Returns 0 or a negative code for each key.
    fn batch_put_from_multi_buffers(
        keys: "list[str]", all_buffer_ptrs: "list[list[int]]", all_sizes: "list[list[int]]",
        config: "mooncake.store.ReplicateConfig" = "..."
    ) -> "list[int]" => memory::batch_put_from_multi_buffers;

    /// Reads values to several places each. Returns the size or a negative code of each.
    fn batch_get_into_multi_buffers(
        keys: "list[str]", all_buffer_ptrs: "list[list[int]]", all_sizes: "list[list[int]]",
        prefer_alloc_in_same_node: "bool" = "False"
    ) -> "list[int]" => memory::batch_get_into_multi_buffers;

    /// Looks up where values are, for reads of ranges until `batch_get_session_end`. Returns 0 or a code
    /// each.
    fn batch_get_session_start(keys: "list[str]") -> "list[int]" => sessions::get_start;

    /// Reads ranges of values of a session. Returns the bytes or a negative code of each.
    fn batch_get_into_multi_buffer_ranges(
        keys: "list[str]", all_buffer_ptrs: "list[list[int]]", all_sizes: "list[list[int]]",
        all_src_offsets: "list[list[int]]"
    ) -> "list[int]" => sessions::get_ranges;

    /// Ends the session of these values. Returns 0, or a negative code.
    fn batch_get_session_end(keys: "list[str]") -> "int" => sessions::get_end;

    /// Begins to store values of these sizes, which no reader sees before `batch_put_session_end`.
    fn batch_put_session_start(
        keys: "list[str]", sizes: "list[int]", config: "mooncake.store.ReplicateConfig" = "..."
    ) -> "list[int]" => sessions::put_start;

    /// Writes ranges of values of a session. Returns the bytes or a negative code of each.
    fn batch_put_from_multi_buffer_ranges(
        keys: "list[str]", all_buffer_ptrs: "list[list[int]]", all_sizes: "list[list[int]]",
        all_dst_offsets: "list[list[int]]"
    ) -> "list[int]" => sessions::put_ranges;

    /// Ends puts, whose values can then be read. Returns 0 or a negative code for each.
    fn batch_put_session_end(keys: "list[str]") -> "list[int]" => sessions::put_end;

    /// Gives puts up. Returns 0 or a negative code for each.
    fn batch_put_session_revoke(keys: "list[str]") -> "list[int]" => sessions::put_revoke;

    /// The replicas of a value; empty when there is none.
    fn get_replica_desc(key: "str") -> "list[mooncake.store.ReplicaDescriptor]" => places::get_replica_desc;

    /// The replicas of several values; keys without a value are absent.
    fn batch_get_replica_desc(
        keys: "list[str]"
    ) -> "dict[str, list[mooncake.store.ReplicaDescriptor]]" => places::batch_get_replica_desc;

    /// Orders copies of a value on these segments. Returns the task and 0, or (0, 0) and a negative code.
    fn create_copy_task(key: "str", targets: "list[str]") -> "tuple" => places::create_copy_task;

    /// Orders a move of a replica between segments. Returns the task and 0, or (0, 0) and a negative code.
    fn create_move_task(key: "str", source: "str", target: "str") -> "tuple" => places::create_move_task;

    /// What is known of a task, and 0; or `None` and a negative code.
    fn query_task(task_id: "tuple[int, int]") -> "tuple" => places::query_task;

    /// Lends the memory of a file. Returns a dictionary with `ret` and `segment_ids`.
    fn mount_segment(
        path: "str", size: "int", offset: "int" = "0", protocol: "str" = "'tcp'", location: "str" = "''"
    ) -> "dict" => places::mount_segment;

    /// Allocates memory and lends it. Returns a dictionary with `ret`, `segment_ids` and `allocated_size`.
    fn allocate_and_mount_segment(
        size: "int", protocol: "str" = "'tcp'", location: "str" = "''"
    ) -> "dict" => places::allocate_and_mount_segment;

    /// Takes segments back that `mount_segment` lent. Returns 0, or a negative code.
    fn unmount_segment(segment_ids: "list[str]", grace_period_seconds: "int" = "0") -> "int"
        => places::unmount_segment;

    /// Takes segments back that `allocate_and_mount_segment` lent, and frees them. Returns 0 or a code.
    fn unmount_and_free_segment(segment_ids: "list[str]", grace_period_seconds: "int" = "0") -> "int"
        => places::unmount_and_free_segment;

    /// Takes the disk of this store back. Returns 0, or a negative code.
    fn unmount_local_disk_segment(grace_period_seconds: "int" = "0") -> "int"
        => places::unmount_local_disk_segment;

    /// Memory that this process shares with the one that `setup_dummy` named. Returns its address, or 0.
    fn alloc_from_mem_pool(size: "int") -> "int" => places::alloc_from_mem_pool;

    /// Stores a tensor. Returns 0, or a negative code.
    fn put_tensor(key: "str", tensor: "object") -> "int" => tensors::put_tensor;

    /// Stores a tensor object (a header of 304 bytes, and the elements) at an address.
    fn put_tensor_from(key: "str", buffer_ptr: "int", size: "int") -> "int" => tensors::put_tensor_from;

    /// Stores all shards of a tensor that is divided into `tp_size` parts.
    fn put_tensor_with_tp(
        key: "str", tensor: "object", tp_rank: "int" = "0", tp_size: "int" = "1", split_dim: "int" = "0"
    ) -> "int" => tensors::put_tensor_with_tp;

    /// Stores all shards of a tensor object at an address.
    fn put_tensor_with_tp_from(
        key: "str", buffer_ptr: "int", size: "int", tp_rank: "int" = "0", tp_size: "int" = "1",
        split_dim: "int" = "0"
    ) -> "int" => tensors::put_tensor_with_tp_from;

    /// Stores a tensor, or the part of it that a parallelism or a writer's partition names.
    fn put_tensor_with_parallelism(
        key: "str", tensor: "object", parallelism: "object" = "None",
        config: "mooncake.store.ReplicateConfig" = "...", writer_partition: "object" = "None"
    ) -> "int" => tensors::put_tensor_with_parallelism;

    /// As `put_tensor_with_parallelism`, of a tensor object at an address; with a "tp" axis, all its shards.
    fn put_tensor_with_parallelism_from(
        key: "str", buffer_ptr: "int", size: "int", parallelism: "object" = "None",
        config: "mooncake.store.ReplicateConfig" = "...", writer_partition: "object" = "None"
    ) -> "int" => tensors::put_tensor_with_parallelism_from;

    /// Stores tensors. Returns 0 or a negative code for each.
    fn batch_put_tensor(keys: "list[str]", tensors_list: "list") -> "list[int]" => tensors::batch_put_tensor;

    /// Stores tensor objects at addresses. Returns 0 or a negative code for each.
    fn batch_put_tensor_from(keys: "list[str]", buffer_ptrs: "list[int]", sizes: "list[int]") -> "list[int]"
        => tensors::batch_put_tensor_from;

    /// Stores all shards of tensors that are divided into `tp_size` parts.
    fn batch_put_tensor_with_tp(
        base_keys: "list[str]", tensors_list: "list", tp_rank: "int" = "0", tp_size: "int" = "1",
        split_dim: "int" = "0"
    ) -> "list[int]" => tensors::batch_put_tensor_with_tp;

    /// Stores all shards of tensor objects at addresses.
    fn batch_put_tensor_with_tp_from(
        base_keys: "list[str]", buffer_ptrs: "list[int]", sizes: "list[int]", tp_rank: "int" = "0",
        tp_size: "int" = "1", split_dim: "int" = "0"
    ) -> "list[int]" => tensors::batch_put_tensor_with_tp_from;

    /// Stores tensors, or the parts of them that parallelisms or writers' partitions name.
    fn batch_put_tensor_with_parallelism(
        keys: "list[str]", tensors_list: "list", parallelisms: "object" = "None",
        config: "mooncake.store.ReplicateConfig" = "...", writer_partitions: "object" = "None"
    ) -> "list[int]" => tensors::batch_put_tensor_with_parallelism;

    /// As `batch_put_tensor_with_parallelism`, of tensor objects at addresses.
    fn batch_put_tensor_with_parallelism_from(
        keys: "list[str]", buffer_ptrs: "list[int]", sizes: "list[int]", parallelisms: "object" = "None",
        config: "mooncake.store.ReplicateConfig" = "...", writer_partitions: "object" = "None"
    ) -> "list[int]" => tensors::batch_put_tensor_with_parallelism_from;

    /// As `put_tensor`, with a configuration.
    fn pub_tensor(key: "str", tensor: "object", config: "mooncake.store.ReplicateConfig" = "...") -> "int"
        => tensors::pub_tensor;

    /// As `put_tensor_with_tp`, with a configuration.
    fn pub_tensor_with_tp(
        key: "str", tensor: "object", config: "mooncake.store.ReplicateConfig" = "...", tp_rank: "int" = "0",
        tp_size: "int" = "1", split_dim: "int" = "0"
    ) -> "int" => tensors::pub_tensor_with_tp;

    /// As `batch_put_tensor`, with a configuration.
    fn batch_pub_tensor(
        keys: "list[str]", tensors_list: "list", config: "mooncake.store.ReplicateConfig" = "..."
    ) -> "list[int]" => tensors::batch_pub_tensor;

    /// As `batch_put_tensor_with_tp`, with a configuration.
    fn batch_pub_tensor_with_tp(
        base_keys: "list[str]", tensors_list: "list", config: "mooncake.store.ReplicateConfig" = "...",
        tp_rank: "int" = "0", tp_size: "int" = "1", split_dim: "int" = "0"
    ) -> "list[int]" => tensors::batch_pub_tensor_with_tp;

    /// As `put_tensor`, and replaces a tensor that is there.
    fn upsert_tensor(key: "str", tensor: "object") -> "int" => tensors::upsert_tensor;

    /// As `put_tensor_from`, and replaces a tensor that is there.
    fn upsert_tensor_from(key: "str", buffer_ptr: "int", size: "int") -> "int" => tensors::upsert_tensor_from;

    /// As `upsert_tensor`, with a configuration.
    fn upsert_pub_tensor(key: "str", tensor: "object", config: "mooncake.store.ReplicateConfig" = "...") -> "int"
        => tensors::upsert_pub_tensor;

    /// As `put_tensor_with_parallelism`, and replaces what is there.
    fn upsert_tensor_with_parallelism(
        key: "str", tensor: "object", parallelism: "object" = "None",
        config: "mooncake.store.ReplicateConfig" = "...", writer_partition: "object" = "None"
    ) -> "int" => tensors::upsert_tensor_with_parallelism;

    /// As `put_tensor_with_parallelism_from`, and replaces what is there.
    fn upsert_tensor_with_parallelism_from(
        key: "str", buffer_ptr: "int", size: "int", parallelism: "object" = "None",
        config: "mooncake.store.ReplicateConfig" = "...", writer_partition: "object" = "None"
    ) -> "int" => tensors::upsert_tensor_with_parallelism_from;

    /// As `batch_put_tensor`, and replaces tensors that are there.
    fn batch_upsert_tensor(keys: "list[str]", tensors_list: "list") -> "list[int]"
        => tensors::batch_upsert_tensor;

    /// As `batch_put_tensor_from`, and replaces tensors that are there.
    fn batch_upsert_tensor_from(
        keys: "list[str]", buffer_ptrs: "list[int]", sizes: "list[int]"
    ) -> "list[int]" => tensors::batch_upsert_tensor_from;

    /// As `batch_upsert_tensor`, with a configuration.
    fn batch_upsert_pub_tensor(
        keys: "list[str]", tensors_list: "list", config: "mooncake.store.ReplicateConfig" = "..."
    ) -> "list[int]" => tensors::batch_upsert_pub_tensor;

    /// As `batch_put_tensor_with_parallelism`, and replaces what is there.
    fn batch_upsert_tensor_with_parallelism(
        keys: "list[str]", tensors_list: "list", parallelisms: "object" = "None",
        config: "mooncake.store.ReplicateConfig" = "...", writer_partitions: "object" = "None"
    ) -> "list[int]" => tensors::batch_upsert_tensor_with_parallelism;

    /// As `batch_put_tensor_with_parallelism_from`, and replaces what is there.
    fn batch_upsert_tensor_with_parallelism_from(
        keys: "list[str]", buffer_ptrs: "list[int]", sizes: "list[int]", parallelisms: "object" = "None",
        config: "mooncake.store.ReplicateConfig" = "...", writer_partitions: "object" = "None"
    ) -> "list[int]" => tensors::batch_upsert_tensor_with_parallelism_from;

    /// The tensor of a key, or `None`.
    fn get_tensor(key: "str") -> "object" => tensors::get_tensor;

    /// Reads a tensor to an address. The tensor is a view of that memory; `None` when there is none.
    fn get_tensor_into(key: "str", buffer_ptr: "int", size: "int") -> "object" => tensors::get_tensor_into;

    /// Reads a tensor into one on a CUDA device. Returns 0, or a negative code; this build has no CUDA.
    fn get_tensor_into_cuda(key: "str", tensor: "object") -> "int" => tensors::get_tensor_into_cuda;

    /// The shard `tp_rank` of a tensor, or `None`.
    fn get_tensor_with_tp(
        key: "str", tp_rank: "int" = "0", tp_size: "int" = "1", split_dim: "int" = "0"
    ) -> "object" => tensors::get_tensor_with_tp;

    /// Reads the shard `tp_rank` of a tensor to an address.
    fn get_tensor_with_tp_into(
        key: "str", buffer_ptr: "int", size: "int", tp_rank: "int" = "0", tp_size: "int" = "1",
        split_dim: "int" = "0"
    ) -> "object" => tensors::get_tensor_with_tp_into;

    /// The tensor, or the shard of it, that a `ReadTarget` names, or `None`.
    fn get_tensor_with_parallelism(key: "str", target: "object" = "None") -> "object"
        => tensors::get_tensor_with_parallelism;

    /// Reads the tensor, or the shard of it, that a `ReadTarget` names to an address.
    fn get_tensor_with_parallelism_into(
        key: "str", buffer_ptr: "int", size: "int", target: "object" = "None"
    ) -> "object" => tensors::get_tensor_with_parallelism_into;

    /// The tensors of several keys, or `None`.
    fn batch_get_tensor(keys: "list[str]") -> "list" => tensors::batch_get_tensor;

    /// Reads tensors to addresses.
    fn batch_get_tensor_into(keys: "list[str]", buffer_ptrs: "list[int]", sizes: "list[int]") -> "list"
        => tensors::batch_get_tensor_into;

    /// Reads tensors into some on a CUDA device; this build has no CUDA.
    fn batch_get_tensor_into_cuda(keys: "list[str]", tensors_list: "list") -> "list[int]"
        => tensors::batch_get_tensor_into_cuda;

    /// The shards `tp_rank` of several tensors, or `None`.
    fn batch_get_tensor_with_tp(base_keys: "list[str]", tp_rank: "int" = "0", tp_size: "int" = "1") -> "list"
        => tensors::batch_get_tensor_with_tp;

    /// Reads the shards `tp_rank` of several tensors to addresses.
    fn batch_get_tensor_with_tp_into(
        base_keys: "list[str]", buffer_ptrs: "list[int]", sizes: "list[int]", tp_rank: "int" = "0",
        tp_size: "int" = "1"
    ) -> "list" => tensors::batch_get_tensor_with_tp_into;

    /// The tensors, or the shards of them, that several `ReadTarget`s name, or `None`.
    fn batch_get_tensor_with_parallelism(keys: "list[str]", targets: "object" = "None") -> "list"
        => tensors::batch_get_tensor_with_parallelism;

    /// Reads the tensors, or the shards of them, that several `ReadTarget`s name to addresses.
    fn batch_get_tensor_with_parallelism_into(
        keys: "list[str]", buffer_ptrs: "list[int]", sizes: "list[int]", targets: "object" = "None"
    ) -> "list" => tensors::batch_get_tensor_with_parallelism_into;

    /// Writes a tensor to a file, whose name is the key unless another is given. Returns 0, or a code.
    fn save_tensor_to_safetensor(key: "str", file_name: "object" = "None") -> "int"
        => tensors::save_tensor_to_safetensor;
}

/// _get_pyclient_from_wrapper(wrapper: mooncake.store.MooncakeDistributedStore) -> object
///
/// What `_get_pyclient_capsule` of the store returns.
#[pyfunction]
fn _get_pyclient_from_wrapper<'py>(
    wrapper: &Bound<'py, MooncakeDistributedStore>,
) -> PyResult<Bound<'py, PyAny>> {
    wrapper.call_method0("_get_pyclient_capsule")
}

/// Adds the class and the functions to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<MooncakeDistributedStore>()?;
    module.add_function(wrap_pyfunction!(_get_pyclient_from_wrapper, module)?)?;
    tensors::register_functions(module)
}
