//! [`Watcher`]: one thread lists and watches EndpointSlices, another one registers what they name, so that an
//! engine that does not answer delays no news about others.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use store_master::kubernetes::{ApiServer, Patience, is_name, refusal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::interval;
use tracing::{debug, info, warn};

use super::slices::{List, Name, Slice, Slices};
use crate::config::{ConfigError, EngineConfig, KubernetesConfig};
use crate::discovery::{self, AskError};
use crate::http::App;
use crate::registry::{self, Positions, RegisterError};
use crate::service::StartError;
use crate::traffic::KubernetesTraffic;

/// Longest time for a page of a list.
const LIST_TIME_MAX: Duration = Duration::from_secs(30);
/// How long a watch lasts, by the API server's clock. Then another one begins where it ended.
const WATCH_S: u32 = 240;
/// Longest silence of a watch: bookmarks come about once per minute.
const SILENCE_MAX: Duration = Duration::from_secs(150);
/// Slices per page of a list.
const PAGE: u32 = 500;
/// Most pages of a list.
const PAGES_MAX: usize = 64;
/// Longest page of a list, and longest event of a watch, bytes.
const LIST_BYTES_MAX: u64 = 256 << 20;
const EVENT_BYTES_MAX: u64 = 4 << 20;
/// Waits before the next list after failures: the first one, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(20));
/// How often the end is looked for during a wait.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// What the service account has to be allowed.
const RIGHTS: &str = "get, list and watch of endpointslices (discovery.k8s.io)";

/// News that wait to be taken.
const NEWS_MAX: usize = 64;
/// How often engines that did not say what was left to them are asked again.
const AGAIN: Duration = Duration::from_secs(2);

/// The threads. Dropping it stops them. The one that reads ends at the next event of its watch at the latest;
/// no caller waits for it.
#[derive(Debug)]
pub(crate) struct Watcher {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts what the settings ask for.
    ///
    /// # Errors
    /// The settings name no namespace, this is no pod, or the system refuses a thread.
    pub(crate) fn start(app: &App) -> Result<Option<Self>, StartError> {
        let config = app.shared.config.kubernetes.clone();
        if config.services.is_empty() {
            return Ok(None);
        }
        let field = "kubernetes.services".to_owned();
        let source = Source::open(&config).map_err(|need| StartError::Config(ConfigError { field, need }))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(StartError::System)?;
        let (stop, mut stopped) = watch::channel(false);
        let (send, news) = mpsc::channel(NEWS_MAX);
        let traffic = app.shared.traffic.kubernetes.clone();
        let reader = Reader { source, send, traffic };
        let spawned = thread::Builder::new().name("snowskin-k8s-read".into()).spawn(move || reader.run());
        spawned.map_err(StartError::System)?;
        let engines = Engines::new(app.clone(), Slices::new(config));
        let work = move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped.wait_for(|stop| *stop) => {}
                    () = engines.follow(news) => {}
                }
            });
            runtime.shutdown_background();
        };
        let thread = thread::Builder::new().name("snowskin-k8s".into()).spawn(work);
        Ok(Some(Self { stop, thread: Some(thread.map_err(StartError::System)?) }))
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the discovery in Kubernetes panicked");
        }
    }
}

/// Where slices are listed and watched.
#[derive(Debug)]
pub(super) struct Source {
    api: ApiServer,
    url: String,
}

impl Source {
    pub(super) fn open(config: &KubernetesConfig) -> Result<Self, String> {
        let (api, namespace) = match config.services.strip_prefix("k8s+http://") {
            Some(rest) => {
                let (host, namespace) = rest.split_once('/').unwrap_or((rest, ""));
                (ApiServer::at(format!("http://{host}")), namespace)
            }
            None => (ApiServer::of_pod()?, config.services.trim_start_matches("k8s://")),
        };
        Self::at(api, namespace.trim_end_matches('/'), &config.selector)
    }

