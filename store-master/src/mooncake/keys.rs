//! Keys under Mooncake's paths.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use hyper::body::{Body as HttpBody, Bytes, Frame};
use serde::Serialize;
use store_core::message::{List, ListQuery, RemoveMany, RemoveQuery, TenantList};
use store_core::{DEFAULT_TENANT, ErrorCode, Key};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::{Refused, Shared, TEXT, json, param, text_param};
use crate::http::{Asker, Inspected};

/// Most keys of one request.
const KEYS_MAX: usize = 4096;
/// Keys of one question to the serving thread.
const KEYS_PER_QUESTION: usize = 256;
/// Keys of one page of a list.
const PAGE_KEYS: u32 = 512;

/// A replica, as Mooncake describes its buffer.
#[derive(Serialize)]
struct Buffer {
    size_: u64,
    buffer_address_: u64,
    protocol_: &'static str,
    transport_endpoint_: String,
}

fn buffers(object: Inspected) -> Vec<Buffer> {
    let Inspected { len, replicas } = object;
    let buffer = |(buffer_address_, transport_endpoint_)| Buffer {
        size_: len,
        buffer_address_,
        protocol_: "tcp",
        transport_endpoint_,
    };
    replicas.into_iter().map(buffer).collect()
}

#[derive(Serialize)]
struct Replicas {
    success: bool,
    data: Vec<Buffer>,
}

/// Where one object is. Neither leases it nor counts as a use.
pub(super) async fn query(
    State(shared): State<Shared>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Refused> {
    shared.may_see_keys(peer, &headers)?;
    let tenant = tenant(&uri)?;
    let key =
        param(&uri, "key").filter(|key| !key.is_empty()).ok_or(Refused::params("?key=KEY is missing"))?;
    let found = shared.asker.inspect(&tenant, vec![key]).await?.pop();
    match found.unwrap_or(Err(ErrorCode::InternalError)) {
        Ok(object) => Ok(json(StatusCode::OK, &Replicas { success: true, data: buffers(object) })),
        Err(code) => Err(Refused { status: StatusCode::NOT_FOUND, ..code.into() }),
    }
}

#[derive(Serialize)]
struct OneOfMany {
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<Vec<Buffer>>,
}

#[derive(Serialize)]
struct Many {
    success: bool,
    data: BTreeMap<String, OneOfMany>,
}

/// Where objects are, by key: `?keys=a,b`.
pub(super) async fn query_many(
    State(shared): State<Shared>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Refused> {
    shared.may_see_keys(peer, &headers)?;
    let tenant = tenant(&uri)?;
    let listed = param(&uri, "keys").filter(|keys| !keys.is_empty());
    let listed = listed.ok_or(Refused::params("No keys provided. Use ?keys=key1,key2,..."))?;
    let keys: Vec<Vec<u8>> = listed.split(|byte| *byte == b',').map(Into::into).collect();
    if keys.len() > KEYS_MAX {
        return Err(Refused::params(format!("{} keys: ask for at most {KEYS_MAX} at a time", keys.len())));
    }
    let mut data = BTreeMap::new();
    for part in keys.chunks(KEYS_PER_QUESTION) {
        let found = shared.asker.inspect(&tenant, part.to_vec()).await?;
        for (key, object) in part.iter().zip(found) {
            let one = match object {
                Ok(object) => OneOfMany { ok: true, error: None, values: Some(buffers(object)) },
                Err(code) => OneOfMany { ok: false, error: Some(code.name().into()), values: None },
            };
            data.insert(String::from_utf8_lossy(key).into_owned(), one);
        }
    }
    Ok(json(StatusCode::OK, &Many { success: true, data }))
}

/// All keys, one per line, as they are: a key with a line break in it spans lines. Sent in pages, as fast as
/// the client reads.
pub(super) async fn all(
    State(shared): State<Shared>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Refused> {
    shared.may_see_keys(peer, &headers)?;
    let tenant = tenant(&uri)?;
    // The first page is asked for before the answer begins, so that a refusal has its status.
    let (first, cursor) = page(&shared.asker, &tenant, 0).await?;
    let (send, pages) = channel(1);
    if !first.is_empty() {
        let _ = send.try_send(Some(first));
    }
    tokio::spawn(list(shared.asker, tenant, cursor, send));
    let body = Body::new(Pages { pages, ended: false });
    Ok(([(header::CONTENT_TYPE, TEXT)], body).into_response())
}

/// Sends pages from `cursor` on, and `None` after the last one.
async fn list(asker: Asker, tenant: String, mut cursor: u64, send: Sender<Option<Bytes>>) {
    while cursor != 0 {
        // Without the end of the list, the client sees that the answer is cut off.
        let Ok((keys, next)) = page(&asker, &tenant, cursor).await else { return };
        cursor = next;
        if !keys.is_empty() && send.send(Some(keys)).await.is_err() {
            return;
        }
    }
    let _ = send.send(None).await;
}

/// A page of keys as lines, and the cursor of the next one; 0: there is none.
async fn page(asker: &Asker, tenant: &str, cursor: u64) -> Result<(Bytes, u64), Refused> {
    let query = ListQuery { prefix: Key(b""), cursor, limit: PAGE_KEYS };
    let lines = |position: store_core::message::ListPosition,
                 items: store_core::Items<'_, store_core::message::Listed<'_>>| {
        let mut lines = Vec::new();
        for listed in items.filter(|listed| listed.complete) {
            lines.extend_from_slice(listed.key.0);
            lines.push(b'\n');
        }
        (Bytes::from(lines), position.cursor)
    };
    Ok(asker.ask_for::<List, _>(Some(tenant), &query, std::iter::empty(), lines).await?)
}

/// The pages of an answer. An answer whose sender is gone before the last page is broken off.
struct Pages {
    pages: Receiver<Option<Bytes>>,
    ended: bool,
}

impl HttpBody for Pages {
    type Data = Bytes;
    type Error = CutOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, CutOff>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        self.pages.poll_recv(cx).map(|page| {
            self.ended = !matches!(page, Some(Some(_)));
            match page {
                Some(Some(page)) => Some(Ok(Frame::data(page))),
                Some(None) => None,
                None => Some(Err(CutOff)),
            }
        })
    }
}

/// The master did not answer in the middle of a list.
#[derive(Debug)]
struct CutOff;

impl std::fmt::Display for CutOff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the master did not answer in time: the list is not complete")
    }
}

