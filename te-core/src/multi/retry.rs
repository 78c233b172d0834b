//! Slices that lost their rail: the queue in which they wait for another one, and how each of them ends.

use super::{MultiTransport, NONE};
use crate::{Completion, Error, ErrorKind, Route, Slice, Transport};

/// What became of a slice in the retry queue.
enum Retried {
    /// A rail has it.
    Posted,
    /// Every rail that is left is full or paused.
    Waits,
    /// Nobody is left to take it.
    Over(Error),
}

impl<C: Transport, R: Route> MultiTransport<C, R> {
    /// Sends queued slices over rails that they have not tried. Ends those for which there is none.
    pub(super) fn run_retries(&mut self, out: &mut [Completion]) -> usize {
        let mut written = 0;
        self.retry_due = false;
        let mut index = core::mem::replace(&mut self.retry, (NONE, NONE)).0;
        while index != NONE {
            let next = self.slots[index as usize].next;
            match self.retry(index) {
                Retried::Posted => {}
                Retried::Waits => self.enqueue_retry(index),
                Retried::Over(error) => match out.get_mut(written) {
                    Some(room) => {
                        let slot = &self.slots[index as usize];
                        let (token, stray) = (slot.slice.token, slot.is_stray());
                        let end = if stray { Completion::unknown } else { Completion::not_applied };
                        *room = self.end(index as usize, end(token, error));
                        written += 1;
                    }
                    None => {
                        self.retry_due = true;
                        self.enqueue_retry(index);
                    }
                },
            }
            index = next;
        }
        written
    }

    /// Tries every rail that one queued slice has not tried yet, until one takes it.
    fn retry(&mut self, index: u32) -> Retried {
        let mut last = Error::new(ErrorKind::Unreachable);
        loop {
            let slot = self.slots[index as usize];
            if slot.is_canceled() {
                return Retried::Over(Error::new(ErrorKind::Canceled));
            }
            let untried = self.usable(&slot.slice).map_or(0, |mask| mask & !slot.tried);
            if untried == 0 {
                return Retried::Over(last);
            }
            let Some(rail) = self.route.route(&slot.slice, untried) else { return Retried::Waits };
            match self.post_again(rail, index) {
                Ok(1) => return Retried::Posted,
                Ok(_) => return Retried::Waits,
                Err(error) => {
                    last = error;
                    self.slots[index as usize].tried |= 1 << rail;
                }
            }
        }
    }

    fn post_again(&mut self, rail: usize, index: u32) -> Result<usize, Error> {
        let slot = &self.slots[index as usize];
        let slice = Slice { token: slot.child_token(index), ..slot.slice };
        self.run[0] = slice;
        self.route.accepted(rail, &slice);
        self.slots[index as usize].bytes_ahead = self.route.bytes_in_flight(rail);
        let posted = self.rails[rail].submit(&self.run[..1]);
        match posted {
            Ok(1) => self.slots[index as usize].repost(rail, self.now),
            _ => self.route.returned(rail, &slice),
        }
        posted
    }

    pub(super) fn enqueue_retry(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.queue(NONE);
        let (first, last) = self.retry;
        if last == NONE {
            self.retry = (index, index);
        } else {
            self.slots[last as usize].next = index;
            self.retry = (first, index);
        }
    }
}
