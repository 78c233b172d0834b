//! The mailbox under loom: every interleaving and every reordering that the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p te-core --release --test loom_mailbox`
#![cfg(loom)]

use loom::sync::Arc;
use loom::thread;
use te_core::Mailbox;

#[test]
fn an_item_is_whole_when_it_arrives() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::new(2));
        let producer = {
            let mailbox = mailbox.clone();
            thread::spawn(move || mailbox.push(Box::new(7u32)).expect("room"))
        };
        // The wait is here and not in `join`, which would order the two threads and hide a missing Acquire.
        let item = loop {
            match mailbox.pop() {
                Some(item) => break item,
                None => thread::yield_now(),
            }
        };
        assert_eq!(*item, 7);
        producer.join().expect("producer");
        assert!(mailbox.pop().is_none());
    });
}

#[test]
fn two_producers_never_share_a_slot() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let mailbox = Arc::new(Mailbox::new(2));
        let producers: Vec<_> = (1..=2u32)
            .map(|item| {
                let mailbox = mailbox.clone();
                thread::spawn(move || mailbox.push(item).expect("room for both"))
            })
            .collect();
        let mut sum = 0;
        for _ in 0..2 {
            sum += loop {
                match mailbox.pop() {
                    Some(item) => break item,
                    None => thread::yield_now(),
                }
            };
        }
        assert_eq!(sum, 3);
        for producer in producers {
            producer.join().expect("producer");
        }
    });
}

#[test]
fn a_slot_is_empty_before_it_is_filled_again() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let mailbox = Arc::new(Mailbox::new(2));
        mailbox.push(1u32).expect("room");
        mailbox.push(2).expect("room");
        let producer = {
            let mailbox = mailbox.clone();
            // Succeeds only when the consumer has freed the first slot.
            thread::spawn(move || mailbox.push(3).is_ok())
        };
        let mut sum = mailbox.pop().expect("the first");
        let pushed = producer.join().expect("producer");
        while let Some(item) = mailbox.pop() {
            sum += item;
        }
        assert_eq!(sum, if pushed { 6 } else { 3 });
    });
}
