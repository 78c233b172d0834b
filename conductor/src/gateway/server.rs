//! [`GatewayServer`]: gRPC on a thread of its own.

use std::fmt;
use std::future::{Ready, ready};
use std::io;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::server::{Grpc, ServerStreamingService, StreamingService, UnaryService};
use tonic::{Status, Streaming};

use super::picker::{BYTES_PER_PERMIT, Bounds, Flow, Picker};
use super::proto::{self, HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse};
use super::record::Record;
use crate::proxy::{Limits, Place, Proxy};
use crate::service::StartError;
use crate::shared::Shared;
use crate::traffic::Outcome;

/// The methods that are served.
pub(crate) const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
pub(crate) const CHECK: &str = "/grpc.health.v1.Health/Check";
pub(crate) const WATCH: &str = "/grpc.health.v1.Health/Watch";
/// How often the health is looked at that a gateway watches.
const WATCH_EVERY: Duration = Duration::from_millis(500);
/// What health checks ask about: everything, readiness, and the names of the service in charts of the
/// extension.
const READINESS: [&str; 4] =
    ["", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor"];

/// Most connections; gateways use few, with many streams.
const CONNECTIONS_MAX: usize = 1_024;
/// Longest wait for the first byte of a connection.
const FIRST_BYTE_TIME_MAX: Duration = Duration::from_secs(10);
/// How often a connection is asked whether it lives, and how long the answer may take.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(20));
/// Longest time in which a gateway takes an answer.
const SEND_TIME_MAX: Duration = Duration::from_secs(30);
/// Answers that wait for the gateway to take them, per request.
const ANSWERS_MAX: usize = 16;
/// Bytes of a message besides a body: headers and metadata.
const HEAD_BYTES_MAX: usize = 1 << 20;
/// Longest headers of a call, bytes.
const HEADER_LIST_BYTES_MAX: u32 = 16 << 10;
/// Pause after a connection could not be accepted, for example because no file descriptor is left.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// A running server. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct GatewayServer {
    addr: SocketAddr,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl GatewayServer {
    /// Starts what the settings ask for.
    ///
    /// # Errors
    /// The address cannot be bound, or the system refuses a thread.
    pub(crate) fn start(shared: &Arc<Shared>) -> Result<Option<Self>, StartError> {
        let config = &shared.config;
        let Some(addr) = config.gateway.listen else { return Ok(None) };
        let limits = Limits { body_bytes_max: config.limits.body_bytes_max as usize, ..Limits::default() };
        let permits = (config.gateway.bodies_mib_max as usize) << 20;
        let bounds = Bounds {
            body_time_max: Duration::from_millis(config.gateway.body_ms_max.into()),
            silence_max: Duration::from_millis(config.schedule.reservation_ms_max.into()),
            bodies: Arc::new(Semaphore::new((permits / BYTES_PER_PERMIT).min(Semaphore::MAX_PERMITS))),
        };
        let record = Record { traffic: shared.traffic.gateway.clone(), ..Record::default() };
        let streams_max = config.gateway.streams_max;
        let gateway = Gateway::new(Arc::clone(shared), limits, bounds, streams_max, record);
        Self::serve(addr, gateway).map(Some).map_err(|error| StartError::Listen(addr, error))
    }

    /// Listens and serves; with port 0 the system chooses a port.
    ///
    /// # Errors
    /// The address cannot be bound, or the system refuses a thread.
    pub(super) fn serve<P: Place>(addr: SocketAddr, gateway: Gateway<P>) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, mut stopped) = watch::channel(false);
        let work = move || {
            runtime.block_on(async {
                let Ok(listener) = TcpListener::from_std(listener) else { return };
                tokio::select! {
                    _ = stopped.wait_for(|stop| *stop) => {}
                    () = accept(listener, gateway) => {}
                }
            });
            // Requests under way are at the gateway and the engines, and go on.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("snowskin-gateway".into()).spawn(work)?;
        Ok(Self { addr, stop, thread: Some(thread) })
    }

    /// The address at which it listens.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for GatewayServer {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the gateway's thread panicked");
        }
    }
}

/// What its connections share.
pub(super) struct Gateway<P: Place> {
    proxy: Proxy<P>,
    place: Arc<P>,
    bounds: Bounds,
    streams: Arc<Semaphore>,
    streams_max: u32,
    record: Arc<Record>,
}

