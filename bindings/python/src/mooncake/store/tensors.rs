//! Tensors: the types of the arguments are checked here, the work is done in `snowskin/_mooncake/tensors.py`.

use pyo3::IntoPyObjectExt as _;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::super::signature::{Arguments, Call, Parameter, Signature};
use super::super::values::ReplicateConfig;
use super::{Given, This, by_hand};

const MODULE: &str = "snowskin._mooncake.tensors";

/// The type of an argument, and its default.
#[derive(Clone, Copy)]
enum Kind {
    Key,
    Keys,
    Address,
    Addresses,
    Tensors,
    /// Anything, `None` by default.
    Object,
    /// `ReplicateConfig`, `None` by default.
    Config,
    /// A number, with a default.
    Number(i32),
}

/// Checks the arguments and calls the function of this name with the store and all of them.
fn call<'py>(
    slf: &This<'py>,
    given: &Given<'_, 'py>,
    name: &str,
    kinds: &[Kind],
) -> PyResult<Bound<'py, PyAny>> {
    let py = slf.py();
    let mut values = vec![slf.clone().into_any()];
    for (at, kind) in kinds.iter().enumerate() {
        values.push(match *kind {
            Kind::Key => given.text(at)?.into_bound_py_any(py)?,
            Kind::Keys => given.texts(at)?.into_bound_py_any(py)?,
            Kind::Address => given.uint(at)?.into_bound_py_any(py)?,
            Kind::Addresses => given.uints(at)?.into_bound_py_any(py)?,
            Kind::Tensors => {
                let value = given.required(at)?;
                let list = value.cast::<PyList>().map_err(|_| given.refuse(at, value, "list"))?;
                list.clone().into_any()
            }
            Kind::Object => given.get(at).cloned().unwrap_or_else(|| py.None().into_bound(py)),
            Kind::Config => match given.get(at) {
                None => py.None().into_bound(py),
                Some(value) if value.is_instance_of::<ReplicateConfig>() => value.clone(),
                Some(value) => return Err(given.refuse(at, value, "mooncake.store.ReplicateConfig")),
            },
            Kind::Number(default) => given.int_or(at, default)?.into_bound_py_any(py)?,
        });
    }
    py.import(MODULE)?.getattr(name)?.call1(PyTuple::new(py, values)?)
}

/// Functions of the names of methods, with the kinds of their arguments.
macro_rules! forwarded {
    ($($name:ident: [$($kind:expr),*];)+) => {$(
        pub(super) fn $name<'py>(slf: &This<'py>, given: &Given<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
            call(slf, given, stringify!($name), &[$($kind),*])
        }
    )+};
}

use Kind::{Address, Addresses, Config, Key, Keys, Number, Object, Tensors};

forwarded! {
    put_tensor: [Key, Object];
    put_tensor_from: [Key, Address, Address];
    put_tensor_with_tp: [Key, Object, Number(0), Number(1), Number(0)];
    put_tensor_with_tp_from: [Key, Address, Address, Number(0), Number(1), Number(0)];
    put_tensor_with_parallelism: [Key, Object, Object, Config, Object];
    put_tensor_with_parallelism_from: [Key, Address, Address, Object, Config, Object];
    batch_put_tensor: [Keys, Tensors];
    batch_put_tensor_from: [Keys, Addresses, Addresses];
    batch_put_tensor_with_tp: [Keys, Tensors, Number(0), Number(1), Number(0)];
    batch_put_tensor_with_tp_from: [Keys, Addresses, Addresses, Number(0), Number(1), Number(0)];
    batch_put_tensor_with_parallelism: [Keys, Tensors, Object, Config, Object];
    batch_put_tensor_with_parallelism_from: [Keys, Addresses, Addresses, Object, Config, Object];
    pub_tensor: [Key, Object, Config];
    pub_tensor_with_tp: [Key, Object, Config, Number(0), Number(1), Number(0)];
    batch_pub_tensor: [Keys, Tensors, Config];
    batch_pub_tensor_with_tp: [Keys, Tensors, Config, Number(0), Number(1), Number(0)];
    upsert_tensor: [Key, Object];
    upsert_tensor_from: [Key, Address, Address];
    upsert_pub_tensor: [Key, Object, Config];
    upsert_tensor_with_parallelism: [Key, Object, Object, Config, Object];
    upsert_tensor_with_parallelism_from: [Key, Address, Address, Object, Config, Object];
    batch_upsert_tensor: [Keys, Tensors];
    batch_upsert_tensor_from: [Keys, Addresses, Addresses];
    batch_upsert_pub_tensor: [Keys, Tensors, Config];
    batch_upsert_tensor_with_parallelism: [Keys, Tensors, Object, Config, Object];
    batch_upsert_tensor_with_parallelism_from: [Keys, Addresses, Addresses, Object, Config, Object];
    get_tensor: [Key];
    get_tensor_into: [Key, Address, Address];
    get_tensor_into_cuda: [Key, Object];
    get_tensor_with_tp: [Key, Number(0), Number(1), Number(0)];
    get_tensor_with_tp_into: [Key, Address, Address, Number(0), Number(1), Number(0)];
    get_tensor_with_parallelism: [Key, Object];
    get_tensor_with_parallelism_into: [Key, Address, Address, Object];
    batch_get_tensor: [Keys];
    batch_get_tensor_into: [Keys, Addresses, Addresses];
    batch_get_tensor_into_cuda: [Keys, Tensors];
    batch_get_tensor_with_tp: [Keys, Number(0), Number(1)];
    batch_get_tensor_with_tp_into: [Keys, Addresses, Addresses, Number(0), Number(1)];
    batch_get_tensor_with_parallelism: [Keys, Object];
    batch_get_tensor_with_parallelism_into: [Keys, Addresses, Addresses, Object];
    save_tensor_to_safetensor: [Key, Object];
}

/// `load_tensor_from_safetensor`, whose second argument has to be passed although the first has a default.
pub(super) fn load<'py>(slf: &This<'py>, call: Call<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    static ONE: [&Signature; 1] = [by_hand!(
        "load_tensor_from_safetensor",
        ["key": "object" = "None", "file_name": "str"],
        None
    )];
    let given = Arguments::bind(&ONE, 0, call)?;
    self::call(slf, &given, "load_tensor_from_safetensor", &[Object, Key])
}

/// _serialize_tensor(arg0: object) -> tuple
///
/// The header of a tensor, the address and the size of its elements, and the object that keeps them alive.
#[pyfunction]
fn _serialize_tensor<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    tensor.py().import(MODULE)?.getattr(intern!(tensor.py(), "serialize_tensor"))?.call1((tensor,))
}

/// _deserialize_tensor(arg0: bytes) -> object
///
/// The tensor in the bytes of a header and its elements.
#[pyfunction]
fn _deserialize_tensor<'py>(payload: &Bound<'py, PyBytes>) -> PyResult<Bound<'py, PyAny>> {
    payload.py().import(MODULE)?.getattr(intern!(payload.py(), "deserialize_tensor"))?.call1((payload,))
}

/// _tensor_metadata_size() -> int
///
/// The size of the header of a tensor, bytes.
#[pyfunction]
const fn _tensor_metadata_size() -> usize {
    304
}

/// Adds the functions to the module.
pub(super) fn register_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(_serialize_tensor, module)?)?;
    module.add_function(wrap_pyfunction!(_deserialize_tensor, module)?)?;
    module.add_function(wrap_pyfunction!(_tensor_metadata_size, module)?)
}
