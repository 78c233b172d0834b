//! The bridge from the `log` crate to Python's `logging`.
//!
//! A message of module `te_tcp::peers` goes to the logger `snowskin.te_tcp.peers`. It is formatted on the
//! thread that logs, which then only appends it to a queue; [`crate::attendant`] hands it to Python. The
//! level of the logger `snowskin` decides what is formatted at all. It is read when a store or an engine is
//! opened, and by `snowskin.update_log_level()`.

use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use log::{Level, LevelFilter, Log, Metadata, Record};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::attendant;

/// One log message.
#[derive(Debug)]
pub(crate) struct Message {
    level: Level,
    target: String,
    text: String,
    file: Option<&'static str>,
    line: u32,
    thread: String,
    /// Seconds since 1970.
    created: f64,
}

struct Bridge;

impl Log for Bridge {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        attendant::get().log(Message {
            level: record.level(),
            target: record.target().replace("::", "."),
            text: record.args().to_string(),
            file: record.file_static(),
            line: record.line().unwrap_or(0),
            thread: thread::current().name().unwrap_or("native").to_owned(),
            created: now.as_secs_f64(),
        });
    }

    fn flush(&self) {}
}

/// Installs the bridge. Does nothing when this process has a logger already.
pub(crate) fn install() {
    if log::set_logger(&Bridge).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}

/// Reads the level of the logger `snowskin`.
///
/// # Errors
/// `logging` raised.
pub(crate) fn update_level(py: Python<'_>) -> PyResult<()> {
    let level: u32 = py.import("snowskin._logging")?.call_method0("level")?.extract()?;
    log::set_max_level(match level {
        0..=5 => LevelFilter::Trace,
        6..=10 => LevelFilter::Debug,
        11..=20 => LevelFilter::Info,
        21..=30 => LevelFilter::Warn,
        31..=50 => LevelFilter::Error,
        _ => LevelFilter::Off,
    });
    Ok(())
}

/// Hands messages to Python. A handler that raises costs the messages, never the process.
pub(crate) fn deliver(py: Python<'_>, messages: &[Message], lost: u64) {
    let delivered = || -> PyResult<()> {
        let rows = PyList::empty(py);
        for message in messages {
            let Message { level, target, text, file, line, thread, created } = message;
            let row = (number(*level), target, text, file.unwrap_or("native"), line, thread, created);
            rows.append(row)?;
        }
        py.import("snowskin._logging")?.call_method1("deliver", (rows, lost))?;
        Ok(())
    };
    if let Err(error) = delivered() {
        error.write_unraisable(py, None);
    }
}

/// The level's number in Python.
const fn number(level: Level) -> u32 {
    match level {
        Level::Error => 40,
        Level::Warn => 30,
        Level::Info => 20,
        Level::Debug => 10,
        Level::Trace => 5,
    }
}