impl<P: Place> Gateway<P> {
    pub(super) fn new(
        place: Arc<P>,
        limits: Limits,
        bounds: Bounds,
        streams_max: u32,
        record: Record,
    ) -> Self {
        let streams = Arc::new(Semaphore::new(streams_max as usize));
        let (proxy, record) = (Proxy::new(Arc::clone(&place), limits), Arc::new(record));
        Self { proxy, place, bounds, streams, streams_max, record }
    }
}

impl<P: Place> Clone for Gateway<P> {
    fn clone(&self) -> Self {
        let Self { proxy, place, bounds, streams, streams_max, record } = self;
        Self {
            proxy: proxy.clone(),
            place: Arc::clone(place),
            bounds: bounds.clone(),
            streams: Arc::clone(streams),
            streams_max: *streams_max,
            record: Arc::clone(record),
        }
    }
}

impl<P: Place> fmt::Debug for Gateway<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("bounds", &self.bounds).finish_non_exhaustive()
    }
}

async fn accept<P: Place>(listener: TcpListener, gateway: Gateway<P>) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(connection(stream, gateway.clone(), permit));
            }
            Err(error) => {
                tracing::warn!(%error, "a gateway's connection cannot be accepted");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

async fn connection<P: Place>(stream: TcpStream, gateway: Gateway<P>, permit: OwnedSemaphorePermit) {
    let _ = stream.set_nodelay(true);
    if !matches!(timeout(FIRST_BYTE_TIME_MAX, stream.readable()).await, Ok(Ok(()))) {
        return;
    }
    let mut http = http2::Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new())
        .max_concurrent_streams(gateway.streams_max)
        .max_header_list_size(HEADER_LIST_BYTES_MAX)
        .keep_alive_interval(Some(PING.0))
        .keep_alive_timeout(PING.1);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let gateway = gateway.clone();
        async move { Ok::<_, std::convert::Infallible>(gateway.call(request).await) }
    });
    if let Err(error) = http.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!(%error, "a gateway's connection is lost");
    }
    drop(permit);
}

impl<P: Place> Gateway<P> {
    fn full(&self) -> Status {
        let most = self.streams_max;
        Status::resource_exhausted(format!(
            "{most} requests are in progress already: raise conductor.gateway.streams_max, or come again"
        ))
    }

    /// The health of a service: a `ServingStatus`.
    fn health(&self, service: &str) -> i32 {
        let serves = match service {
            "liveness" => true,
            service if READINESS.contains(&service) => !self.place.models().is_empty(),
            _ => return proto::SERVICE_UNKNOWN,
        };
        if serves { proto::SERVING } else { proto::NOT_SERVING }
    }

    async fn call(&self, request: hyper::Request<Incoming>) -> hyper::Response<tonic::body::Body> {
        match request.uri().path() {
            PROCESS => {
                let bytes_max = self.proxy.core().limits.body_bytes_max.saturating_add(HEAD_BYTES_MAX);
                let mut grpc = Grpc::new(Prost::default()).max_decoding_message_size(bytes_max);
                grpc.streaming(Process(self.clone()), request).await
            }
            CHECK => {
                let mut grpc = Grpc::new(Prost::default()).max_decoding_message_size(HEAD_BYTES_MAX);
                grpc.unary(Check(self.clone()), request).await
            }
            WATCH => {
                let mut grpc = Grpc::new(Prost::default()).max_decoding_message_size(HEAD_BYTES_MAX);
                grpc.server_streaming(Watch(self.clone()), request).await
            }
            path => Status::unimplemented(format!("there is no method {path}")).into_http(),
        }
    }
}

struct Process<P: Place>(Gateway<P>);

impl<P: Place> StreamingService<ProcessingRequest> for Process<P> {
    type Response = ProcessingResponse;
    type ResponseStream = ReceiverStream<Result<ProcessingResponse, Status>>;
    type Future = Ready<Result<tonic::Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<ProcessingRequest>>) -> Self::Future {
        let Self(gateway) = self;
        let Ok(permit) = Arc::clone(&gateway.streams).try_acquire_owned() else {
            gateway.record.traffic.ended(Outcome::Unavailable);
            return ready(Err(gateway.full()));
        };
        let (send, receive) = mpsc::channel(ANSWERS_MAX);
        let (core, record) = (Arc::clone(gateway.proxy.core()), Arc::clone(&gateway.record));
        let picker = Picker::new(core, gateway.bounds.clone(), record);
        tokio::spawn(async move {
            let gone = send.clone();
            tokio::select! {
                () = gone.closed() => {}
                () = process(picker, request.into_inner(), send) => {}
            }
            drop(permit);
        });
        ready(Ok(tonic::Response::new(ReceiverStream::new(receive))))
    }
}

