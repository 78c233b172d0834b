//! The source of requests: a trace file, or the generator.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use crate::exit::Failure;
use crate::trace::{Limits, Request, TraceReader};
use crate::workload::{Shape, Workload};
use crate::{fail, sys};

/// A trace or a workload, limited to a number of requests.
#[derive(Debug)]
pub(super) struct Source {
    trace: Option<PathBuf>,
    seed: u64,
    requests_max: usize,
}

/// The result of the first reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Survey {
    /// Number of requests, if they were counted.
    pub(super) requests: Option<u64>,
    /// Number of distinct blocks, if they were counted.
    pub(super) distinct_blocks: Option<u64>,
}

/// The iterator of both kinds of source.
type Requests = Box<dyn Iterator<Item = anyhow::Result<Request>>>;

impl Source {
    /// The first `limit` requests of `trace`, or of the workload of `seed`.
    pub(super) fn new(trace: Option<&Path>, seed: u64, limit: Option<u64>) -> anyhow::Result<Self> {
        let requests_max = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        Ok(Self { trace: trace.map(Path::to_path_buf), seed, requests_max })
    }

    /// The requests, from the beginning.
    pub(super) fn requests(&self) -> anyhow::Result<Requests> {
        Ok(match &self.trace {
            Some(file) => {
                let reader = TraceReader::open(file, Limits::default())?;
                Box::new(reader.map(|request| Ok(request?)).take(self.requests_max))
            }
            None => Box::new(Workload::new(self.seed, Shape::default()).map(Ok).take(self.requests_max)),
        })
    }

    /// Reads the whole source once, so that an error in the last line is found before the first process
    /// starts. A source that can be read only once (a pipe) is not read; it needs `capacity_known`.
    pub(super) fn survey(&self, capacity_known: bool) -> anyhow::Result<Survey> {
        if let Some(file) = &self.trace
            && std::fs::metadata(file).is_ok_and(|meta| !meta.is_file())
        {
            if file.is_dir() {
                return fail(Failure::usage(format!("{} is a directory, not a trace", file.display())));
            }
            if !capacity_known {
                let message = format!("{} can be read only once", file.display());
                return fail(Failure::usage(message).hint("give --capacity-blocks, or a regular file"));
            }
            return Ok(Survey { requests: None, distinct_blocks: None });
        }
        if self.trace.is_none() && capacity_known {
            // The generator has no errors, and its length is known.
            return Ok(Survey { requests: Some(self.requests_max as u64), distinct_blocks: None });
        }
        let (mut requests, mut seen) = (0, HashSet::new());
        for request in self.requests()? {
            seen.extend(request?.hash_ids);
            requests += 1;
            if let Some(exit) = sys::interrupted() {
                return fail(Failure::silent(exit));
            }
        }
        if requests == 0 {
            return fail(
                Failure::failed("the trace has no requests")
                    .hint("write one JSON object per line; see `snowskin replay --help`"),
            );
        }
        Ok(Survey { requests: Some(requests), distinct_blocks: Some(seen.len() as u64) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_survey_counts_requests_and_distinct_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("t.jsonl");
        let line = |ids: &str| {
            format!("{{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[{ids}]}}\n")
        };
        std::fs::write(&file, [line("1,2,3"), line("1,2,4"), line("9")].concat()).unwrap();
        let survey = |limit| Source::new(Some(&file), 0, limit).unwrap().survey(false).unwrap();
        assert_eq!(survey(None), Survey { requests: Some(3), distinct_blocks: Some(5) });
        assert_eq!(survey(Some(2)), Survey { requests: Some(2), distinct_blocks: Some(4) });
    }

    #[test]
    fn an_empty_trace_and_a_directory_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("empty.jsonl");
        std::fs::write(&file, "\n\n").unwrap();
        let error =
            |path: &Path| Source::new(Some(path), 0, None).unwrap().survey(true).unwrap_err().to_string();
        assert!(error(&file).contains("no requests"));
        assert!(error(dir.path()).contains("is a directory"));
    }
}
