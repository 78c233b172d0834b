//! A real S3 server on the loopback: `s3s`, whose objects are files below a directory, and faults in front of
//! it. It has all that is needed here (conditional puts, ranges, lists), so nothing of S3 is written here.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hyper::Request;
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{Body, HttpResponse};
use tokio::runtime::Runtime;

pub(crate) const KEY_ID: &str = "AKIDTEST";
pub(crate) const SECRET: &str = "do-not-show-this-secret";

/// How a bucket answers instead.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// This status, with this code.
    Refuse(u16, &'static str),
    /// Success, whatever the request says.
    Agree,
    /// The connection ends without an answer.
    Break,
    /// No answer, for a long time.
    Hang,
}

type Faults = Arc<Mutex<HashMap<String, Fault>>>;

pub(crate) struct Server {
    root: tempfile::TempDir,
    address: SocketAddr,
    faults: Faults,
    runtime: Mutex<Option<Runtime>>,
}

impl Server {
    pub(crate) fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        Self { root, address, faults: Faults::default(), runtime: Mutex::default() }
    }

    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Makes a bucket and returns its address, with a prefix.
    pub(crate) fn bucket(&self, name: &str) -> PathBuf {
        std::fs::create_dir_all(self.root.path().join(name)).unwrap();
        Path::new("s3://").join(name).join("kv")
    }

    /// Where the objects of an address are.
    pub(crate) fn files(&self, address: &Path) -> PathBuf {
        self.root.path().join(address.strip_prefix("s3://").unwrap())
    }

    pub(crate) fn set_fault(&self, bucket: &str, fault: Option<Fault>) {
        let mut faults = self.faults.lock().unwrap();
        match fault {
            Some(fault) => drop(faults.insert(bucket.to_owned(), fault)),
            None => drop(faults.remove(bucket)),
        }
    }

    pub(crate) fn start(&self) {
        let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(self.root.path()).unwrap());
        builder.set_auth(SimpleAuth::from_single(KEY_ID, SECRET));
        let (service, faults, address) = (builder.build(), Arc::clone(&self.faults), self.address);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(address)).unwrap();
        runtime.spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let (service, faults) = (service.clone(), Arc::clone(&faults));
                let answer = move |request| answer(service.clone(), Arc::clone(&faults), request);
                tokio::spawn(
                    http1::Builder::new().serve_connection(TokioIo::new(socket), service_fn(answer)),
                );
            }
        });
        *self.runtime.lock().unwrap() = Some(runtime);
    }

    /// Ends the server and all of its connections.
    pub(crate) fn stop(&self) {
        drop(self.runtime.lock().unwrap().take());
    }
}

async fn answer(
    service: S3Service,
    faults: Faults,
    request: Request<Incoming>,
) -> Result<HttpResponse, Box<dyn std::error::Error + Send + Sync>> {
    let bucket = request.uri().path().split('/').nth(1).unwrap_or_default().to_owned();
    let fault = faults.lock().unwrap().get(&bucket).copied();
    match fault {
        None => service.call(request.map(Body::from)).await.map_err(|error| format!("{error:?}").into()),
        Some(Fault::Agree) => Ok(hyper::Response::builder().header("etag", "\"1\"").body(Body::empty())?),
        Some(Fault::Break) => Err("broken on purpose".into()),
        Some(Fault::Hang) => Ok(std::future::pending::<Result<_, Infallible>>().await.unwrap_or_default()),
        Some(Fault::Refuse(status, code)) => {
            let text = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
            let response = hyper::Response::builder().status(status).header(CONTENT_TYPE, "application/xml");
            Ok(response.body(Body::from(text))?)
        }
    }
}
