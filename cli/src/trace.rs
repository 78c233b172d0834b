//! Request traces in the format of the FAST'25 paper: one JSON object per line.
//!
//! ```text
//! {"timestamp": 27000, "input_length": 6955, "output_length": 52, "hash_ids": [0, 46, 47, 2353]}
//! ```
//!
//! `hash_ids` name the request's blocks of 512 tokens. Ids are chained: an id stands for its block *and
//! everything before it*, so two requests that share an id share the prefix up to it. Unknown fields are
//! ignored, blank lines skipped.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// Limits on one line of a trace, which bound the reader's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest line, bytes.
    pub line_bytes_max: usize,
    /// Most blocks per request.
    pub ids_per_request_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { line_bytes_max: 4 << 20, ids_per_request_max: 256 << 10 }
    }
}

/// One request of a trace.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Request {
    /// Arrival time, milliseconds from the beginning of the trace.
    pub timestamp: f64,
    /// Length of the prompt, tokens.
    pub input_length: u64,
    /// Length of the answer, tokens.
    pub output_length: u64,
    /// The blocks of the prompt, in order.
    pub hash_ids: Vec<u64>,
}

impl Request {
    /// Parses one line.
    ///
    /// # Errors
    /// The line is not a request, or exceeds a limit.
    pub fn parse(line: &[u8], limits: &Limits) -> Result<Self, LineError> {
        if line.len() > limits.line_bytes_max {
            return Err(LineError::TooLong { line_bytes_max: limits.line_bytes_max });
        }
        let request: Self = serde_json::from_slice(line)
            .map_err(|error| LineError::Json { why: without_line(&error), column: error.column() })?;
        if request.hash_ids.len() > limits.ids_per_request_max {
            return Err(LineError::TooManyIds {
                ids: request.hash_ids.len(),
                ids_per_request_max: limits.ids_per_request_max,
            });
        }
        if !request.timestamp.is_finite() {
            return Err(LineError::Json { why: "timestamp is not a number".into(), column: 0 });
        }
        Ok(request)
    }
}

/// Why a line is not a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LineError {
    /// Not JSON, or not with these fields.
    Json {
        /// The parser's message.
        why: String,
        /// The column, counted from 1.
        column: usize,
    },
    /// The line is too long.
    TooLong {
        /// The limit, bytes.
        line_bytes_max: usize,
    },
    /// The request has too many blocks.
    TooManyIds {
        /// Number of blocks in the request.
        ids: usize,
        /// The limit.
        ids_per_request_max: usize,
    },
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json { why, column } => write!(
                f,
                "{why} at column {column}; expected an object such as \
                 {{\"timestamp\": 0, \"input_length\": 900, \"output_length\": 3, \"hash_ids\": [0, 7]}}"
            ),
            Self::TooLong { line_bytes_max } => {
                write!(f, "longer than {line_bytes_max} bytes; expected one request per line")
            }
            Self::TooManyIds { ids, ids_per_request_max } => {
                write!(f, "{ids} hash_ids; expected at most {ids_per_request_max} in one request")
            }
        }
    }
}

impl std::error::Error for LineError {}

/// Why reading the trace stopped.
#[derive(Debug)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be opened or read.
    Io {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A line is not a request.
    Line {
        /// The file.
        file: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// What is wrong with the line.
        source: LineError,
    },
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { file, source } => write!(f, "cannot read trace {}: {source}", file.display()),
            Self::Line { file, line, source } => write!(f, "{}:{line}: {source}", file.display()),
        }
    }
}

// The message includes the text of the cause, so `source` is not reported again.
impl std::error::Error for TraceError {}

/// Reads requests one by one. Its memory is bounded by the limits, not by the size of the file.
#[derive(Debug)]
pub struct TraceReader<R> {
    input: R,
    file: PathBuf,
    limits: Limits,
    line: u64,
    buffer: Vec<u8>,
    failed: bool,
}

impl TraceReader<BufReader<File>> {
    /// Opens `file`.
    ///
    /// # Errors
    /// `Io` when it does not open.
    pub fn open(file: &Path, limits: Limits) -> Result<Self, TraceError> {
        let input = File::open(file).map_err(|source| TraceError::Io { file: file.into(), source })?;
        Ok(Self::new(BufReader::with_capacity(256 << 10, input), file, limits))
    }
}

