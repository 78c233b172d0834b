//! Signatures of methods: how arguments are bound to parameters, and what a caller is told who passes others.
//!
//! PyO3 binds arguments by itself, but with error messages of its own. Callers of the drop-in read these
//! messages: SGLang passes keyword arguments that a version may not have, and drops the one whose name is in
//! the text of the `TypeError`. So the methods of this module take `*args` and `**kwargs`, and [`Arguments`]
//! binds them to a [`Signature`], with the text of the interface that is replaced:
//!
//! ```text
//!   put(): incompatible function arguments. The following argument types are supported:
//!       1. put(self: mooncake.store.MooncakeDistributedStore, key: str, value: Buffer, ...) -> int
//!
//!   Invoked with: <store>, 'k'; kwargs: bogus=1
//!   bogus: there is no such argument
//! ```
//!
//! The last line is an addition. The macro `python_methods!` declares a method with its signature, from which
//! come the text above, the documentation and what `inspect.signature` shows.

use std::fmt::Write as _;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// Most parameters of a method.
pub(super) const PARAMETERS_MAX: usize = 16;
/// Longest text of an argument in an error message, characters.
const SHOWN_MAX: usize = 80;
/// Most arguments that an error message shows.
const SHOWN_COUNT_MAX: usize = 20;

/// One parameter.
pub(super) struct Parameter {
    pub(super) name: &'static str,
    /// Its type, as texts show it.
    pub(super) kind: &'static str,
    /// Its default as Python text; `...` for an instance of `ReplicateConfig`. `None`: it has to be passed.
    pub(super) default: Option<&'static str>,
}

/// What a method, or one overload of it, accepts.
pub(super) struct Signature {
    pub(super) name: &'static str,
    /// The class, with its module.
    pub(super) class: &'static str,
    pub(super) parameters: &'static [Parameter],
    /// `Some(n)`: positional arguments behind the first `n` are a list of their own, and the parameters
    /// behind it are passed by name.
    pub(super) rest_after: Option<usize>,
    pub(super) returns: &'static str,
}

impl Signature {
    /// `put(self: mooncake.store.MooncakeDistributedStore, key: str, ...) -> int`.
    pub(super) fn text(&self) -> String {
        let mut text = format!("{}(self: {}", self.name, self.class);
        for (at, Parameter { name, kind, default }) in self.parameters.iter().enumerate() {
            if self.rest_after == Some(at) {
                text.push_str(", *args");
            }
            let _ = write!(text, ", {name}: {kind}");
            if let Some(default) = default {
                let _ = write!(text, " = {default}");
            }
        }
        if self.rest_after == Some(self.parameters.len()) {
            text.push_str(", *args");
        }
        let _ = write!(text, ") -> {}", self.returns);
        text
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.parameters.iter().position(|parameter| parameter.name == name)
    }
}

/// The arguments of one call, bound to the parameters of a signature.
pub(super) struct Arguments<'a, 'py> {
    signatures: &'static [&'static Signature],
    signature: &'static Signature,
    values: [Option<Bound<'py, PyAny>>; PARAMETERS_MAX],
    call: Call<'a, 'py>,
}

/// A call as Python passed it.
#[derive(Clone, Copy)]
pub(super) struct Call<'a, 'py> {
    pub(super) owner: &'a Bound<'py, PyAny>,
    pub(super) args: &'a Bound<'py, PyTuple>,
    pub(super) kwargs: Option<&'a Bound<'py, PyDict>>,
}

