//! Posting: slices become work requests, which are built for one queue pair and posted with one doorbell.

use te_core::{Error, ErrorKind};

use super::Initiator;
use super::batch::REQUESTS_MAX;
use crate::env::Env;
use crate::sys::verbs::Verbs;

impl Initiator {
    /// Posts pending slices to all peers with work.
    pub(crate) fn post_listed<V: Verbs>(&mut self, env: &mut Env<'_, V>) {
        if env.io.outage().is_none() {
            for at in 0..self.listed_count() {
                self.post(self.slices.listed()[at], env);
            }
        }
    }

    /// Posts pending slices to one peer, as far as its queue pairs take them.
    pub(crate) fn post<V: Verbs>(&mut self, peer: u32, env: &mut Env<'_, V>) {
        while let Some(link) = self.roomiest(peer, env) {
            self.build(peer, link, env);
            if self.batch.requests().is_empty() || !self.ring(peer, link, env) {
                return;
            }
        }
    }

    /// The queue pair with the fewest bytes in flight among those that take more; `None`: there is none, or
    /// nothing to post.
    fn roomiest<V: Verbs>(&self, peer: u32, env: &Env<'_, V>) -> Option<u32> {
        let (work, links) = (self.slices.work(peer)?, env.io.links());
        if work.pending.is_empty() || links.outstanding() >= env.io.info().cq_depth {
            return None;
        }
        let (depth, window) = (env.config.qp_depth, u64::from(env.config.window_bytes_max));
        let all = work.links.iter().flatten();
        let open = all.filter_map(|&at| links.get(at).map(|link| (at, link)));
        let open = open.filter(|(_, link)| link.room(depth, window) > 0);
        open.min_by_key(|(_, link)| link.bytes).map(|(at, _)| at)
    }

    /// Fills the batch with work requests for one queue pair. Their slices count as issued.
    fn build<V: Verbs>(&mut self, peer: u32, link: u32, env: &mut Env<'_, V>) {
        self.batch.clear();
        let (config, links) = (env.config, env.io.links());
        let Some(link) = links.get(link) else { return };
        let window = u64::from(config.window_bytes_max);
        let free = env.io.info().cq_depth - links.outstanding();
        let room = link.room(config.qp_depth, window).min(free);
        let (requests_max, bytes_max) =
            ((room as usize).min(REQUESTS_MAX), window.saturating_sub(link.bytes));
        while self.batch.bytes() < bytes_max
            && let Some(slot) = self.slices.first_pending(peer)
        {
            let cut = match self.slices.cut(slot, env.memory, config.message_bytes_max) {
                Ok(cut) => cut,
                Err(error) => {
                    self.slices.cannot_post(slot, error, env.memory, env.timers);
                    continue;
                }
            };
            if self.batch.merge(&cut, config.sges, config.message_bytes_max) {
                self.merged += 1;
            } else if self.batch.requests().len() < requests_max {
                self.batch.append(&cut);
            } else {
                break;
            }
            self.slices.issue(peer, slot, cut.sge.len);
        }
    }

    /// Posts the batch. False: this queue pair takes no more.
    fn ring<V: Verbs>(&mut self, peer: u32, index: u32, env: &mut Env<'_, V>) -> bool {
        let Some(link) = env.io.links().get(index) else { return false };
        let (qp, config) = (link.qp, env.config);
        let inline_max = qp.config.inline_bytes.min(config.inline_bytes_max);
        self.batch.finish(link, config.signal_every, inline_max);
        let (taken, error) = env.io.post(qp, self.batch.requests(), self.batch.sges());
        let links = env.io.links_mut();
        links.posted(taken as u32);
        let Some(link) = links.get_mut(index) else { return false };
        self.batch.record(link, taken);
        let (unsignaled, idle) = (link.unsignaled > 0, link.outstanding == 0);
        self.posted += taken as u64;
        self.doorbells += 1;
        let posted = &self.batch.requests()[..taken];
        self.signaled += posted.iter().filter(|request| request.signaled).count() as u64;
        self.inlined += posted.iter().filter(|request| request.inline).count() as u64;
        if let Some(work) = self.slices.work_mut(peer) {
            work.used = true;
        }
        if taken == self.batch.requests().len() {
            return true;
        }
        while let Some(piece) = self.batch.take_back(taken) {
            self.slices.unissue(peer, piece);
        }
        let full = error.is_some_and(|error| error.kind == ErrorKind::System && error.code == libc::ENOMEM);
        if !full {
            let code = error.map_or(0, |error| error.code);
            self.drain(index, Some(Error::with_code(ErrorKind::Rail, code)), env);
        } else if unsignaled || idle {
            // It is full below its depth, and no posted request will report success: it is replaced.
            self.drain(index, None, env);
        }
        false
    }
}