    pub(super) fn at(api: ApiServer, namespace: &str, selector: &str) -> Result<Self, String> {
        if !is_name(namespace, 63) {
            return Err(format!("names the namespace {namespace:?}: give 1 to 63 of a to z, 0 to 9 and `-`"));
        }
        let escaped: String = selector.bytes().map(escape).collect();
        let url = format!(
            "{}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector={escaped}",
            api.address()
        );
        Ok(Self { api, url })
    }

    fn get(&self, query: &str, patience: Patience) -> Result<ureq::http::Response<ureq::Body>, Failure> {
        let url = format!("{}{query}", self.url);
        let failed = |why: String| Failure::Other(format!("{url}: {why}"));
        let mut response = self.api.send("GET", &url, String::new(), patience).map_err(failed)?;
        match response.status().as_u16() {
            200 => Ok(response),
            410 => Err(Failure::Gone),
            status => {
                let body = response.body_mut().with_config().limit(EVENT_BYTES_MAX).read_to_vec();
                Err(failed(refusal(status, &body.unwrap_or_default(), RIGHTS)))
            }
        }
    }

    /// All slices, and the version from which to watch.
    pub(super) fn list(&self) -> Result<(Vec<Slice>, String), Failure> {
        let (mut slices, mut more) = (Vec::new(), String::new());
        for _ in 0..PAGES_MAX {
            let query = format!("&limit={PAGE}{more}");
            let mut response = self.get(&query, Patience::Whole(LIST_TIME_MAX))?;
            let bytes = response.body_mut().with_config().limit(LIST_BYTES_MAX).read_to_vec();
            let bytes = bytes.map_err(|error| Failure::Other(format!("{}: {error}", self.url)))?;
            let list: List = serde_json::from_slice(&bytes)
                .map_err(|error| Failure::Other(format!("{}: not a list: {error}", self.url)))?;
            slices.extend(list.items);
            match list.metadata.more.filter(|token| !token.is_empty()) {
                Some(token) => more = format!("&continue={}", token.bytes().map(escape).collect::<String>()),
                None => return Ok((slices, list.metadata.resource_version)),
            }
        }
        Err(Failure::Other(format!("{}: more than {PAGES_MAX} pages of {PAGE} slices", self.url)))
    }

    /// What changes from a version on.
    pub(super) fn watch(&self, version: &str) -> Result<Watch<impl Read + use<>>, Failure> {
        let version: String = version.bytes().map(escape).collect();
        let query = format!(
            "&watch=true&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={WATCH_S}"
        );
        let response = self.get(&query, Patience::PerRead(SILENCE_MAX))?;
        Ok(Watch { lines: BufReader::new(response.into_body().into_reader()), line: Vec::new() })
    }
}

/// Percent-encodes what is not plain in a query.
fn escape(byte: u8) -> String {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    }
}

/// Why a list or a watch ended.
#[derive(Debug)]
pub(super) enum Failure {
    /// The version is too old (410): list again.
    Gone,
    /// Anything else.
    Other(String),
}

/// A watch: events, one per line.
#[derive(Debug)]
pub(super) struct Watch<R> {
    pub(super) lines: BufReader<R>,
    pub(super) line: Vec<u8>,
}

/// An event.
#[derive(Debug)]
pub(super) enum Event {
    /// A slice is new, or has changed.
    Put(Box<Slice>),
    /// A slice is gone.
    Removed(Box<Slice>),
    /// Nothing changed up to this version.
    Bookmark(String),
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    code: u16,
    message: String,
}