impl<'a, 'py> Arguments<'a, 'py> {
    /// Binds the arguments of a call to `signatures[choice]`; an error names all overloads.
    ///
    /// # Errors
    /// `TypeError`: too many arguments, one that does not exist, one that is missing or passed twice.
    pub(super) fn bind(
        signatures: &'static [&'static Signature],
        choice: usize,
        call: Call<'a, 'py>,
    ) -> PyResult<Self> {
        let signature = signatures[choice];
        let mut this = Self { signatures, signature, values: Default::default(), call };
        let limit = signature.rest_after.unwrap_or(signature.parameters.len());
        let given = call.args.len();
        if given > limit && signature.rest_after.is_none() {
            return Err(this.error(format!("{given} arguments are passed, {limit} are possible")));
        }
        for (at, value) in call.args.iter().take(limit).enumerate() {
            this.values[at] = Some(value);
        }
        for (name, value) in call.kwargs.into_iter().flatten() {
            let name: String = name.extract()?;
            let Some(at) = signature.position(&name) else {
                return Err(this.error(format!("{name}: there is no such argument")));
            };
            if this.values[at].replace(value).is_some() {
                return Err(this.error(format!("{name}: it is passed twice")));
            }
        }
        let missing =
            |(parameter, value): &(&Parameter, &Option<_>)| parameter.default.is_none() && value.is_none();
        match signature.parameters.iter().zip(&this.values).find(missing) {
            None => Ok(this),
            Some((parameter, _)) => Err(this.error(format!("{}: it is missing", parameter.name))),
        }
    }

    /// The argument at this place, if it was passed.
    pub(super) fn get(&self, at: usize) -> Option<&Bound<'py, PyAny>> {
        self.values[at].as_ref()
    }

    /// The argument at this place.
    ///
    /// # Errors
    /// `TypeError`: it was not passed. (That is refused by [`bind`](Self::bind), unless it has a default.)
    pub(super) fn required(&self, at: usize) -> PyResult<&Bound<'py, PyAny>> {
        self.get(at).ok_or_else(|| self.error(format!("{}: it is missing", self.name(at))))
    }

    /// The positional arguments behind those of the parameters.
    pub(super) fn rest(&self) -> impl Iterator<Item = Bound<'py, PyAny>> {
        let skipped = self.signature.rest_after.unwrap_or(usize::MAX);
        self.call.args.iter().skip(skipped)
    }

    /// Name of the parameter at this place.
    pub(super) fn name(&self, at: usize) -> &'static str {
        self.signature.parameters.get(at).map_or("*args", |parameter| parameter.name)
    }

    /// The `TypeError` for an argument of the wrong type: the text of the interface, with what is wrong.
    pub(super) fn refuse(&self, at: usize, given: &Bound<'_, PyAny>, wanted: &str) -> PyErr {
        let kind = given.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
        self.error(format!("{}: a value of type {kind} is not {wanted}", self.name(at)))
    }

    /// The `TypeError` of this call.
    pub(super) fn error(&self, what: impl std::fmt::Display) -> PyErr {
        let name = self.signature.name;
        let mut text = format!(
            "{name}(): incompatible function arguments. The following argument types are supported:\n"
        );
        for (number, signature) in self.signatures.iter().enumerate() {
            let _ = writeln!(text, "    {}. {}", number + 1, signature.text());
        }
        let _ = write!(text, "\nInvoked with: {}", shown(self.call.owner));
        for value in self.call.args.iter().take(SHOWN_COUNT_MAX) {
            let _ = write!(text, ", {}", shown(&value));
        }
        if let Some(kwargs) = self.call.kwargs.filter(|kwargs| !kwargs.is_empty()) {
            text.push_str("; kwargs: ");
            let pairs = kwargs.iter().take(SHOWN_COUNT_MAX);
            let pairs: Vec<String> = pairs.map(|(name, value)| format!("{name}={}", shown(&value))).collect();
            text.push_str(&pairs.join(", "));
        }
        let _ = write!(text, "\n{what}");
        PyTypeError::new_err(text)
    }
}

/// What `repr` shows of a value, shortened. A value whose `repr` fails is shown by its type.
pub(crate) fn shown(value: &Bound<'_, PyAny>) -> String {
    // The representation of a long list would be built as a whole only to be shortened.
    let is_long = value.len().is_ok_and(|len| len > SHOWN_MAX);
    let kind = || format!("<{}>", value.get_type());
    if is_long {
        return kind();
    }
    let text = value.repr().map_or_else(|_| kind(), |text| text.to_string_lossy().into_owned());
    match text.char_indices().nth(SHOWN_MAX) {
        None => text,
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

/// The default of a parameter as an `Option`.
macro_rules! default_of {
    () => {
        None
    };
    ($default:literal) => {
        Some($default)
    };
}

/// Declares the methods of a class, in one `#[pymethods]` block.
///
/// A method is a Rust function `fn(&Bound<Class>, &Arguments) -> PyResult<impl IntoPyObject>`, its name, its
/// parameters with their types and defaults as Python shows them, and its documentation. What stands in the
/// braces behind the class is copied into the block as it is.
macro_rules! python_methods {
    (
        impl $class:ident as $shown:literal { $($by_hand:tt)* }
        $(
            $(#[doc = $doc:literal])+
            fn $name:ident($($param:ident: $kind:literal $(= $default:literal)?),*) -> $returns:literal
                => $body:path;
        )+
    ) => {
        #[pymethods]
        impl $class {
            $($by_hand)*
            $(
                // The first lines are what `inspect.signature` reads; the next is for people, and for callers
                // that search the documentation for the name of an argument.
                #[doc = concat!(
                    stringify!($name), "($self", $(", ", stringify!($param) $(, "=", $default)?,)* ")\n--\n\n",
                    stringify!($name), "(self: ", $shown,
                    $(", ", stringify!($param), ": ", $kind $(, " = ", $default)?,)*
                    ") -> ", $returns, "\n"
                )]
                $(#[doc = $doc])+
                #[pyo3(signature = (*args, **kwargs), text_signature = None)]
                fn $name<'py>(
                    slf: &Bound<'py, Self>,
                    args: &Bound<'py, pyo3::types::PyTuple>,
                    kwargs: Option<&Bound<'py, pyo3::types::PyDict>>,
                ) -> PyResult<Bound<'py, PyAny>> {
                    static SIGNATURE: Signature = Signature {
                        name: stringify!($name),
                        class: $shown,
                        parameters: &[$(Parameter {
                            name: stringify!($param),
                            kind: $kind,
                            default: default_of!($($default)?),
                        }),*],
                        rest_after: None,
                        returns: $returns,
                    };
                    static SIGNATURES: &[&Signature] = &[&SIGNATURE];
                    let call = Call { owner: slf.as_any(), args, kwargs };
                    let arguments = Arguments::bind(SIGNATURES, 0, call)?;
                    pyo3::IntoPyObjectExt::into_bound_py_any($body(slf, &arguments)?, slf.py())
                }
            )+
        }
    };
}

pub(super) use {default_of, python_methods};
