//! The metadata server of Mooncake's engines: `/metadata?key=`, and `/health`. On a port of its own, because
//! users name it in a connection string (`http://HOST:8080/metadata`).
//!
//! ```text
//!   GET    /metadata?key=KEY     200 value                | 404 | 400 without a key
//!   PUT    /metadata?key=KEY     200                      | 400 for another rpc_meta than the one there
//!   DELETE /metadata?key=KEY     200                      | 404
//! ```
//!
//! A key that contains `rpc_meta` is the address of a process. So that two processes do not take one name, it
//! is not replaced: the second one has to delete it first. Values stay until they are deleted. Everything is
//! bounded by [`MetadataLimits`], and requests of web pages that change something are refused.
//!
//! Mooncake: `mooncake-store/src/http_metadata_server.cpp` (the master's), and
//! `mooncake-wheel/mooncake/http_metadata_server.py` (the command).

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::text_param;
use crate::config::MetadataLimits;
use crate::metadata::{Expected, Refused, Shared, no_browser};

/// What happens to a PUT of the `rpc_meta` that is there already, byte for byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SameRpcMeta {
    /// It succeeds and changes nothing, as with the server in Mooncake's master.
    Accepted,
    /// It is refused, as with Mooncake's separate server.
    Refused,
}

/// The routes of a metadata server for Mooncake's engines, with a new table.
///
/// ```
/// use store_master::{HttpLimits, HttpServer, MetadataLimits, SameRpcMeta, mooncake_metadata};
///
/// let mut server = HttpServer::bind("127.0.0.1:0".parse()?)?;
/// let routes = mooncake_metadata(MetadataLimits::default(), SameRpcMeta::Refused);
/// server.serve(routes, HttpLimits::default(), std::time::Duration::ZERO)?;
/// println!("engines use http://{}/metadata", server.addr());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn mooncake_metadata(limits: MetadataLimits, same_rpc_meta: SameRpcMeta) -> Router {
    let server = Arc::new(Server { shared: Shared::new(limits), same_rpc_meta });
    let methods = get(read).put(write).delete(remove);
    Router::new().route("/metadata", methods).route("/health", get(health)).with_state(server)
}

struct Server {
    shared: Shared,
    same_rpc_meta: SameRpcMeta,
}

async fn health() -> &'static str {
    "OK"
}

async fn read(State(server): State<Arc<Server>>, uri: Uri) -> Result<Response, No> {
    let key = server.key(&uri)?;
    match server.shared.table().get(&key, Instant::now()) {
        Some((value, _)) => Ok(([(header::CONTENT_TYPE, "application/json")], value).into_response()),
        None => Err(No::NotFound),
    }
}

async fn write(
    State(server): State<Arc<Server>>,
    uri: Uri,
    headers: HeaderMap,
    body: Body,
) -> Result<&'static str, No> {
    let key = server.key(&uri)?;
    no_browser(&headers)?;
    let value = server.shared.receive(&headers, body).await?;
    let (mut table, now) = (server.shared.table(), Instant::now());
    match table.get(&key, now).filter(|_| key.contains("rpc_meta")) {
        Some((known, _)) if known == value && server.same_rpc_meta == SameRpcMeta::Accepted => {
            return Ok("metadata unchanged");
        }
        Some(_) => return Err(No::Duplicate),
        None => {}
    }
    table.put(key, value, Expected::Anything, None, now)?;
    Ok("metadata updated")
}

async fn remove(State(server): State<Arc<Server>>, uri: Uri, headers: HeaderMap) -> Result<&'static str, No> {
    let key = server.key(&uri)?;
    no_browser(&headers)?;
    server.shared.table().delete(&key, Expected::Anything, Instant::now())?;
    Ok("metadata deleted")
}

impl Server {
    fn key(&self, uri: &Uri) -> Result<String, No> {
        let key = text_param(uri, "key").map_err(|_| No::NotText)?.unwrap_or_default();
        let key = key.trim();
        if key.is_empty() {
            return Err(No::MissingKey);
        }
        self.shared.check_key(key)?;
        Ok(key.to_owned())
    }
}

/// Why a request was refused.
enum No {
    NotFound,
    MissingKey,
    NotText,
    /// Another process has the name.
    Duplicate,
    /// For a reason that the other metadata server has as well.
    Refused(Refused),
}

impl From<Refused> for No {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::NotFound => Self::NotFound,
            other => Self::Refused(other),
        }
    }
}

impl IntoResponse for No {
    fn into_response(self) -> Response {
        match self {
            Self::NotFound => (StatusCode::NOT_FOUND, "metadata not found").into_response(),
            Self::MissingKey => (StatusCode::BAD_REQUEST, "Missing key parameter").into_response(),
            Self::NotText => (StatusCode::BAD_REQUEST, "the key is not UTF-8").into_response(),
            Self::Duplicate => {
                (StatusCode::BAD_REQUEST, "Duplicate rpc_meta key not allowed").into_response()
            }
            Self::Refused(refused) => refused.into_response(),
        }
    }
}