/// One stream, to its end. What was reserved ends with `picker`.
async fn process<P: Place>(
    mut picker: Picker<P>,
    mut messages: Streaming<ProcessingRequest>,
    send: mpsc::Sender<Result<ProcessingResponse, Status>>,
) {
    let mut answers = Vec::new();
    loop {
        let ended = match timeout(picker.patience(), messages.message()).await {
            Ok(Ok(Some(message))) => picker.take(message, &mut answers).await,
            Ok(Ok(None)) => Ok(Flow::Ends),
            Ok(Err(status)) => {
                tracing::debug!(%status, "a gateway's request breaks off");
                return;
            }
            Err(_) => match picker.timed_out() {
                Some(last) => {
                    answers.push(last);
                    Ok(Flow::Ends)
                }
                None => Err(Status::deadline_exceeded("the gateway said nothing for too long")),
            },
        };
        let (results, ends) = match ended {
            Ok(flow) => (answers.drain(..).map(Ok).collect::<Vec<_>>(), flow == Flow::Ends),
            Err(status) => (vec![Err(status)], true),
        };
        for result in results {
            if !matches!(timeout(SEND_TIME_MAX, send.send(result)).await, Ok(Ok(()))) {
                return;
            }
        }
        if ends {
            return;
        }
    }
}

struct Check<P: Place>(Gateway<P>);

impl<P: Place> UnaryService<HealthCheckRequest> for Check<P> {
    type Response = HealthCheckResponse;
    type Future = Ready<Result<tonic::Response<HealthCheckResponse>, Status>>;

    fn call(&mut self, request: tonic::Request<HealthCheckRequest>) -> Self::Future {
        ready(match self.0.health(&request.into_inner().service) {
            proto::SERVICE_UNKNOWN => Err(Status::not_found("there is no service of this name")),
            status => Ok(tonic::Response::new(HealthCheckResponse { status })),
        })
    }
}

struct Watch<P: Place>(Gateway<P>);

impl<P: Place> ServerStreamingService<HealthCheckRequest> for Watch<P> {
    type Response = HealthCheckResponse;
    type ResponseStream = ReceiverStream<Result<HealthCheckResponse, Status>>;
    type Future = Ready<Result<tonic::Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: tonic::Request<HealthCheckRequest>) -> Self::Future {
        let Self(gateway) = self;
        let Ok(permit) = Arc::clone(&gateway.streams).try_acquire_owned() else {
            return ready(Err(gateway.full()));
        };
        let (gateway, service) = (gateway.clone(), request.into_inner().service);
        let (send, receive) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut told = None;
            loop {
                let status = gateway.health(&service);
                if told.replace(status) != Some(status)
                    && send.send(Ok(HealthCheckResponse { status })).await.is_err()
                {
                    break;
                }
                if timeout(WATCH_EVERY, send.closed()).await.is_ok() {
                    break;
                }
            }
            drop(permit);
        });
        ready(Ok(tonic::Response::new(ReceiverStream::new(receive))))
    }
}

/// Messages of `prost` in gRPC: sends `S`, receives `R`.
pub(super) struct Prost<S, R>(PhantomData<fn() -> (S, R)>);

impl<S, R> Default for Prost<S, R> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<S, R> Codec for Prost<S, R>
where
    S: prost::Message + 'static,
    R: prost::Message + Default + 'static,
{
    type Encode = S;
    type Decode = R;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self::default()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<S: prost::Message, R> Encoder for Prost<S, R> {
    type Item = S;
    type Error = Status;

    fn encode(&mut self, item: S, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(to).map_err(|error| Status::internal(error.to_string()))
    }
}

impl<S, R: prost::Message + Default> Decoder for Prost<S, R> {
    type Item = R;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<R>, Status> {
        R::decode(from).map(Some).map_err(|error| Status::invalid_argument(error.to_string()))
    }
}
