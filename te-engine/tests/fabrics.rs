//! The registry of fabrics, and the setting that chooses among them.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

use te_engine::{Fabrics, UnknownFabric, fabrics};

#[test]
fn the_registry_is_in_the_order_of_the_tiers_and_no_name_is_there_twice() {
    assert!(fabrics().is_sorted_by_key(|entry| entry.tier));
    for (nth, entry) in fabrics().iter().enumerate() {
        assert!(fabrics()[..nth].iter().all(|before| before.name != entry.name), "{}", entry.name);
        assert!(entry.name.bytes().all(|byte| byte.is_ascii_lowercase()), "{}", entry.name);
        assert!(!entry.about.is_empty() && !entry.about.ends_with('.'), "{}", entry.about);
        for (nth, need) in entry.needs.iter().enumerate() {
            assert!(!entry.needs[..nth].contains(need), "{}: {need:?} twice", entry.name);
        }
    }
}

#[test]
fn a_fabric_is_built_by_the_feature_of_its_name() {
    let built = |name| fabrics().iter().any(|entry| entry.name == name && entry.is_built());
    assert!(built("local") && built("shm"));
    assert_eq!(built("rdma"), cfg!(feature = "rdma"));
    assert_eq!(built("tcp"), cfg!(feature = "tcp"));
    assert_eq!(built("cxl"), cfg!(feature = "cxl"));
    assert_eq!(built("nvmeof"), cfg!(feature = "nvmeof"));
}

#[test]
fn fabrics_are_read_as_they_are_written() {
    let two = Fabrics::LOCAL.and(Fabrics::SHM);
    for fabrics in [Fabrics::AUTO, Fabrics::NONE, Fabrics::LOCAL, Fabrics::SHM, two, two.and(Fabrics::AUTO)] {
        assert_eq!(fabrics.to_string().parse(), Ok(fabrics));
    }
    assert_eq!(" shm, local".parse(), Ok(two), "in any order");
    assert_eq!(two.to_string(), "local,shm", "the nearest first");
    assert_eq!(Fabrics::AUTO.and(Fabrics::SHM).to_string(), "auto,shm");
    assert_eq!(Fabrics::default(), Fabrics::AUTO);
}

#[test]
fn auto_uses_what_is_built_and_a_name_is_used_in_any_case() {
    for entry in fabrics() {
        assert_eq!(Fabrics::AUTO.uses(entry), entry.is_built() && entry.auto, "{}", entry.name);
        assert!(Fabrics::of(entry).uses(entry) && !Fabrics::NONE.uses(entry), "{}", entry.name);
    }
    assert!(Fabrics::AUTO.and(Fabrics::SHM).is_auto() && !Fabrics::SHM.is_auto());
}

#[test]
fn every_fabric_of_this_build_is_read_and_the_error_for_others_says_how_to_build_them() {
    for entry in fabrics() {
        let read = entry.name.parse::<Fabrics>();
        match entry.is_built() {
            true => assert_eq!(read, Ok(Fabrics::of(entry))),
            false => assert_eq!(
                read.unwrap_err().to_string(),
                format!("this build lacks {0}: build with --features {0}", entry.name)
            ),
        }
        assert_eq!(Fabrics::of(entry).named().map(|entry| entry.name).collect::<Vec<_>>(), [entry.name]);
    }
    assert_eq!(
        [Fabrics::LOCAL, Fabrics::SHM, Fabrics::RDMA, Fabrics::TCP].map(|one| one.to_string()),
        ["local", "shm", "rdma", "tcp"]
    );
}

#[test]
fn an_unknown_name_is_answered_with_those_of_this_build() {
    let refused = "shm,pigeon".parse::<Fabrics>().unwrap_err();
    assert_eq!(refused, UnknownFabric::Unknown("pigeon".into()));
    let text = refused.to_string();
    assert!(text.contains("\"pigeon\"") && text.contains("auto") && text.contains("local,shm"), "{text}");
    assert_eq!(text.contains("tcp"), cfg!(feature = "tcp"), "{text}");
}
