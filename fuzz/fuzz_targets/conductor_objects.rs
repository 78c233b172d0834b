//! Keys of objects in a store: what is read of a key is a part of it.
#![no_main]

use conductor_core::events::ObjectKey;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Some(key) = ObjectKey::parse(text) else { return };
    for part in [key.prefix, key.model, key.component].into_iter().flatten() {
        assert!(text.contains(part));
    }
    // A name in front of a key is a part of the model or of what stands in front of it, never of the hash.
    if key.model.is_some()
        && let Some(longer) = ObjectKey::parse(&format!("name-{text}"))
    {
        assert_eq!((longer.hash, longer.tp_rank, longer.layout), (key.hash, key.tp_rank, key.layout));
    }
});
