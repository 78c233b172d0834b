//! What callers say about an operation: retention, replicas, timeouts, sizes.

use std::time::{Duration, Instant};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString};
use store_client::{DiskCopy, Existing, Pin, PutOptions, Retention};

use crate::errors::Fault;

/// Longest timeout and time to live, seconds: about 49 days, the largest number of milliseconds.
const SECONDS_MAX: f64 = 4_294_967.0;

/// The options of a put. With `overwrite`, it replaces an object that exists when it is committed, and takes
/// nothing over from it.
///
/// # Errors
/// An invalid argument, with the values that are allowed.
pub(crate) fn put_options(
    py: Python<'_>,
    pin: Option<&str>,
    replicas: i64,
    group: Option<&Bound<'_, PyAny>>,
    ttl: Option<f64>,
    overwrite: bool,
    disk: &str,
) -> PyResult<PutOptions> {
    let pin = match pin {
        None => Pin::None,
        Some("soft") => Pin::Soft,
        Some("hard") => Pin::Hard,
        Some(other) => {
            return Err(refused(py, format!("pin is None, \"soft\" or \"hard\", not {other:?}")));
        }
    };
    let disk = match disk {
        "auto" => DiskCopy::Auto,
        "never" => DiskCopy::Never,
        "now" => DiskCopy::Now,
        other => {
            return Err(refused(py, format!("disk is \"auto\", \"never\" or \"now\", not {other:?}")));
        }
    };
    let replicas = u8::try_from(replicas)
        .ok()
        .filter(|&replicas| replicas > 0)
        .ok_or_else(|| refused(py, format!("replicas is 1 to 255, not {replicas}")))?;
    let ttl_ms = ttl.map(|ttl| limit_ms(py, "ttl", ttl)).transpose()?;
    let group = group.map(group_number).transpose()?;
    if disk == DiskCopy::Now && (pin != Pin::None || ttl_ms.is_some() || group.is_some()) {
        let text = "disk=\"now\" is for objects without pin, ttl and group: others have no copy on a disk";
        return Err(refused(py, text));
    }
    let mut retention = Retention::DEFAULT;
    retention.pin = pin;
    retention.ttl_ms = ttl_ms;
    retention.group = group;
    retention.disk = disk;
    let existing = if overwrite { Existing::REPLACE } else { Existing::Keep };
    Ok(PutOptions { replicas, retention, existing, ..PutOptions::DEFAULT })
}

/// A group as the store names it: a number, or the hash of a name (FNV-1a of its UTF-8 bytes, the same in
/// every process).
fn group_number(group: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(name) = group.cast::<PyString>() {
        let fold = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        return Ok(name.to_str()?.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, fold));
    }
    let number = group.extract::<u64>();
    number.map_err(|_| refused(group.py(), "group is a str, or an int from 0 to 2**64 - 1"))
}

/// Seconds as milliseconds, at least 1.
///
/// # Errors
/// An invalid argument.
pub(crate) fn limit_ms(py: Python<'_>, name: &str, seconds: f64) -> PyResult<u32> {
    if seconds.is_finite() && seconds > 0.0 && seconds <= SECONDS_MAX {
        Ok(((seconds * 1000.0).ceil() as u32).max(1))
    } else {
        let text = format!("{name} is a number of seconds from 0.001 to {SECONDS_MAX}, not {seconds}");
        Err(refused(py, text))
    }
}

/// When a timeout that begins now is over; `None`: never.
///
/// # Errors
/// An invalid argument: a negative number, or none.
pub(crate) fn deadline(py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = timeout else { return Ok(None) };
    if seconds.is_nan() || seconds < 0.0 {
        return Err(refused(
            py,
            format!("timeout is None or a number of seconds, at least 0, not {seconds}"),
        ));
    }
    // What overflows is no limit.
    let wait = Duration::try_from_secs_f64(seconds).ok();
    Ok(wait.and_then(|wait| Instant::now().checked_add(wait)))
}

/// A number of bytes: an int, or a text with a unit (`"4GiB"`, `"512 MB"`).
///
/// # Errors
/// `TypeError` for other types, an invalid argument for a text that is not a size.
pub(crate) fn size(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let py = value.py();
    if let Ok(text) = value.cast::<PyString>() {
        let text = text.to_str()?;
        return parse_size(text).ok_or_else(|| {
            refused(py, format!("{name} is a number of bytes such as 4096 or \"4GiB\", not {text:?}"))
        });
    }
    match value.extract::<u64>() {
        Ok(bytes) => Ok(bytes),
        Err(_) if value.is_instance_of::<PyInt>() => {
            Err(refused(py, format!("{name} is 0 to 2**64 - 1 bytes, not {value}")))
        }
        Err(_) => {
            let kind = value.get_type().name()?;
            Err(PyTypeError::new_err(format!("{name} is an int or a str, not {kind}")))
        }
    }
}

/// An exception for an argument that is refused.
pub(crate) fn refused(py: Python<'_>, text: impl Into<String>) -> PyErr {
    Fault::argument(text).into_err(py)
}

/// `KiB MiB GiB TiB` and bare `K M G T` are powers of 1024, `KB MB GB TB` powers of 1000, as on the command
/// line; case does not matter.
fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return None,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit);
    }
    let bytes = number.parse::<f64>().ok()? * unit as f64;
    (bytes.fract() == 0.0 && (0.0..=(1_u64 << 53) as f64).contains(&bytes)).then_some(bytes as u64)
}
