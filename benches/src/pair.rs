//! Two transports of one kind, one after the other in one thread.
#![allow(unsafe_code, reason = "registers memory that it allocates")]

use std::time::{Duration, Instant as Clock};

use te_core::{Access, Completion, Instant, MemSpan, Slice, Token, Transport};

use crate::{REGION, REMOTE_REGION};

/// The time limit of a round, which none comes close to.
const ROUND_S_MAX: u64 = 30;

/// An initiator and its target. Each has one region, [`REGION`]; the target's is the initiator's
/// [`REMOTE_REGION`].
#[derive(Debug)]
pub struct Pair<T> {
    initiator: T,
    target: T,
    epoch: Clock,
}

impl<T: Transport> Pair<T> {
    /// Registers `bytes` at each end and attaches the target's region to the initiator. The memory is never
    /// freed: the process of a benchmark ends soon.
    ///
    /// # Panics
    /// When a transport refuses.
    pub fn new(mut initiator: T, mut target: T, bytes: usize) -> Self {
        for transport in [&mut initiator, &mut target] {
            let memory = Box::into_raw(vec![0x5au8; bytes].into_boxed_slice());
            let span = MemSpan::new(memory.cast(), bytes);
            // SAFETY: the memory comes from a box, is never freed, and nothing else refers to it.
            unsafe { transport.register(REGION, span, Access::all()) }.expect("a fresh transport");
        }
        let mut blob = vec![0; target.capabilities().export_bytes_max as usize];
        let len = target.export(REGION, &mut blob).expect("a region with remote rights");
        initiator.attach(REMOTE_REGION, &blob[..len]).expect("a fresh transport");
        Self { initiator, target, epoch: Clock::now() }
    }

    /// Submits all of `batch` and polls both ends until all of it has completed.
    ///
    /// # Panics
    /// When a slice fails, or the round takes longer than 30 s.
    pub fn round(&mut self, batch: &[Slice]) {
        let mut out = [Completion::applied(Token(0)); 128];
        let (mut submitted, mut completed) = (0, 0);
        let began = self.now();
        while completed < batch.len() {
            if submitted < batch.len() {
                submitted += self.initiator.submit(&batch[submitted..]).expect("valid slices");
            }
            let now = self.now();
            let count = self.initiator.poll(now, &mut out);
            for completion in &out[..count] {
                completion.result.expect("nothing fails here");
            }
            completed += count;
            let none = self.target.poll(now, &mut out);
            assert_eq!(none, 0, "the target asked for nothing");
            assert!(now - began < Duration::from_secs(ROUND_S_MAX), "{completed} of {} slices", batch.len());
        }
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}
