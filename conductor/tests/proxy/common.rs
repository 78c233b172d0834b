//! Engines, a placement without knowledge, a proxy in front of them, and a client.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use conductor::mock::{Flavor, MockConfig, MockEngine, Role};
use conductor::proxy::{
    Ask, ConnectionLimits, Engine, Handover, Limits, Message, Place, Placed, Pool, Progress, Proxy, Refused,
    Reservation, serve,
};
use conductor_core::InstanceId;
use hyper::StatusCode;
use hyper::body::Bytes;
use hyper::header::HeaderMap;
use serde_json::Value;
use tokio::sync::watch;

/// In turn, past engines that failed. It checks that every reservation ends once.
#[derive(Debug)]
pub(crate) struct Turns {
    prefill: Vec<Engine>,
    decode: Vec<Engine>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    open: Vec<Reservation>,
    suspected: Vec<InstanceId>,
    refuse: Option<Refused>,
    /// What was reported, in order.
    pub(crate) reports: Vec<(Reservation, Progress)>,
    /// Lengths of the prompts.
    pub(crate) lengths: Vec<usize>,
}

impl Turns {
    pub(crate) fn new(prefill: &[&MockEngine], decode: &[&MockEngine]) -> Self {
        let engine = |at: usize, engine: &MockEngine| Engine {
            instance: InstanceId(at as u32),
            pool: Arc::new(Pool::new(&engine.http().to_string()).unwrap()),
            handover: match engine.config().flavor {
                Flavor::Sglang => Handover::Bootstrap {
                    host: engine.http().ip().to_string().into(),
                    port: engine.http().port(),
                },
                _ => Handover::KvTransferParams,
            },
        };
        let both = prefill.is_empty();
        let decode: Vec<_> = decode.iter().enumerate().map(|(at, one)| engine(at, one)).collect();
        let prefill = match both {
            true => decode.clone(),
            false => prefill.iter().enumerate().map(|(at, one)| engine(100 + at, one)).collect(),
        };
        Self { prefill, decode, state: Mutex::default() }
    }

    pub(crate) fn refuse(&self, refused: Option<Refused>) {
        self.state.lock().unwrap().refuse = refused;
    }

    pub(crate) fn open(&self) -> usize {
        self.state.lock().unwrap().open.len()
    }

    pub(crate) fn reports(&self) -> Vec<(Reservation, Progress)> {
        self.state.lock().unwrap().reports.clone()
    }

    pub(crate) fn lengths(&self) -> Vec<usize> {
        self.state.lock().unwrap().lengths.clone()
    }
}

impl Place for Turns {
    fn decide(&self, ask: &Ask<'_>) -> Result<Placed, Refused> {
        let mut state = self.state.lock().unwrap();
        if let Some(refused) = state.refuse {
            return Err(refused);
        }
        if ask.model != "mock" {
            return Err(Refused::NoModel);
        }
        state.next += 1;
        let reservation = state.next;
        let usable = |engines: &[Engine]| {
            let alive = |engine: &&Engine| !state.suspected.contains(&engine.instance);
            let alive: Vec<_> = engines.iter().filter(alive).collect();
            let fresh = alive.iter().filter(|engine| !ask.avoid.contains(&engine.instance));
            let fresh: Vec<_> = fresh.copied().collect();
            let among = if fresh.is_empty() { alive } else { fresh };
            (!among.is_empty()).then(|| among[reservation as usize % among.len()].clone())
        };
        let decode = usable(&self.decode).ok_or(Refused::NoEngine)?;
        let prefill = match self.prefill[0].instance == self.decode[0].instance {
            true => decode.clone(),
            false => usable(&self.prefill).ok_or(Refused::NoEngine)?,
        };
        state.open.push(reservation);
        state.lengths.push(ask.tokens.len());
        Ok(Placed { reservation, prefill, decode, ttft: Duration::from_millis(1), reused_tokens: 0 })
    }

    fn report(&self, reservation: Reservation, progress: Progress) {
        let mut state = self.state.lock().unwrap();
        state.reports.push((reservation, progress));
        let at = state.open.iter().position(|&open| open == reservation);
        let at = at.unwrap_or_else(|| panic!("{progress:?} of {reservation}, which has ended"));
        if matches!(progress, Progress::Done | Progress::Failed) {
            state.open.swap_remove(at);
        }
    }

