//! Contexts and instances that come and go.

use core::time::Duration;

use alloc::format;
use alloc::string::String;

use te_core::Instant;

use super::*;
use crate::events::Dialect;

fn engine(instance: &str, model: &str) -> Registration {
    Registration {
        instance: instance.into(),
        tenant: "t".into(),
        model: model.into(),
        block_tokens: 4,
        lora: None,
        salt: None,
        dp_rank: 0,
        dialect: Dialect::Vllm,
        role: Role::Engine,
    }
}

fn at(seconds: u64) -> Instant {
    Instant::ZERO + Duration::from_secs(seconds)
}

fn models(knowledge: &Knowledge) -> Vec<String> {
    knowledge.contexts().map(|(_, context)| context.model.clone()).collect()
}

#[test]
fn ten_thousand_engines_and_models_that_come_and_go_leave_no_memory_behind() {
    let mut knowledge = Knowledge::new(Settings { contexts_max: 16, ..Settings::default() });
    let stays = knowledge.register(engine("stays", "kept")).unwrap();
    let kept = knowledge.context("t", "kept", 4).unwrap();
    for round in 0..10_000 {
        let id = knowledge.register(engine(&format!("i{round}"), &format!("m{round}"))).unwrap();
        assert!(knowledge.unregister(id));
        assert_eq!(knowledge.instance("t", &format!("i{round}")), None);
    }
    assert!(knowledge.contexts.len() <= 16 && knowledge.publishers.len() == 1);
    assert!(knowledge.instances.len() <= NUMBERS_AT_REST + 3, "{} instances", knowledge.instances.len());
    assert_eq!(knowledge.context("t", "kept", 4), Some(kept), "what is in use stays");
    assert_eq!(knowledge.instance_name(knowledge.publishers[&stays].instance), Some(("t", "stays")));
    // So does a snapshot of it.
    let mut bytes = Vec::new();
    knowledge.snapshot(|_| None, &mut bytes);
    let (mut restored, _) = Knowledge::restore(&bytes, knowledge.settings.clone()).unwrap();
    assert_eq!((models(&restored), restored.gone.len()), (models(&knowledge), knowledge.gone.len()));
    for round in 0..2_000 {
        let id = restored.register(engine(&format!("i{round}"), &format!("m{round}"))).unwrap();
        restored.unregister(id);
    }
    assert!(restored.instances.len() <= NUMBERS_AT_REST + 3 && restored.contexts.len() <= 16);
    assert_eq!(restored.context("t", "kept", 4), Some(kept));
}

#[test]
fn the_context_that_was_idle_for_the_longest_time_makes_room_and_idle_ones_are_freed_in_time() {
    let idle = Duration::from_secs(60);
    let mut knowledge =
        Knowledge::new(Settings { contexts_max: 2, context_idle: idle, ..Settings::default() });
    let a = knowledge.register(engine("one", "a")).unwrap();
    let b = knowledge.register(engine("one", "b")).unwrap();
    assert_eq!(knowledge.register(engine("one", "c")), Err(RegisterError::Full("contexts_max")));
    knowledge.unregister(b);
    knowledge.tick(at(1), 100);
    knowledge.unregister(a);
    knowledge.tick(at(2), 100);
    knowledge.register(engine("one", "c")).unwrap();
    assert_eq!(models(&knowledge), ["a", "c"], "b was idle for longer");
    // An engine that is back in time finds what is known.
    knowledge.tick(at(50), 100);
    let a = knowledge.register(engine("one", "a")).unwrap();
    knowledge.tick(at(70), 100);
    assert_eq!(models(&knowledge), ["a", "c"]);
    knowledge.unregister(a);
    knowledge.tick(at(80), 100);
    knowledge.tick(at(139), 100);
    assert_eq!(models(&knowledge), ["a", "c"]);
    knowledge.tick(at(140), 100);
    assert_eq!((models(&knowledge), knowledge.context("", "", 0)), (alloc::vec!["c".into()], None));
}
