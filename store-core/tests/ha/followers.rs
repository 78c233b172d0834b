//! Followers outside of the store: each is told by one member, while it leads, which objects are found where.
//! What it was told has to be what is there.

use std::collections::BTreeSet;

use store_core::ha::{Member, Reign};
use store_core::message::ListQuery;
use store_core::{Instant, Key, KvEvent, KvEvents, KvTier, TenantNo};

use crate::report::Violation;

/// A follower of one member.
#[derive(Default)]
pub(crate) struct Follower {
    /// What it was told in the reign, if the member leads.
    told: Option<(Reign, KvEvents)>,
    found: BTreeSet<(Vec<u8>, KvTier)>,
}

impl Follower {
    /// Tells it what has changed; returns how many events there were.
    pub(crate) fn tell(&mut self, member: &mut Member) -> u64 {
        let Some(reign) = member.leads().map(|(reign, _)| reign) else {
            self.told = None;
            return 0;
        };
        let Some(master) = member.master_mut() else { return 0 };
        let (found, mut count) = (&mut self.found, 0);
        let mut take = |event: KvEvent<'_>| {
            let place = (event.key.to_vec(), event.tier);
            let is_new = if event.stored { found.insert(place) } else { found.remove(&place) };
            count += 1;
            is_new
        };
        if let Some((_, told)) = self.told.as_mut().filter(|(of, _)| *of == reign) {
            told.drain(master, |event| {
                assert!(take(event), "only differences are told: {event:?}");
            })
            .expect("no tenant is removed, and few objects change");
            return count;
        }
        let mut told = KvEvents::new(master);
        let mut cursor = 0;
        loop {
            cursor = told.scan(master, cursor, |event| {
                take(event);
            });
            if cursor == 0 {
                break;
            }
        }
        self.told = Some((reign, told));
        count
    }

    /// Forgets everything when the reign is another one.
    pub(crate) fn begin(&mut self, member: &Member) {
        let reign = member.leads().map(|(reign, _)| reign);
        if reign.is_none() || self.told.as_ref().map(|(of, _)| *of) != reign {
            (self.told, self.found) = (None, BTreeSet::new());
        }
    }

    /// Compares what was told with what a scan finds, and with the objects that the master lists.
    pub(crate) fn check(&mut self, member: &mut Member) -> Result<(), Violation> {
        let Some((_, told)) = &mut self.told else { return Ok(()) };
        let Some(master) = member.master_mut() else { return Ok(()) };
        let mut scanned = BTreeSet::new();
        let mut cursor = 0;
        loop {
            cursor = told.scan(master, cursor, |event| {
                scanned.insert((event.key.to_vec(), event.tier));
            });
            if cursor == 0 {
                break;
            }
        }
        if scanned != self.found {
            let wrong: Vec<_> = scanned.symmetric_difference(&self.found).take(4).collect();
            return Err(Violation::Told(format!("{:?}: told otherwise: {wrong:?}", member.id())));
        }
        let mut listed = BTreeSet::new();
        let mut query = ListQuery { cursor: 0, limit: 1_000, prefix: Key(b"") };
        loop {
            query.cursor = master.list_of(Instant::ZERO, TenantNo::DEFAULT, &query, |object| {
                if object.complete && object.replicas > 0 {
                    listed.insert(object.key.0.to_vec());
                }
                true
            });
            if query.cursor == 0 {
                break;
            }
        }
        let unlisted = scanned.iter().find(|(key, _)| !listed.contains(key));
        match unlisted {
            Some(place) => {
                Err(Violation::Told(format!("{:?}: told, and not listed: {place:?}", member.id())))
            }
            None => Ok(()),
        }
    }
}
