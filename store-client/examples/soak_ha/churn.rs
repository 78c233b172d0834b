//! Load that is not audited: it fills the memory and the disks, so that there are evictions all the time.
//! What it reads is verified nevertheless.

use std::sync::Arc;
use std::time::Duration;

use store_client::{Client, PutOptions, Store as _};
use te_core::testkit::Rng;

use super::content;
use super::ledger::Read;
use super::shared::Shared;

/// The number of its client, which no writer has.
const WHO: u64 = 0xffff;
/// Least length of an object, bytes.
const BYTES: usize = 48 << 10;
/// Its latest objects, some of which it reads.
const RECENT: u64 = 2_000;

/// Puts `fill` bytes at once, and then so many bytes per second, at most.
pub(crate) fn run(mut client: Client, mut rng: Rng, mut fill: u64, bytes_per_s: u64, shared: &Arc<Shared>) {
    let pause = Duration::from_secs_f64(BYTES as f64 * 1.5 / bytes_per_s as f64);
    for id in 0.. {
        if shared.is_over() {
            return;
        }
        let value = content::value(WHO, id, 1, BYTES);
        match client.put(&key(id), value.as_slice(), &PutOptions::DEFAULT) {
            Ok(_) => shared.count("churn_puts", 1),
            Err(_) => shared.count("churn_put_errors", 1),
        };
        fill = fill.saturating_sub(value.len() as u64);
        if fill > 0 {
            continue;
        }
        shared.set("filled", 1);
        let back = rng.below(RECENT.min(id + 1));
        match client.get(&key(id - back)) {
            Ok(found) => match content::read(WHO, id - back, BYTES, found.as_deref()) {
                Read::Miss => shared.count("churn_misses", 1),
                Read::Value { version: 1, intact: true } => shared.count("churn_hits", 1),
                Read::Value { .. } => {
                    shared.complain("wrong", &format!("bytes of object {} of the load", id - back));
                    0
                }
            },
            Err(_) => shared.count("churn_get_errors", 1),
        };
        std::thread::sleep(pause);
    }
}

fn key(id: u64) -> Vec<u8> {
    format!("churn/{id}").into_bytes()
}