impl<R: Read> Watch<R> {
    /// The next event; `None`: the watch is over.
    ///
    /// # Errors
    /// The version is too old, the connection is lost, or it is not an event.
    pub(super) fn next(&mut self) -> Result<Option<Event>, Failure> {
        let failed = |why: String| Failure::Other(format!("a watch: {why}"));
        self.line.clear();
        let read = (&mut self.lines).take(EVENT_BYTES_MAX).read_until(b'\n', &mut self.line);
        if read.map_err(|error| failed(error.to_string()))? == 0 {
            return Ok(None);
        }
        if self.line.last() != Some(&b'\n') {
            return Err(failed("an event is cut, or too long".to_owned()));
        }
        let wrong = |error: serde_json::Error| failed(format!("not an event: {error}"));
        let line: Line<'_> = serde_json::from_slice(&self.line).map_err(wrong)?;
        if line.kind == "ERROR" {
            let status: Status = serde_json::from_str(line.object.get()).unwrap_or_default();
            return Err(match status.code {
                410 => Failure::Gone,
                code => {
                    failed(format!("error {code}: {}", status.message.chars().take(200).collect::<String>()))
                }
            });
        }
        let slice: Slice = serde_json::from_str(line.object.get()).map_err(wrong)?;
        match line.kind {
            "ADDED" | "MODIFIED" => Ok(Some(Event::Put(Box::new(slice)))),
            "DELETED" => Ok(Some(Event::Removed(Box::new(slice)))),
            "BOOKMARK" => Ok(Some(Event::Bookmark(slice.metadata.resource_version))),
            other => Err(failed(format!("{other:?} is not a kind of event"))),
        }
    }
}

/// What is new.
#[derive(Debug)]
enum News {
    /// All slices.
    List(Vec<Slice>),
    Put(Box<Slice>),
    Removed(Box<Slice>),
}

/// The thread that reads.
struct Reader {
    source: Source,
    send: mpsc::Sender<News>,
    traffic: KubernetesTraffic,
}

impl Reader {
    fn run(self) {
        let mut wait = BACKOFF.0;
        let mut version = None;
        while !self.send.is_closed() {
            match self.follow(&mut version) {
                Ok(()) => wait = BACKOFF.0,
                // A list helps at once, unless versions grow old faster than they are listed.
                Err(Failure::Gone) => {
                    debug!("the version of a watch is gone");
                    version = None;
                    self.rest(BACKOFF.0);
                }
                Err(Failure::Other(why)) => {
                    // What is known stays: an API server that is away says nothing about engines.
                    self.traffic.failures.inc();
                    warn!(why, "EndpointSlices cannot be followed");
                    version = None;
                    self.rest(wait);
                    wait = (wait * 2).min(BACKOFF.1);
                }
            }
        }
    }

    fn rest(&self, time: Duration) {
        let mut left = time;
        while !left.is_zero() && !self.send.is_closed() {
            let step = left.min(LOOK_EVERY);
            thread::sleep(step);
            left -= step;
        }
    }

    /// One watch, after a list if no version is known. Leaves the version that was reached.
    fn follow(&self, version: &mut Option<String>) -> Result<(), Failure> {
        // The receiver is gone: `run` ends.
        let tell = |news| self.send.blocking_send(news).is_ok();
        let from = match version.take() {
            Some(from) => from,
            None => {
                let (slices, from) = self.source.list()?;
                self.traffic.lists.inc();
                tell(News::List(slices));
                from
            }
        };
        let mut watch = self.source.watch(&from)?;
        let mut reached = from;
        while let Some(event) = watch.next()? {
            self.traffic.events.inc();
            let (news, at) = match event {
                Event::Bookmark(at) => (None, at),
                Event::Put(slice) => {
                    let at = slice.metadata.resource_version.clone();
                    (Some(News::Put(slice)), at)
                }
                Event::Removed(slice) => {
                    let at = slice.metadata.resource_version.clone();
                    (Some(News::Removed(slice)), at)
                }
            };
            reached = at;
            if self.send.is_closed() || news.is_some_and(|news| !tell(news)) {
                return Ok(());
            }
        }
        *version = Some(reached);
        Ok(())
    }
}

/// An engine, and what it says it publishes.
type Asked = (Name, EngineConfig, Result<EngineConfig, AskError>);

