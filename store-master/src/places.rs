//! Which connection is closed when all places are taken.
//!
//! A new connection is accepted as long as another one can be closed for it: first one that has sent no
//! request, then one that holds nothing, then one that holds something; among these one of the address with
//! the most connections, and of those the one that was silent for the longest time. Clients reconnect by
//! themselves, so closing an idle connection costs little, while a new connection that is refused cannot work
//! at all.
//!
//! A connection with a request in the last second is kept, unless its address has more connections than the
//! new one's would have: an address with many connections can keep all places from further connections of its
//! own, but not from other addresses. Nodes, admins and the Unix socket are kept as long as they have no more
//! than half of the places.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

/// A connection with a request within this time is in use.
const BUSY: Duration = Duration::from_secs(1);

/// Where a connection comes from, as far as different owners can be distinguished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// The Unix socket.
    Unix,
    /// An address; of IPv6 the 64-bit network, which usually has one owner.
    Ip(IpAddr),
}

impl Source {
    pub(crate) fn of(address: IpAddr) -> Self {
        let address = match address.to_canonical() {
            IpAddr::V6(long) => IpAddr::V6((u128::from(long) & !u128::from(u64::MAX)).into()),
            short => short,
        };
        Self::Ip(address)
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix => f.write_str("the Unix socket"),
            Self::Ip(address @ IpAddr::V6(_)) => write!(f, "{address}/64"),
            Self::Ip(address) => address.fmt(f),
        }
    }
}

/// How worthy of a place a connection is, least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// It has sent no complete request yet.
    New,
    /// It holds nothing that would end with it.
    Guest,
    /// It has unfinished puts, or leases.
    Holder,
    /// A node, an admin, or a connection of the Unix socket.
    Kept,
}

/// A connection that could be closed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) index: usize,
    pub(crate) source: Source,
    pub(crate) standing: Standing,
    /// Time since its last request. Zero while it waits for its turn.
    pub(crate) silent: Duration,
}

/// Number of connections per source.
#[derive(Debug, Default)]
pub(crate) struct Sources(HashMap<Source, usize>);

impl Sources {
    pub(crate) fn add(&mut self, source: Source) {
        *self.0.entry(source).or_default() += 1;
    }

    pub(crate) fn remove(&mut self, source: Source) {
        if let Some(count) = self.0.get_mut(&source) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&source);
            }
        }
    }

    fn count(&self, source: Source) -> usize {
        self.0.get(&source).copied().unwrap_or(0)
    }

    /// The connection to close for a new one from `newcomer`, if any. There are `places_max` places.
    pub(crate) fn spare(
        &self,
        newcomer: Source,
        places_max: usize,
        places: impl Iterator<Item = Place> + Clone,
    ) -> Option<usize> {
        let kept = places.clone().filter(|place| place.standing == Standing::Kept).count();
        let mine = self.count(newcomer) + 1;
        places
            .map(|place| match place.standing {
                Standing::Kept if kept > places_max / 2 => Place { standing: Standing::Holder, ..place },
                _ => place,
            })
            .filter(|place| {
                let idle = place.standing == Standing::New || place.silent >= BUSY;
                place.standing != Standing::Kept && (idle || self.count(place.source) > mine)
            })
            .min_by_key(|place| {
                let crowd = self.count(place.source);
                (place.standing, std::cmp::Reverse(crowd), std::cmp::Reverse(place.silent), place.index)
            })
            .map(|place| place.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn ip(last: u8) -> Source {
        Source::of([10, 0, 0, last].into())
    }

    fn spare(newcomer: Source, places: &[(Source, Standing, u64)]) -> Option<usize> {
        let mut sources = Sources::default();
        places.iter().for_each(|(source, ..)| sources.add(*source));
        let places = places.iter().enumerate().map(|(index, &(source, standing, silent_ms))| {
            let silent = MS * u32::try_from(silent_ms).unwrap();
            Place { index, source, standing, silent }
        });
        sources.spare(newcomer, places.len(), places)
    }

    #[test]
    fn connections_without_a_request_are_closed_first_then_those_that_hold_nothing_the_longest_silent_first()
    {
        use Standing::{Guest, Holder, Kept, New};
        let mut places = [
            (ip(1), Holder, 9_000),
            (ip(1), Guest, 2_000),
            (ip(1), Guest, 8_000),
            (ip(1), New, 5),
            (ip(1), Kept, 9_999),
        ];
        assert_eq!(spare(ip(1), &places), Some(3));
        places[3].1 = Kept;
        assert_eq!(spare(ip(1), &places[..4]), Some(2));
        places[1].1 = Holder;
        places[2].1 = Holder;
        assert_eq!(spare(ip(1), &places[..4]), Some(0));
    }

    #[test]
    fn a_busy_address_keeps_its_places_only_from_its_own_connections() {
        let places =
            [(ip(1), Standing::Guest, 10), (ip(1), Standing::Guest, 20), (ip(2), Standing::Guest, 0)];
        assert_eq!(spare(ip(1), &places), None);
        // An address with fewer connections: the one that was silent for longer is closed.
        assert_eq!(spare(ip(3), &places), Some(1));
        // An address that would have as many connections.
        assert_eq!(spare(ip(2), &places), None);
        assert_eq!(spare(Source::Unix, &places), Some(1));
    }

    #[test]
    fn a_connection_of_the_address_with_the_most_connections_is_closed() {
        let idle = 60_000;
        let places = [
            (ip(1), Standing::Guest, 3 * idle),
            (ip(2), Standing::Guest, idle),
            (ip(2), Standing::Guest, 2 * idle),
        ];
        assert_eq!(spare(ip(3), &places), Some(2));
    }

    #[test]
    fn nodes_and_admins_are_kept_unless_they_have_more_than_half_of_the_places() {
        let (kept, guest) = (Standing::Kept, Standing::Guest);
        let long = 60_000;
        assert_eq!(spare(ip(1), &[(ip(1), kept, long), (ip(1), guest, 1)]), None);
        assert_eq!(spare(ip(1), &[(ip(1), kept, long), (ip(1), kept, long + 1), (ip(1), guest, 1)]), Some(1));
    }

    #[test]
    fn one_owner_of_a_network_of_ipv6_is_one_source() {
        let of = |text: &str| Source::of(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }
}
