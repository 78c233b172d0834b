//! A process is killed in the middle of writing. The next one finds what was there.

use crate::bench_disk::{MIB, Owner, directory, format, open};
use crate::common::{Process, say};
use store_client::disk::{DiskFile, Sharing, verify};
use te_core::testkit::pattern;

/// Writes until it is killed, and says which objects are on the disk for more than two syncs.
pub(crate) fn be_writer(role: &[String]) {
    let path = std::path::Path::new(&role[1]);
    let disk = if path.exists() { open(path) } else { format(path, 96 * MIB, 4 << 20) };
    let mut owner = Owner::new(disk);
    // Generations go on where the killed process may have been.
    owner.next = 1 + role[2].parse::<u64>().unwrap();
    say("ready");
    let mut answered = 0;
    for at in 0.. {
        let len = 4_096 + (at * 7_919) % 120_000;
        owner.demote(&format!("key-{}", owner.next), len);
        if at >= 64 {
            owner.demoted(1);
            answered += 1;
            if answered % 50 == 0 {
                say(&format!("answered {answered}"));
            }
        }
    }
}

#[test]
fn a_process_that_is_killed_while_it_writes_loses_no_object_that_was_synced_and_serves_no_wrong_byte() {
    let directory = directory();
    let path = directory.path().join("disk");
    let name = path.to_str().unwrap();
    let mut before = 0;
    for round in 1..=4_u64 {
        let mut writer = Process::start("entry", &["writer", name, &(round * 1_000_000).to_string()]);
        // The kill comes in the middle of whatever is under way after so many answers.
        let wanted = 150 * round;
        crate::common::eventually("objects are written", || {
            let said = writer.says_more();
            let count = said.and_then(|said| said.strip_prefix("answered ")?.parse::<u64>().ok());
            count.is_some_and(|count| count >= wanted)
        });
        writer.kill();

        let mut owner = Owner::new(open(&path));
        let of_round = |generation: u64| generation / 1_000_000 == round;
        let found = owner.places.values().filter(|placed| of_round(placed.generation)).count() as u64;
        // Only a loss of power loses what was answered; not even the last answers are missing after a kill.
        assert!(found >= wanted.min(owner.places.len() as u64), "{found} of {wanted} in round {round}");
        assert!(owner.places.len() as u64 > before.min(wanted));
        for (key, placed) in owner.places.clone() {
            assert_eq!(key, format!("key-{}", placed.generation).into_bytes().into_boxed_slice());
            let bytes = owner.read(&key);
            let right = bytes.is_some_and(|bytes| bytes == pattern(placed.generation, placed.len as usize));
            // Room is made as soon as the disk is open.
            assert!(right || !owner.places.contains_key(&key), "{placed:?}");
        }
        before = owner.places.len() as u64;
        assert!(owner.disk.close(crate::bench_disk::PATIENCE));
        let file =
            DiskFile::open_to_read(&path, crate::bench_disk::caching(&path), Sharing::Readers).unwrap();
        let verified = verify(&file, |_| std::ops::ControlFlow::Continue(())).unwrap();
        assert_eq!((verified.damaged, verified.objects), (0, before), "{:?}", verified.survey.damage);
    }
}
