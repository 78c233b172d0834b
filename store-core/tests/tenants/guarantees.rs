//! Which tenant gives when room is needed for all.

use store_core::message::*;
use store_core::{FullKey, Master, MasterConfig, TenantConfig, TenantNo};
use te_core::testkit::each_seed;

use crate::common::*;

/// A key of the tenant with this number.
fn of(tenant: u16, key: &str) -> FullKey<'_> {
    FullKey { tenant: TenantNo::new(tenant), key: key.as_bytes() }
}

fn guaranteed(name: &str, objects: u64) -> TenantConfig {
    TenantConfig { guaranteed_bytes: objects * GRAIN, ..tenant(name) }
}

#[test]
fn the_tenant_furthest_above_its_guarantee_gives_first_and_none_within_it_gives_for_others() {
    let config = MasterConfig {
        eviction_high_watermark: 1.0,
        ..config(&[guaranteed("a", 4), tenant("b"), tenant("c")])
    };
    let mut master = master_with(16, config);
    let master = &mut master;
    for (tenant, count) in [(1, 6), (2, 7), (3, 3)] {
        (0..count).for_each(|key| {
            store(master, 0, tenant, &key.to_string(), &PLAIN).unwrap();
        });
    }
    let objects = |master: &Master| ["a", "b", "c"].map(|name| usage(master, name).objects);
    assert_eq!(objects(master), [6, 7, 3], "full");
    let mut seen = Vec::new();
    for key in 100..108 {
        store(master, 1, 3, &key.to_string(), &PLAIN).unwrap();
        seen.push(objects(master));
    }
    // Above their guarantees: 2, 7 and 3 to begin with; always the first of the highest gives.
    let expected: Vec<[u64; 3]> =
        [[6, 6, 4], [6, 5, 5]].into_iter().chain(std::iter::repeat_n([6, 4, 6], 6)).collect();
    assert_eq!(seen, expected);
    // Now tenant a puts: it is above its guarantee, but not the furthest.
    for (key, expected) in (200..205).zip([[7, 4, 5], [8, 4, 4], [8, 4, 4], [8, 4, 4], [8, 4, 4]]) {
        store(master, 2, 1, &key.to_string(), &PLAIN).unwrap();
        assert_eq!(objects(master), expected);
    }
}

#[test]
fn a_tenant_within_its_guarantee_evicts_its_own_objects_only_when_no_tenant_is_above() {
    let config = MasterConfig {
        eviction: store_core::EvictionPolicy::Lru,
        eviction_high_watermark: 0.5,
        eviction_ratio: 0.1,
        ..config(&[guaranteed("a", 8), guaranteed("b", 8)])
    };
    let mut master = master_with(8, config);
    let master = &mut master;
    for key in ["1", "2", "3", "4"] {
        store(master, 0, 1, key, &PLAIN).unwrap();
        store(master, 0, 2, key, &PLAIN).unwrap();
    }
    master.handle_timeout(at(1));
    assert_eq!(master.stats().objects, 8, "the watermark takes nothing from a tenant within its guarantee");
    store(master, 2, 1, "5", &PLAIN).unwrap();
    assert_eq!(present(master, 1, &["1", "2", "3", "4", "5"]), [false, true, true, true, true]);
    assert_eq!(present(master, 2, &["1", "2", "3", "4"]), [true; 4]);
}

#[test]
fn a_tenant_that_has_nothing_to_give_is_passed_over() {
    let config = MasterConfig {
        eviction_high_watermark: 1.0,
        hard_pin_share_max: 1.0,
        ..config(&[tenant("a"), tenant("b")])
    };
    let mut master = master_with(8, config);
    let master = &mut master;
    for key in ["1", "2", "3"] {
        store(master, 0, 1, key, &HARD).unwrap();
        store(master, 0, 1, &format!("leased {key}"), &PLAIN).unwrap();
        master
            .get(at(0), FullKey { tenant: TenantNo::new(1), key: format!("leased {key}").as_bytes() })
            .unwrap();
    }
    store(master, 0, 2, "1", &PLAIN).unwrap();
    store(master, 0, 2, "2", &PLAIN).unwrap();
    store(master, 1, 2, "3", &PLAIN).unwrap();
    assert_eq!(usage(master, "b").objects, 2, "the other tenant has more, but nothing that could be evicted");
    store(master, 6_000, 2, "4", &PLAIN).unwrap();
    assert_eq!((usage(master, "a").objects, usage(master, "b").objects), (5, 3), "its leases are over");
}

/// Two tenants that put, read, pin and remove at random, in a pool that is too small for both. After each
/// step the usage is compared with the objects that exist, and the tenant within its guarantee has lost
/// nothing.
#[test]
fn a_tenant_within_its_guarantee_loses_nothing_whatever_another_does() {
    const POOL: u64 = 64;
    for seed in each_seed(0..40) {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut draw = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let policy = store_core::EvictionPolicy::ALL[seed as usize % 4];
        let config = MasterConfig {
            eviction: policy,
            eviction_high_watermark: 0.9,
            hard_pin_share_max: 0.25,
            node_ttl_ms: 86_400_000,
            ..config(&[guaranteed("modest", 16), tenant("greedy")])
        };
        let mut master = master_with(POOL, config);
        let mut modest: Vec<String> = Vec::new();
        let mut ms = 0;
        let mut puts = 0;
        for step in 0..3_000u64 {
            ms += draw(40);
            let key = format!("{step}");
            match draw(10) {
                0..=5 => {
                    let options = match draw(4) {
                        0 => HARD,
                        1 => PutOptions {
                            retention: Retention { pin: Pin::Soft, ..Retention::DEFAULT },
                            ..PLAIN
                        },
                        2 => PutOptions {
                            retention: Retention { group: Some(draw(5)), ..Retention::DEFAULT },
                            ..PLAIN
                        },
                        _ => PLAIN,
                    };
                    let _ = store(&mut master, ms, 2, &key, &options);
                    if draw(3) == 0 {
                        let _ = master.get(at(ms), of(2, &key));
                    }
                }
                6 => {
                    if modest.len() == 16 {
                        let gone = modest.swap_remove(draw(16) as usize);
                        master.remove(at(ms), of(1, &gone), RemoveMode::Force).unwrap();
                    }
                    if store(&mut master, ms, 1, &key, &PLAIN).is_ok() {
                        modest.push(key);
                        puts += 1;
                    }
                    // When everything that the other tenant has is leased, pinned or being written, this one
                    // evicts its own objects.
                    modest.retain(|key| master.exists(of(1, key)));
                }
                7 => {
                    let _ = master.put_start(at(ms), of(2, &key), GRAIN, &PLAIN);
                }
                8 if !modest.is_empty() => {
                    let key = &modest[draw(modest.len() as u64) as usize];
                    master.get(at(ms), of(1, key)).unwrap();
                }
                _ => master.handle_timeout(at(ms)),
            }
            for key in &modest {
                let there = master.exists(of(1, key));
                assert!(there, "seed {seed}, step {step}: {key} was evicted for the other tenant");
            }
            assert_eq!(usage(&master, "modest").bytes, modest.len() as u64 * GRAIN);
            let stats = master.stats();
            let booked: u64 = master.tenants().map(|usage| usage.bytes + usage.held_bytes).sum();
            assert_eq!(booked, stats.used_bytes, "seed {seed}, step {step}");
        }
        assert!(puts > 20, "seed {seed}: the modest tenant was starved, {puts} puts");
    }
}
