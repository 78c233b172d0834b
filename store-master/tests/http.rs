//! Clients of the HTTP port that are silent, slow or do not read: they lose their connection, and other
//! clients are served.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use common::{connect, fill, start, start_with, with};
use store_master::{Config, HttpLimits, MasterHandle};

/// Longest time that anything here may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Limits with the same time for heads and for answers.
fn limits(connections_max: u32, ms_max: u32) -> HttpLimits {
    with(HttpLimits::default(), |limits| {
        limits.connections_max = connections_max;
        limits.head_ms_max = ms_max;
        limits.stall_ms_max = ms_max;
    })
}

/// A master that gives this many clients one second.
fn impatient(connections_max: u32) -> MasterHandle {
    let http = limits(connections_max, 1_000);
    start_with(Config { http, ..common::config() })
}

fn http(master: &MasterHandle) -> SocketAddr {
    master.http_addr().unwrap()
}

/// Requests `/health` on a connection of its own; waits for a place, within `PATIENCE`.
fn assert_healthy(addr: SocketAddr) {
    let mut stream = connect(addr);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 ") && text.contains("\"status\":\"ok\""), "{text}");
}

/// Reads to the end of the connection, which must come.
fn until_the_end(stream: &mut TcpStream) -> String {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => {
            panic!("the connection was not closed: {error}")
        }
        _ => String::from_utf8(bytes).unwrap(),
    }
}

/// Reads one answer of a connection that stays open; returns its status.
fn status(stream: &mut TcpStream) -> u16 {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    stream.read_exact(&mut vec![0; length.parse().unwrap()]).unwrap();
    head[9..12].parse().unwrap()
}

#[test]
fn silent_clients_in_every_place_do_not_keep_others_out_for_long() {
    let master = impatient(4);
    let addr = http(&master);
    // As many again wait for a place.
    let mut silent: Vec<_> = (0..8).map(|_| connect(addr)).collect();
    assert_healthy(addr);
    for stream in &mut silent {
        assert_eq!(until_the_end(stream), "", "there was no request to answer");
    }
    assert_healthy(addr);
    master.stop().unwrap();
}

/// A master that closes no slow connection within the time of a test.
fn patient(connections_max: u32) -> MasterHandle {
    let http = limits(connections_max, 3_600_000);
    start_with(Config { http, ..common::config() })
}

#[test]
fn the_longest_silent_client_is_closed_for_the_next() {
    let master = patient(1);
    let mut first = connect(http(&master));
    first.write_all(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n").unwrap();
    assert_eq!(status(&mut first), 200);
    assert_healthy(http(&master));
    assert_eq!(until_the_end(&mut first), "");
    master.stop().unwrap();
}

#[test]
fn silent_clients_in_every_place_and_the_reserve_delay_no_other_client() {
    let master = patient(256);
    let addr = http(&master);
    let silent: Vec<_> = (0..600).map(|_| connect(addr)).collect();
    (0..20).for_each(|_| assert_healthy(addr));
    // Clients with half a head do not either.
    for mut stream in &silent[400..] {
        stream.write_all(b"GET /health HTTP/1.1\r\nx: y").unwrap();
    }
    (0..20).for_each(|_| assert_healthy(addr));
    drop(silent);
    master.stop().unwrap();
}

#[test]
fn when_all_places_are_busy_health_checks_are_answered_and_other_requests_get_an_error() {
    let master = patient(4);
    let addr = http(&master);
    // Bodies that do not arrive are waited for, for some seconds.
    let head = format!(
        "POST /api/v1/evict HTTP/1.1\r\nhost: {addr}\r\ncontent-type: application/json\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n"
    );
    let mut working = Vec::new();
    for _ in 0..4 {
        let mut stream = connect(addr);
        stream.write_all(head.as_bytes()).unwrap();
        // The body is being read from now on: the route requested it.
        let mut line = [0; 25];
        stream.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"HTTP/1.1 100 Continue\r\n\r\n");
        working.push(stream);
    }
    let mut other = connect(addr);
    write!(other, "GET /metrics HTTP/1.1\r\nhost: {addr}\r\n\r\n").unwrap();
    let answer = until_the_end(&mut other);
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("retry-after: 1"), "{answer}");
    (0..20).for_each(|_| assert_healthy(addr));
    drop(working);
    master.stop().unwrap();
}

#[test]
fn two_hundred_simultaneous_health_checks_are_all_answered() {
    let master = patient(256);
    let addr = http(&master);
    for path in ["/health", "/metrics"] {
        for _ in 0..5 {
            let mut askers: Vec<_> = (0..200).map(|_| connect(addr)).collect();
            for stream in &mut askers {
                write!(stream, "GET {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n\r\n").unwrap();
            }
            for stream in &mut askers {
                let answer = until_the_end(stream);
                assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
            }
        }
    }
    master.stop().unwrap();
}

