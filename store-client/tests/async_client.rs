//! The asynchronous client, with an executor of a few lines and with tokio.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use common::{client, master, node, pattern};
use store_client::{AsyncClient, ErrorCode, PutOptions, RemoveMode, SharedPart, StoreError};

const ONE: PutOptions = PutOptions::DEFAULT;

/// The waker of a minimal executor.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

/// Polls all of them until each is ready.
async fn all<F: Future + Unpin>(mut futures: Vec<F>) -> Vec<F::Output> {
    let mut outputs: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, output) in futures.iter_mut().zip(&mut outputs) {
            if output.is_none()
                && let Poll::Ready(value) = std::pin::Pin::new(future).poll(context)
            {
                *output = Some(value);
            }
        }
        if outputs.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

async fn everything(client: &AsyncClient) {
    let value = pattern(1, 200_000);
    assert!(client.put(b"k", value.clone(), &ONE).await.unwrap());
    assert!(!client.put(b"k", vec![1], &ONE).await.unwrap());
    assert!(client.exists(b"k").await.unwrap());
    assert_eq!(client.get(b"k").await.unwrap().as_ref(), Some(&value));
    assert_eq!(client.get(b"absent").await.unwrap(), None);
    assert_eq!(
        client.get_range(b"k", 65_000..66_000).await.unwrap().as_deref(),
        Some(&value[65_000..66_000])
    );
    let empty = client.get_range(b"k", 5..5).await.map_err(|error| error.code());
    assert_eq!(empty, Err(ErrorCode::InvalidParams));

    let region = client.alloc(400_000).await.unwrap();
    let parts = vec![SharedPart::part(&region, 200_000, 50_000), SharedPart::part(&region, 0, 150_000)];
    assert_eq!(client.get_into(b"k", .., parts.clone()).await.unwrap(), Some(200_000));
    assert!(client.put(b"l", parts, &ONE).await.unwrap());
    assert!(client.put(b"m", vec![vec![1; 10], vec![], vec![2; 5]], &ONE).await.unwrap());
    assert_eq!(client.get(b"l").await.unwrap(), Some(value));
    assert_eq!(client.get(b"m").await.unwrap().map(|value| value.len()), Some(15));
    let outside = client.get_into(b"k", .., vec![SharedPart::part(&region, 399_999, 2)]).await;
    assert_eq!(outside.map_err(|error| error.code()), Err(ErrorCode::InvalidParams));
    client.unregister(region).await.unwrap();
    for key in [b"k", b"l", b"m"] {
        assert!(client.remove(key, RemoveMode::Force).await.unwrap());
        assert!(!client.remove(key, RemoveMode::Force).await.unwrap());
    }
    assert!(client.counters().await.unwrap().hits >= 5);
}

#[test]
fn every_operation_works_on_a_bare_executor() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let client = AsyncClient::start(client(master.rpc_addr())).unwrap();
    block_on(everything(&client));
    client.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_operation_works_under_tokio_and_tasks_share_a_client() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let client = AsyncClient::start(client(master.rpc_addr())).unwrap();
    everything(&client).await;
    let tasks: Vec<_> = (0..200_u64)
        .map(|task| {
            let client = client.clone();
            tokio::spawn(async move {
                let (key, value) = (format!("task-{task}"), pattern(task, 1000 + task as usize));
                assert!(client.put(key.as_bytes(), value.clone(), &ONE).await.unwrap());
                assert_eq!(client.get(key.as_bytes()).await.unwrap(), Some(value));
                assert!(client.remove(key.as_bytes(), RemoveMode::Force).await.unwrap());
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let counters = client.counters().await.unwrap();
    assert_eq!((counters.put_failures, counters.checksum_mismatches), (0, 0));
}

#[test]
fn more_operations_than_the_queue_holds_wait_for_room() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let client = AsyncClient::with_queue(client(master.rpc_addr()), 2).unwrap();
    block_on(async {
        let puts = (0..100_u8).map(|key| client.put([key], vec![key; 100], &ONE)).collect();
        assert!(all(puts).await.into_iter().all(|stored| stored.unwrap()));
        let gets = (0..100_u8).map(|key| client.get([key])).collect();
        for (key, value) in all(gets).await.into_iter().enumerate() {
            assert_eq!(value.unwrap(), Some(vec![key as u8; 100]));
        }
    });
}

#[test]
fn an_operation_that_fails_does_so_alone() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let client = AsyncClient::start(client(master.rpc_addr())).unwrap();
    let two = PutOptions { replicas: 200, ..ONE };
    block_on(async {
        let too_many = vec![vec![1]; store_client::PARTS_MAX + 1];
        let puts = vec![
            client.put(b"a", vec![1; 10], &ONE),
            client.put(b"", vec![1; 10], &ONE),
            client.put(b"b", Vec::<u8>::new(), &ONE),
            client.put(b"c", too_many, &ONE),
            client.put(b"d", vec![1; 10], &two),
            client.put(b"e", vec![1; 10], &ONE),
        ];
        let results: Vec<_> =
            all(puts).await.into_iter().map(|result| result.map_err(|error| error.code())).collect();
        let wrong = Err(ErrorCode::InvalidParams);
        assert_eq!(results, [Ok(true), Err(ErrorCode::InvalidKey), wrong, wrong, wrong, Ok(true)]);
    });
}

#[test]
fn a_dropped_future_does_not_touch_its_buffers_once_another_operation_has_them() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let client = AsyncClient::start(client(master.rpc_addr())).unwrap();
    block_on(async {
        let region = client.alloc(1 << 20).await.unwrap();
        for key in 0..4_u8 {
            assert!(client.put([key], vec![key; 1 << 20], &ONE).await.unwrap());
        }
        for round in 0..50_u8 {
            let (dropped, kept) = (round % 4, (round + 1) % 4);
            let mut read = client.get_into([dropped], .., vec![SharedPart::all(&region)]);
            let begun = std::future::poll_fn(|context| {
                Poll::Ready(std::pin::Pin::new(&mut read).poll(context).is_pending())
            });
            begun.await;
            drop(read);
            assert_eq!(
                client.get_into([kept], .., vec![SharedPart::all(&region)]).await.unwrap(),
                Some(1 << 20)
            );
            let mut found = vec![0; 1 << 20];
            region.read(0, &mut found).unwrap();
            assert!(found.iter().all(|byte| *byte == kept), "round {round}");
        }
        // The region is dropped here; a read into it may still wait.
        let mut read = client.get_into([0], .., vec![SharedPart::all(&region)]);
        std::future::poll_fn(|context| Poll::Ready(std::pin::Pin::new(&mut read).poll(context).is_pending()))
            .await;
        drop((read, region));
        assert!(client.exists([0]).await.unwrap());
    });
}

#[test]
fn the_thread_ends_with_the_last_handle_and_the_remaining_futures_get_an_error() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let client = AsyncClient::start(client(master.rpc_addr())).unwrap();
    let put = client.put(b"k", vec![1; 10], &ONE);
    drop(client);
    assert!(matches!(block_on(put), Err(StoreError::Stopped)));
}