impl std::error::Error for CutOff {}

#[derive(Serialize)]
struct Removed {
    success: bool,
    removed_count: u64,
}

/// Removes all objects of `?tenant_id=`, or of all tenants; those in use only with `?force=true`.
pub(super) async fn remove_all(
    State(shared): State<Shared>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Refused> {
    shared.may_change(peer, &headers).await?;
    let force = text_param(&uri, "force")?.is_some_and(|force| force == "true" || force == "1");
    let tenants: Vec<String> = match text_param(&uri, "tenant_id")? {
        Some(tenant) => vec![tenant],
        None => {
            let names =
                |(), tenants: store_core::Items<'_, Result<store_core::message::TenantUsage<'_>, _>>| {
                    tenants.flatten().map(|tenant| tenant.name.to_owned()).collect()
                };
            shared.asker.ask::<TenantList, _>(&(), names).await?
        }
    };
    let mut removed_count = 0;
    for tenant in &tenants {
        let mut cursor = 0;
        loop {
            let query = RemoveQuery { pattern: None, cursor, force };
            let none = std::iter::empty();
            let page =
                shared.asker.ask_for::<RemoveMany, _>(Some(tenant), &query, none, |page, _| page).await?;
            removed_count += u64::from(page.removed);
            cursor = page.cursor;
            if cursor == 0 {
                break;
            }
        }
    }
    Ok(json(StatusCode::OK, &Removed { success: true, removed_count }))
}

/// `?tenant_id=`, by default the default tenant.
fn tenant(uri: &Uri) -> Result<String, Refused> {
    Ok(text_param(uri, "tenant_id")?.unwrap_or_else(|| DEFAULT_TENANT.to_owned()))
}