#[test]
fn a_second_host_no_host_and_a_head_that_is_too_long_are_refused() {
    let master = patient(8);
    let ask = |head: &str| {
        let mut stream = connect(http(&master));
        // The server may close the connection before it has read everything.
        let _ =
            stream.write_all(format!("GET /health HTTP/1.1\r\n{head}connection: close\r\n\r\n").as_bytes());
        until_the_end(&mut stream)
    };
    assert!(ask("host: a\r\n").starts_with("HTTP/1.1 200 "));
    for hosts in ["host: a\r\nhost: b\r\n", "host: a\r\nHost: a\r\n", ""] {
        let answer = ask(hosts);
        assert!(answer.starts_with("HTTP/1.1 400 "), "{hosts:?}: {answer}");
    }
    for bytes in [66 << 10, 100 << 10] {
        let answer = ask(&format!("host: a\r\nx: {}\r\n", "y".repeat(bytes)));
        assert!(!answer.contains(" 200 "), "{bytes} bytes: {answer}");
    }
    // Many short header fields are as long as one.
    let many: String = (0..40).map(|n| format!("x{n}: {}\r\n", "y".repeat(2_000))).collect();
    assert!(ask(&format!("host: a\r\n{many}")).starts_with("HTTP/1.1 431 "));
    master.stop().unwrap();
}

#[test]
fn a_connection_that_is_idle_after_an_answer_loses_its_place() {
    let master = impatient(1);
    let addr = http(&master);
    let mut idle = connect(addr);
    idle.write_all(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n").unwrap();
    assert_eq!(status(&mut idle), 200);
    assert_healthy(addr);
    assert_eq!(until_the_end(&mut idle), "");
    master.stop().unwrap();
}

#[test]
fn a_client_that_does_not_read_its_answers_loses_its_place() {
    let master = impatient(1);
    let addr = http(&master);
    let mut write_blocked = connect(addr);
    // More than the sockets hold: each answer has some 8 KB.
    let ask = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n".repeat(4_000);
    // The master stops reading in the middle of the requests.
    write_blocked.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let _ = write_blocked.write_all(&ask);
    assert_healthy(addr);
    master.stop().unwrap();
}

#[test]
fn half_a_body_is_refused() {
    let master = start();
    fill(master.rpc_addr());
    let addr = http(&master);
    let mut stream = connect(addr);
    write!(
        stream,
        "POST /api/v1/evict HTTP/1.1\r\nhost: {addr}\r\ncontent-type: application/json\r\ncontent-length: 17\r\n\r\n{{\"objects"
    )
    .unwrap();
    let answer = until_the_end(&mut stream);
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert_healthy(addr);
    master.stop().unwrap();
}

#[test]
fn many_requests_follow_one_another_on_a_connection_and_many_connections_on_one_another() {
    let http_limits = with(HttpLimits::default(), |config| config.connections_max = 2);
    let master = start_with(Config { http: http_limits, ..common::config() });
    let addr = http(&master);
    let mut stream = connect(addr);
    for path in ["/health", "/metrics", "/api/v1/status"].iter().cycle().take(60) {
        write!(stream, "GET {path} HTTP/1.1\r\nhost: h\r\n\r\n").unwrap();
        assert_eq!(status(&mut stream), 200, "{path}");
    }
    (0..20).for_each(|_| assert_healthy(addr));
    // The first connection has kept its place all the time.
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n").unwrap();
    assert_eq!(status(&mut stream), 200);
    master.stop().unwrap();
}

#[test]
fn limits_of_zero_are_refused() {
    let none = with(HttpLimits::default(), |config| config.connections_max = 0);
    let error = Config { http: none, ..common::config() }.validate().unwrap_err().to_string();
    assert!(error.contains("http.connections_max"), "{error}");
}

mod timing {
    //! Real time: clients that send and read slowly, and the limit on the time of a head.

    use super::*;

    #[test]
    fn half_a_head_is_given_up_even_if_further_bytes_trickle_in() {
        let master = impatient(2);
        let addr = http(&master);
        let mut still = connect(addr);
        still.write_all(b"GET /health HTTP/1.1\r\nhost: h").unwrap();
        let mut trickling = connect(addr);
        trickling.write_all(b"GET /health HTTP/1.1\r\nx: ").unwrap();
        trickling.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let started = Instant::now();
        let closed = loop {
            // Occasional bytes do not help.
            let sent = trickling.write_all(b"y");
            match trickling.read(&mut [0; 512]) {
                Ok(0) => break true,
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => break true,
            }
            if sent.is_err() || started.elapsed() > PATIENCE {
                break sent.is_err();
            }
        };
        assert!(closed, "a head without an end keeps its place");
        let answer = until_the_end(&mut still);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408 "), "{answer}");
        assert_healthy(addr);
        master.stop().unwrap();
    }

    #[test]
    fn a_slow_but_steady_client_is_served() {
        let master = start();
        let mut stream = connect(http(&master));
        for piece in "GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n".as_bytes().chunks(2) {
            stream.write_all(piece).unwrap();
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut answer = Vec::new();
        let mut byte = [0];
        while stream.read(&mut byte).unwrap() > 0 {
            answer.push(byte[0]);
            std::thread::sleep(Duration::from_millis(2));
        }
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("}\n"), "{answer}");
        master.stop().unwrap();
    }
}
