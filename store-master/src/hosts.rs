//! Host names under which the administrative interface may be used.
//!
//! A web page whose host name resolves to this host (DNS rebinding) has the same origin as this port for a
//! browser, and could read its answers; but its requests carry its own name. A request is therefore answered
//! only if its `Host` is an address, or a name that other parties' DNS cannot have pointed here: `localhost`,
//! a name without dots, a name below a domain that is reserved for private use (RFC 6761, RFC 6762, RFC 8375,
//! ICANN's `internal`), or one of the configured names.

use axum::extract::{Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::admin::{Refusal, bearer};
use crate::http::Asker;
use crate::http_server::is_own_host;

const PRIVATE: [&str; 5] = ["local", "localhost", "internal", "home.arpa", "test"];

/// Whether requests with this `Host` are answered by an interface that web pages must not reach: see
/// [`is_own_host`], and `configured` names.
#[must_use]
pub fn is_allowed(host: &str, configured: &[String]) -> bool {
    if is_own_host(host) {
        return true;
    }
    let (name, port) = host.split_once(':').unwrap_or((host, ""));
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let is_name = !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'));
    let below = |domain: &str| name.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.'));
    is_name
        && port.bytes().all(|digit| digit.is_ascii_digit())
        && (!name.contains('.')
            || PRIVATE.into_iter().any(below)
            || configured.iter().any(|own| own.eq_ignore_ascii_case(&name)))
}

/// Refuses requests under other names, unless they carry the admin secret, which no page has.
pub(crate) async fn check(State(asker): State<Asker>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    // HTTP/1.0 may omit it; browsers do not use HTTP/1.0.
    let allowed = match host {
        Some(host) => is_allowed(host, asker.http_hosts()),
        None => !request.headers().contains_key(header::HOST),
    };
    let secret = asker.admin_secret();
    if allowed || (secret.is_set() && secret.matches(bearer(request.headers()).as_bytes())) {
        next.run(request).await
    } else {
        Refusal::Host.into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_other_parties_could_own_are_refused_unless_they_are_configured() {
        let configured = ["kv.example.com".to_owned()];
        for host in [
            "10.1.2.3:9003",
            "[::1]:9003",
            "localhost:9003",
            "master",
            "snowskin-master:9003",
            "master.default.svc.cluster.local:9003",
            "db1.internal",
            "KV.example.com:9003",
            "kv.example.com.",
        ] {
            assert!(is_allowed(host, &configured), "{host}");
        }
        for host in [
            "",
            ":9003",
            "evil.example",
            "evil.kv.example.com",
            "kv.example.com.evil.example",
            "local.evil.example",
            "evillocal.example",
            "10.1.2.3.evil.example:9003",
            "master:9003:9003",
            "user@master",
            "master:evil",
        ] {
            assert!(!is_allowed(host, &configured), "{host}");
        }
        assert!(!is_allowed("kv.example.com", &[]));
    }
}
