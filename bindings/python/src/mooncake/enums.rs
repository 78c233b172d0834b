//! The enumerations, with the arithmetic of the classes that they replace.
//!
//! | Expression | Result |
//! |---|---|
//! | `int(m)`, `m.value`, `operator.index(m)`, `hash(m)` | the number |
//! | `m.name`, `str(m)`, `repr(m)` | `'Read'`, `'TransferOpcode.Read'`, `'<TransferOpcode.Read: 0>'` |
//! | `m == n` | whether both have the same class and number; a number is never equal to a member |
//! | `m < n` | where the class is ordered, the order of the numbers; otherwise a `TypeError` |
//! | `Class(1)`, `Class.__members__`, `pickle` | as usual |
//!
//! They are not `enum.Enum`: `Class(1) is Class.Write` is false, as there, and members can be made of numbers
//! that have no name (`'???'`).

use pyo3::class::basic::CompareOp;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};
use std::sync::atomic::{AtomicI64, Ordering};

/// A class of members with numbers.
pub(super) trait Enumeration: Sized {
    /// Names and numbers, in the order of their declaration.
    const MEMBERS: &'static [(&'static str, i64)];
    /// Whether members can be compared by `<`.
    const IS_ORDERED: bool;

    fn of(number: i64) -> Self;
    fn number(&self) -> i64;

    fn name_of(&self) -> &'static str {
        let number = self.number();
        Self::MEMBERS.iter().find(|(_, value)| *value == number).map_or("???", |(name, _)| name)
    }
}

/// Adds the members to a class as attributes, and the dictionaries of all members.
fn complete<T>(class: &Bound<'_, PyType>) -> PyResult<()>
where
    T: Enumeration + pyo3::PyClass + Into<PyClassInitializer<T>>,
{
    let py = class.py();
    let (members, entries) = (PyDict::new(py), PyDict::new(py));
    for (name, number) in T::MEMBERS {
        let member = Bound::new(py, T::of(*number))?;
        class.setattr(*name, &member)?;
        members.set_item(name, &member)?;
        entries.set_item(name, (member, py.None()))?;
    }
    class.setattr("__members__", members)?;
    class.setattr("__entries", entries)
}

/// Whether two members of one class are in the relation, or what Python does with other operands.
fn compare<T: Enumeration + pyo3::PyClass>(
    one: &T,
    other: &Bound<'_, PyAny>,
    op: CompareOp,
) -> PyResult<Py<PyAny>> {
    let py = other.py();
    let answer = |is: bool| Ok(is.into_pyobject(py)?.to_owned().into_any().unbind());
    let number = other.cast_exact::<T>().ok().map(|other| other.borrow().number());
    match (op, number) {
        (CompareOp::Eq, number) => answer(number == Some(one.number())),
        (CompareOp::Ne, number) => answer(number != Some(one.number())),
        (op, Some(number)) if T::IS_ORDERED => answer(op.matches(one.number().cmp(&number))),
        (_, None) if T::IS_ORDERED => {
            Err(PyTypeError::new_err("a member is ordered among the members of its enumeration alone"))
        }
        _ => Ok(py.NotImplemented()),
    }
}

macro_rules! enumeration {
    ($(#[doc = $doc:literal])+ $class:ident in $module:literal, ordered: $ordered:literal,
     { $($member:ident = $number:literal),+ $(,)? }) => {
        $(#[doc = $doc])+
        #[doc = "\n__init__(self, value: int) -> None"]
        #[pyclass(module = $module, frozen)]
        #[derive(Debug)]
        // A number that `__setstate__`, for unpickling, replaces.
        pub(super) struct $class(AtomicI64);

        impl Enumeration for $class {
            const MEMBERS: &'static [(&'static str, i64)] = &[$((stringify!($member), $number)),+];
            const IS_ORDERED: bool = $ordered;

            fn of(number: i64) -> Self {
                Self(AtomicI64::new(number))
            }

            fn number(&self) -> i64 {
                self.0.load(Ordering::Relaxed)
            }
        }

        #[pymethods]
        impl $class {
            #[new]
            #[pyo3(signature = (value))]
            fn new(value: i64) -> Self {
                Self::of(value)
            }

            /// The name of the member.
            #[getter]
            fn name(&self) -> &'static str {
                self.name_of()
            }

            /// The number of the member.
            #[getter]
            fn value(&self) -> i64 {
                self.number()
            }

            fn __int__(&self) -> i64 {
                self.number()
            }

            fn __index__(&self) -> i64 {
                self.number()
            }

            fn __hash__(&self) -> isize {
                // -1 is not a hash.
                match self.number() { -1 => -2, number => number as isize }
            }

            fn __repr__(&self) -> String {
                format!("<{}.{}: {}>", stringify!($class), self.name_of(), self.number())
            }

            fn __str__(&self) -> String {
                format!("{}.{}", stringify!($class), self.name_of())
            }

            fn __richcmp__(&self, other: &Bound<'_, PyAny>, op: CompareOp) -> PyResult<Py<PyAny>> {
                compare(self, other, op)
            }

            fn __getstate__(&self) -> i64 {
                self.number()
            }

            fn __setstate__(&self, state: i64) {
                self.0.store(state, Ordering::Relaxed);
            }

            fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
                (slf.get_type(), (slf.get().number(),)).into_pyobject(slf.py())
            }
        }
    };
}

enumeration! {
    /// The direction of a transfer: from the peer's memory, or to it.
    TransferOpcode in "mooncake.engine", ordered: true, { Read = 0, Write = 1 }
}

enumeration! {
    /// What an object is.
    ObjectDataType in "mooncake.store", ordered: false, {
        UNKNOWN = 0,
        KVCACHE = 1,
        TENSOR = 2,
        WEIGHT = 3,
        SAMPLE = 4,
        ACTIVATION = 5,
        GRADIENT = 6,
        OPTIMIZER_STATE = 7,
        METADATA = 8,
        GENERAL = 9,
    }
}

enumeration! {
    /// What a put does to the soft pin of its object: keep that of the object it replaces, set it, remove it.
    SoftPinAction in "mooncake.store", ordered: false, { PRESERVE = 0, ENABLE = 1, DISABLE = 2 }
}

enumeration! {
    /// The state of a replica.
    ReplicaStatus in "mooncake.store", ordered: false, {
        UNDEFINED = 0,
        INITIALIZED = 1,
        PROCESSING = 2,
        COMPLETE = 3,
        REMOVED = 4,
        FAILED = 5,
    }
}

enumeration! {
    /// What a task does with a replica.
    TaskType in "mooncake.store", ordered: false, { REPLICA_COPY = 0, REPLICA_MOVE = 1 }
}

enumeration! {
    /// The state of a task.
    TaskStatus in "mooncake.store", ordered: false, { PENDING = 0, PROCESSING = 1, FAILED = 2, SUCCESS = 3 }
}

/// Adds the classes to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    macro_rules! add {
        ($($class:ident),+) => {$(
            module.add_class::<$class>()?;
            complete::<$class>(&module.py().get_type::<$class>())?;
        )+};
    }
    add!(TransferOpcode, ObjectDataType, SoftPinAction, ReplicaStatus, TaskType, TaskStatus);
    Ok(())
}