impl<R: BufRead> TraceReader<R> {
    /// Reads `input`; error messages call it `file`.
    #[must_use]
    pub fn new(input: R, file: impl Into<PathBuf>, limits: Limits) -> Self {
        Self { input, file: file.into(), limits, line: 0, buffer: Vec::new(), failed: false }
    }

    fn read_line(&mut self) -> Result<bool, TraceError> {
        self.buffer.clear();
        self.line += 1;
        loop {
            let available = match self.input.fill_buf() {
                Ok(available) => available,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(TraceError::Io { file: self.file.clone(), source }),
            };
            if available.is_empty() {
                return Ok(!self.buffer.is_empty());
            }
            let end = available.iter().position(|&byte| byte == b'\n');
            let part = &available[..end.unwrap_or(available.len())];
            if self.buffer.len() + part.len() > self.limits.line_bytes_max {
                return Err(
                    self.line_error(LineError::TooLong { line_bytes_max: self.limits.line_bytes_max })
                );
            }
            self.buffer.extend_from_slice(part);
            let used = part.len() + usize::from(end.is_some());
            self.input.consume(used);
            if end.is_some() {
                return Ok(true);
            }
        }
    }

    fn line_error(&self, source: LineError) -> TraceError {
        TraceError::Line { file: self.file.clone(), line: self.line, source }
    }
}

/// Ends after the first error, because what follows a broken line cannot be trusted.
impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.failed {
            let result = match self.read_line() {
                Ok(false) => return None,
                Ok(true) if self.buffer.trim_ascii().is_empty() => continue,
                Ok(true) => {
                    Request::parse(&self.buffer, &self.limits).map_err(|error| self.line_error(error))
                }
                Err(error) => Err(error),
            };
            self.failed = result.is_err();
            return Some(result);
        }
        None
    }
}

/// serde_json ends its messages with "at line 1 column 7". This removes it, because the error names the line
/// of the file.
fn without_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rfind(" at line ").map_or(text.clone(), |end| text[..end].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"timestamp": 1, "input_length": 6, "output_length": 5, "hash_ids": [0, 1]}"#;

    fn read(text: &str, limits: Limits) -> Vec<Result<Request, String>> {
        TraceReader::new(text.as_bytes(), "t.jsonl", limits)
            .map(|result| result.map_err(|error| error.to_string()))
            .collect()
    }

    #[test]
    fn a_trace_reads_line_by_line_with_blank_lines_and_unknown_fields() {
        let text = format!("{GOOD}\r\n\n  \n{{\"extra\": {{}}, {}", &GOOD[1..]);
        let requests = read(&text, Limits::default());
        assert_eq!(requests.len(), 2);
        assert!(
            requests.iter().all(|r| r.as_ref().is_ok_and(|r| r.hash_ids == [0, 1] && r.input_length == 6))
        );
    }

    #[test]
    fn a_bad_line_names_file_line_and_what_was_expected_and_ends_the_trace() {
        for (bad, why) in [
            (r#"{"timestamp": 0, "input_length": 1, "output_length": 1}"#, "missing field `hash_ids`"),
            (r#"{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}"#, "invalid value"),
            (r#"{"timestamp": 0, "input_length""#, "EOF"),
            ("timestamp,input_length", "expected"),
            ("\u{0}\u{1}", "expected"),
        ] {
            let results = read(&format!("{GOOD}\n{bad}\n{GOOD}\n"), Limits::default());
            assert_eq!(results.len(), 2, "{bad}");
            let error = results[1].as_ref().unwrap_err();
            assert!(error.starts_with("t.jsonl:2: ") && error.contains(why), "{error}");
            assert!(error.contains(r#""hash_ids": [0, 7]"#), "{error}");
        }
    }

    #[test]
    fn limits_hold_before_memory_is_spent() {
        let limits = Limits { line_bytes_max: 100, ids_per_request_max: 3 };
        let long = format!("{GOOD}\n{}", "x".repeat(10_000));
        let error = read(&long, limits).pop().unwrap().unwrap_err();
        assert!(error.starts_with("t.jsonl:2: longer than 100 bytes"), "{error}");
        let many = r#"{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1,2,3,4]}"#;
        let error = read(many, limits).pop().unwrap().unwrap_err();
        assert!(error.contains("4 hash_ids; expected at most 3"), "{error}");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error =
            TraceReader::open(Path::new("/no/such/trace.jsonl"), Limits::default()).unwrap_err().to_string();
        assert!(error.contains("/no/such/trace.jsonl"), "{error}");
    }
}
