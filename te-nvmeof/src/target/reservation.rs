//! The reservation of one namespace (Base Specification 8.1.22): who may read and write it. No I/O.

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::command::Status;

/// Hosts that may be registered with one namespace.
const REGISTRANTS_MAX: usize = 256;
/// The types of reservations: Write Exclusive to Exclusive Access – All Registrants.
const TYPES: core::ops::RangeInclusive<u8> = 1..=6;

/// A host's identifier.
pub(crate) type HostId = [u8; 16];

/// The data of Reservation Register, Acquire and Release: the current key, and a second key.
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Keys {
    pub(crate) current: U64,
    pub(crate) second: U64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Registrant {
    host: HostId,
    key: u64,
}

/// The reservation of one namespace. Without registrants anyone may do everything.
#[derive(Debug, Default)]
pub(crate) struct Reservation {
    kind: u8,
    holder: Option<HostId>,
    registrants: Vec<Registrant>,
    generation: u32,
}

impl Reservation {
    /// Whether `host` may read, or write.
    pub(crate) fn allows(&self, host: &HostId, write: bool) -> bool {
        let is_holder = self.holder.as_ref() == Some(host);
        let is_registered = self.key_of(host).is_some();
        match self.kind {
            1 => !write || is_holder,
            2 => is_holder,
            3 | 5 => !write || is_registered,
            4 | 6 => is_registered,
            _ => true,
        }
    }

    /// Register (action 0), unregister (1), replace the key (2).
    pub(crate) fn register(&mut self, host: HostId, dword: u32, keys: Keys) -> Status {
        let (action, ignore) = (dword & 7, dword >> 3 & 1 == 1);
        let (current, new) = (keys.current.get(), keys.second.get());
        let have = self.key_of(&host);
        match (action, have) {
            (0, None) if new == 0 => Status::INVALID_FIELD,
            (0, None) if self.registrants.len() >= REGISTRANTS_MAX => Status::INTERNAL,
            (0, None) => {
                self.registrants.push(Registrant { host, key: new });
                self.generation += 1;
                Status::SUCCESS
            }
            (0, Some(key)) if key == new => Status::SUCCESS,
            (1, Some(key)) if ignore || key == current => {
                self.forget(&host);
                self.generation += 1;
                Status::SUCCESS
            }
            (2, Some(key)) if (ignore || key == current) && new != 0 => {
                let found = self.registrants.iter_mut().find(|registrant| registrant.host == host);
                found.into_iter().for_each(|registrant| registrant.key = new);
                self.generation += 1;
                Status::SUCCESS
            }
            (2, None) if ignore && new != 0 && self.registrants.len() < REGISTRANTS_MAX => {
                self.registrants.push(Registrant { host, key: new });
                self.generation += 1;
                Status::SUCCESS
            }
            (0..=2, _) => Status::RESERVATION_CONFLICT,
            _ => Status::INVALID_FIELD,
        }
    }

    /// Acquire (action 0), preempt (1), preempt and abort (2). Returns the hosts whose registrations were
    /// removed.
    ///
    /// # Errors
    /// The status; nothing has changed.
    pub(crate) fn acquire(&mut self, host: HostId, dword: u32, keys: Keys) -> Result<Vec<HostId>, Status> {
        let (action, kind) = (dword & 7, (dword >> 8) as u8);
        if action > 2 || !TYPES.contains(&kind) {
            return Err(Status::INVALID_FIELD);
        }
        if self.key_of(&host) != Some(keys.current.get()) {
            return Err(Status::RESERVATION_CONFLICT);
        }
        if action == 0 {
            let same = self.is_held_by(&host) && self.kind == kind;
            if self.kind != 0 && !same {
                return Err(Status::RESERVATION_CONFLICT);
            }
            (self.kind, self.holder) = (kind, Some(host));
            return Ok(Vec::new());
        }
        let victim = keys.second.get();
        let holder_key = self.holder.and_then(|holder| self.key_of(&holder));
        let all_registrants = matches!(self.kind, 5 | 6);
        let takes_over = self.kind != 0 && (holder_key == Some(victim) || (all_registrants && victim == 0));
        let is_victim = |registrant: &Registrant| {
            registrant.host != host && (registrant.key == victim || (all_registrants && victim == 0))
        };
        let gone: Vec<HostId> =
            self.registrants.iter().filter(|one| is_victim(one)).map(|one| one.host).collect();
        if gone.is_empty() && !takes_over {
            return Err(Status::RESERVATION_CONFLICT);
        }
        self.registrants.retain(|registrant| !is_victim(registrant));
        if takes_over {
            (self.kind, self.holder) = (kind, Some(host));
        }
        self.generation += 1;
        Ok(gone)
    }

    /// Release (action 0), clear (1).
    pub(crate) fn release(&mut self, host: HostId, dword: u32, key: u64) -> Status {
        let (action, kind) = (dword & 7, (dword >> 8) as u8);
        if self.key_of(&host) != Some(key) {
            return Status::RESERVATION_CONFLICT;
        }
        match action {
            0 if !self.is_held_by(&host) => Status::SUCCESS,
            0 if kind != self.kind => Status::INVALID_FIELD,
            0 => {
                (self.kind, self.holder) = (0, None);
                Status::SUCCESS
            }
            1 => {
                *self = Self { generation: self.generation + 1, ..Self::default() };
                Status::SUCCESS
            }
            _ => Status::INVALID_FIELD,
        }
    }

    /// The extended report (figure 592): 64 bytes, then 64 bytes for each registrant.
    pub(crate) fn report(&self) -> Vec<u8> {
        let mut bytes = vec![0; 64 * (1 + self.registrants.len())];
        bytes[..4].copy_from_slice(&self.generation.to_le_bytes());
        bytes[4] = self.kind;
        bytes[5..7].copy_from_slice(&(self.registrants.len() as u16).to_le_bytes());
        for (to, registrant) in bytes[64..].chunks_exact_mut(64).zip(&self.registrants) {
            to[..2].copy_from_slice(&u16::MAX.to_le_bytes());
            to[2] = u8::from(self.is_held_by(&registrant.host));
            to[8..16].copy_from_slice(&registrant.key.to_le_bytes());
            to[16..32].copy_from_slice(&registrant.host);
        }
        bytes
    }

    fn key_of(&self, host: &HostId) -> Option<u64> {
        self.registrants.iter().find(|registrant| registrant.host == *host).map(|registrant| registrant.key)
    }

    fn is_held_by(&self, host: &HostId) -> bool {
        match self.kind {
            0 => false,
            5 | 6 => self.key_of(host).is_some(),
            _ => self.holder.as_ref() == Some(host),
        }
    }

    fn forget(&mut self, host: &HostId) {
        self.registrants.retain(|registrant| registrant.host != *host);
        let ends = match self.kind {
            5 | 6 => self.registrants.is_empty(),
            _ => self.holder.as_ref() == Some(host),
        };
        if ends {
            (self.kind, self.holder) = (0, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: HostId = [1; 16];
    const B: HostId = [2; 16];
    const EXCLUSIVE_REGISTRANTS: u32 = 4 << 8;
    const PREEMPT_AND_ABORT: u32 = 2;

    fn keys(current: u64, second: u64) -> Keys {
        Keys { current: U64::new(current), second: U64::new(second) }
    }

    fn two_hosts() -> Reservation {
        let mut of = Reservation::default();
        assert_eq!(of.register(A, 0, keys(0, 11)), Status::SUCCESS);
        assert_eq!(of.register(B, 0, keys(0, 22)), Status::SUCCESS);
        of
    }

    #[test]
    fn a_registrant_that_is_preempted_may_do_nothing_any_more() {
        let mut of = two_hosts();
        assert!(of.allows(&[9; 16], true), "no reservation yet");
        assert_eq!(of.acquire(A, EXCLUSIVE_REGISTRANTS, keys(11, 0)), Ok(vec![]));
        assert!(of.allows(&A, true) && of.allows(&B, true) && !of.allows(&[9; 16], false));
        let preempt = EXCLUSIVE_REGISTRANTS | PREEMPT_AND_ABORT;
        assert_eq!(of.acquire(A, preempt, keys(11, 33)), Err(Status::RESERVATION_CONFLICT), "no such key");
        assert_eq!(of.acquire(A, preempt, keys(12, 22)), Err(Status::RESERVATION_CONFLICT), "a wrong key");
        assert!(of.allows(&B, true));
        assert_eq!(of.acquire(A, preempt, keys(11, 22)), Ok(vec![B]));
        assert!(!of.allows(&B, false) && of.allows(&A, true));
        assert_eq!(of.acquire(B, EXCLUSIVE_REGISTRANTS, keys(22, 0)), Err(Status::RESERVATION_CONFLICT));
    }

    #[test]
    fn a_holder_that_is_preempted_loses_the_reservation() {
        let mut of = two_hosts();
        assert_eq!(of.acquire(A, 1 << 8, keys(11, 0)), Ok(vec![]));
        assert!(!of.allows(&B, true) && of.allows(&B, false));
        assert_eq!(of.acquire(B, 1 << 8 | 1, keys(22, 11)), Ok(vec![A]));
        assert!(of.allows(&B, true) && !of.allows(&A, true));
        assert_eq!(of.release(B, 1 << 8, 22), Status::SUCCESS);
        assert!(of.allows(&A, true));
        assert_eq!(of.release(A, 1, 11), Status::RESERVATION_CONFLICT, "it is not registered");
        assert_eq!(of.release(B, 1, 22), Status::SUCCESS);
        assert_eq!(of.report().len(), 64);
    }

    #[test]
    fn keys_are_checked_and_registrants_counted() {
        let mut of = two_hosts();
        assert_eq!(of.register(A, 0, keys(0, 12)), Status::RESERVATION_CONFLICT, "it has another key");
        assert_eq!(of.register(A, 2, keys(12, 13)), Status::RESERVATION_CONFLICT);
        assert_eq!(of.register(A, 2, keys(11, 13)), Status::SUCCESS);
        assert_eq!(of.register(A, 1, keys(11, 0)), Status::RESERVATION_CONFLICT);
        assert_eq!(of.register(A, 1 | 8, keys(0, 0)), Status::SUCCESS, "whatever its key");
        assert_eq!(of.register([7; 16], 0, keys(0, 0)), Status::INVALID_FIELD, "key 0");
        assert_eq!(of.register(B, 7, keys(22, 0)), Status::INVALID_FIELD);
        for host in 10..=u8::MAX {
            let _ = of.register([host; 16], 0, keys(0, 5));
        }
        for host in 0..=u8::MAX {
            let _ = of.register([host, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 0, keys(0, 5));
        }
        assert_eq!(of.registrants.len(), REGISTRANTS_MAX);
    }
}