    fn suspect(&self, instance: InstanceId) {
        self.state.lock().unwrap().suspected.push(instance);
    }

    fn tokenizer(&self, _: &str) -> Option<Engine> {
        let state = self.state.lock().unwrap();
        let mut all = self.decode.iter().chain(&self.prefill);
        all.find(|engine| !state.suspected.contains(&engine.instance)).cloned()
    }

    fn models(&self) -> Vec<String> {
        vec!["mock".to_owned()]
    }
}

/// A proxy in front of engines.
pub(crate) struct Front {
    pub(crate) addr: SocketAddr,
    pub(crate) place: Arc<Turns>,
    pub(crate) proxy: Proxy<Turns>,
    _stop: watch::Sender<bool>,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for Front {
    fn drop(&mut self) {
        self.server.abort();
    }
}

pub(crate) fn front(prefill: &[&MockEngine], decode: &[&MockEngine], limits: Limits) -> Front {
    front_with(prefill, decode, limits, ConnectionLimits::default())
}

pub(crate) fn front_with(
    prefill: &[&MockEngine],
    decode: &[&MockEngine],
    limits: Limits,
    connections: ConnectionLimits,
) -> Front {
    let place = Arc::new(Turns::new(prefill, decode));
    let proxy = Proxy::new(Arc::clone(&place), limits);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let (stop, stopped) = watch::channel(false);
    let answering = proxy.clone();
    let server = tokio::spawn(async move {
        let answer = move |request, _| {
            let proxy = answering.clone();
            async move { proxy.answer(request).await }
        };
        serve(listener, connections, stopped, answer).await.unwrap();
    });
    Front { addr, place, proxy, _stop: stop, server }
}

pub(crate) fn quick(role: Role, flavor: Flavor) -> MockConfig {
    MockConfig { role, flavor, speed: 0.0, ..MockConfig::default() }
}

pub(crate) fn start(config: MockConfig) -> MockEngine {
    MockEngine::start(config).unwrap()
}

/// Sends a request, and returns the status, the headers and the body.
pub(crate) async fn post(
    addr: SocketAddr,
    path: &str,
    body: impl Into<String>,
) -> (StatusCode, HeaderMap, String) {
    let pool = Pool::new(&addr.to_string()).unwrap();
    let (body, headers) = (Bytes::from(body.into()), HeaderMap::new());
    let message = Message { path, body: Some(&body), headers: &headers };
    let mut exchange = pool.send(message, Duration::from_secs(60)).await.unwrap();
    let body = exchange.collect(16 << 20).await.unwrap();
    (exchange.status(), exchange.headers().clone(), String::from_utf8(body.into()).unwrap())
}

/// What a client reads out of a stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Read {
    pub(crate) text: String,
    pub(crate) finish: Vec<String>,
    pub(crate) ids: Vec<String>,
    pub(crate) objects: Vec<String>,
    pub(crate) roles: usize,
    pub(crate) usage: Option<Value>,
    pub(crate) error: Option<Value>,
    pub(crate) is_done: bool,
}

pub(crate) fn read(stream: &str) -> Read {
    let mut read = Read::default();
    for event in stream.split_terminator("\n\n") {
        let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?}"));
        assert!(!read.is_done, "after [DONE]: {event}");
        if data == "[DONE]" {
            read.is_done = true;
            continue;
        }
        let chunk: Value = serde_json::from_str(data).unwrap();
        if let Some(error) = chunk.get("error") {
            read.error = Some(error.clone());
            continue;
        }
        let once = |all: &mut Vec<String>, value: &Value| {
            let value = value.as_str().unwrap_or_default().to_owned();
            if !all.contains(&value) {
                all.push(value);
            }
        };
        once(&mut read.ids, &chunk["id"]);
        once(&mut read.objects, &chunk["object"]);
        if let Some(usage) = chunk.get("usage").filter(|usage| !usage.is_null()) {
            read.usage = Some(usage.clone());
        }
        for choice in chunk["choices"].as_array().unwrap() {
            let text = choice.get("text").or_else(|| choice.get("delta")?.get("content"));
            read.text.push_str(text.and_then(Value::as_str).unwrap_or_default());
            read.roles += usize::from(choice.pointer("/delta/role").is_some());
            read.finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
        }
    }
    read
}
