//! Slices that lost their rail: the queue in which they wait for another rail, and how each of them ends.

use super::{MultiTransport, NONE};
use crate::{Completion, Error, ErrorKind, Route, Slice, Transport};

/// The result of a try to send a slice from the retry queue.
enum Retried {
    /// A rail accepted it.
    Posted,
    /// Every remaining rail is full or paused.
    Waits,
    /// No rail is left that could take it.
    Over(Error),
}

impl<C: Transport, R: Route> MultiTransport<C, R> {
    /// Sends queued slices over rails that have not tried them. Ends those for which no rail is left.
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

    /// Tries every rail that has not tried the queued slice yet, until one accepts it.
    fn retry(&mut self, index: u32) -> Retried {
        let mut last = Error::new(ErrorKind::Unreachable);
        loop {
            let slot = self.slots[index as usize];
            if slot.is_canceled() {
                return Retried::Over(Error::new(ErrorKind::Canceled));
            }
            let untried = self.untried(index, slot.tried, last);
            if untried == 0 {
                return Retried::Over(last);
            }
            let Some(rail) = self.route.route(&slot.slice, untried).or_else(|| self.before_pauses_end(index))
            else {
                return Retried::Waits;
            };
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
            Ok(_) => self.route.returned(rail, &slice),
            Err(error) => self.refused(rail, error),
        }
        posted
    }

    /// The rails that remain for a slice after those of `tried` have failed or refused it, the last of them
    /// with `error`.
    ///
    /// When none remains, all of them are tried once more: where rails fail and recover one after another,
    /// each may have failed the slice although at any time one of them worked. For a dead peer that is
    /// pointless.
    pub(super) fn untried(&mut self, index: u32, tried: u32, error: Error) -> u32 {
        let slot = &self.slots[index as usize];
        let usable = self.usable(&slot.slice).unwrap_or(0);
        let again = usable & !tried == 0
            && !slot.is_again()
            && usable.count_ones() > 1
            && error.kind != ErrorKind::PeerDead;
        let slot = &mut self.slots[index as usize];
        slot.tried = tried;
        if again {
            slot.try_again();
        }
        usable & !slot.tried
    }

    /// A rail that failed the slice once and can be used now, when those that have not tried it are all
    /// paused: a rail that has recovered is better than waiting for the end of a pause.
    fn before_pauses_end(&mut self, index: u32) -> Option<usize> {
        let slot = &self.slots[index as usize];
        let usable = self.usable(&slot.slice).unwrap_or(0);
        let rail = self.route.route(&slot.slice, usable).filter(|_| !slot.is_again())?;
        self.slots[index as usize].try_again();
        Some(rail)
    }

    /// `rail` refused `run[0]` for a reason other than being full. The route counts that as a failed slice.
    pub(super) fn refused(&mut self, rail: usize, error: Error) {
        let end = Completion::not_applied(self.run[0].token, error);
        self.route.completed(rail, &self.run[0], &end, 0, 0);
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