/// The engines that slices name.
struct Engines {
    app: App,
    slices: Slices,
    wanted: BTreeMap<Name, EngineConfig>,
    registered: BTreeMap<Name, EngineConfig>,
    asking: JoinSet<Asked>,
}

impl Engines {
    fn new(app: App, slices: Slices) -> Self {
        let (wanted, registered) = (BTreeMap::new(), BTreeMap::new());
        Self { app, slices, wanted, registered, asking: JoinSet::new() }
    }

    async fn follow(mut self, mut news: mpsc::Receiver<News>) {
        let mut again = interval(AGAIN);
        loop {
            tokio::select! {
                news = news.recv() => {
                    match news {
                        None => return std::future::pending().await,
                        Some(News::List(slices)) => self.slices.replace(slices),
                        Some(News::Put(slice)) => self.slices.put(*slice),
                        Some(News::Removed(slice)) => self.slices.remove(&slice.metadata.name),
                    }
                    self.wanted = self.slices.engines();
                    self.fence().await;
                    self.ask();
                }
                Some(asked) = self.asking.join_next() => {
                    if let Ok((name, engine, complete)) = asked {
                        self.complete(name, engine, complete).await;
                    }
                }
                _ = again.tick() => if self.asking.is_empty() { self.ask() },
            }
            let waiting = self.wanted.len().saturating_sub(self.registered.len());
            self.app.shared.traffic.kubernetes.engines(self.registered.len(), waiting);
        }
    }

    /// Takes out engines that are gone, not ready or different now.
    async fn fence(&mut self) {
        let Self { app, wanted, registered, .. } = self;
        let stays = |(name, engine): &(&Name, &EngineConfig)| wanted.get(*name) == Some(*engine);
        let gone = registered.iter().filter(|engine| !stays(engine)).map(|(name, _)| name.clone());
        let gone: Vec<Name> = gone.collect();
        registered.retain(|name, _| !gone.contains(name));
        for (tenant, instance) in &gone {
            // No request is placed there from now on, even while streams are being ended.
            let number = app.shared.directory().find(tenant, instance);
            if let Some(number) = number {
                app.shared.set_up(number, false);
            }
        }
        for (tenant, instance) in gone {
            registry::unregister(&app.shared, &app.commander, &tenant, &instance, None).await;
            info!(tenant, instance, "an engine is not ready any more");
        }
    }

    /// Asks engines that are not registered yet what was left to them, if anything was.
    fn ask(&mut self) {
        for (name, engine) in &self.wanted {
            if !self.registered.contains_key(name) {
                let (name, engine) = (name.clone(), engine.clone());
                self.asking.spawn(async move {
                    let complete = discovery::complete(engine.clone()).await;
                    (name, engine, complete)
                });
            }
        }
    }

    /// An engine has said what it publishes, or nothing was left to it.
    async fn complete(&mut self, name: Name, engine: EngineConfig, said: Result<EngineConfig, AskError>) {
        if self.registered.contains_key(&name) || self.wanted.get(&name) != Some(&engine) {
            return;
        }
        let complete = match said {
            Ok(complete) => complete,
            Err(error) => {
                warn!(instance = engine.instance, %error, "an engine does not say what it publishes");
                return;
            }
        };
        let App { shared, commander } = &self.app;
        let mut registered = registry::register(shared, commander, &complete, &Positions::new());
        if matches!(registered, Err(RegisterError::Differs(_))) {
            // It is one of before a restart, whose pod was replaced by one of the same name.
            registry::unregister(shared, commander, &name.0, &name.1, None).await;
            registered = registry::register(shared, commander, &complete, &Positions::new());
        }
        match registered {
            Ok(_) => {
                info!(instance = engine.instance, "an engine is ready");
                self.registered.insert(name, engine);
            }
            Err(error) => warn!(instance = engine.instance, %error, "an engine is refused"),
        }
    }
}
