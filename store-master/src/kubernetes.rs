//! The API server of a Kubernetes cluster: requests with the token and the certificates of a pod, both of
//! which are replaced now and then and therefore read for each request.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ureq::http::{Request, Response};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

/// Where a pod finds its token, and the certificate of the API server.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// How long a request may take.
#[derive(Clone, Copy, Debug)]
pub enum Patience {
    /// From the look-up of the name to the last byte of the answer.
    Whole(Duration),
    /// For the beginning of an answer, and for each read of it: for answers without an end.
    PerRead(Duration),
}

/// The API server of a cluster.
#[derive(Debug)]
pub struct ApiServer {
    address: String,
    /// The file with the token; `None`: it asks for none.
    pub(crate) token: Option<PathBuf>,
    /// The file with the certificates that are trusted; `None`: no TLS.
    authority: Option<PathBuf>,
    /// The agent, and the certificates with which it was made.
    agent: Mutex<(Arc<Vec<u8>>, Agent)>,
}

impl ApiServer {
    /// The one of the cluster in which this pod runs.
    ///
    /// # Errors
    /// This is no pod, or it has no service account.
    pub fn of_pod() -> Result<Self, String> {
        let variable = |name: &str| {
            std::env::var(name).map_err(|_| {
                format!(
                    "{name} is not set: k8s:// is for programs in a pod, and k8s+http:// for `kubectl proxy`"
                )
            })
        };
        let (host, port) = (
            variable("KUBERNETES_SERVICE_HOST")?,
            variable("KUBERNETES_SERVICE_PORT").unwrap_or("443".into()),
        );
        // An IPv6 address needs brackets.
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Self::with_account(format!("https://{host}:{port}"), Path::new(ACCOUNT))
    }

    /// At `address`, with `token` and `ca.crt` of a directory.
    ///
    /// # Errors
    /// There is no certificate.
    pub fn with_account(address: String, account: &Path) -> Result<Self, String> {
        let authority = account.join("ca.crt");
        let pem = fs::read(&authority).map_err(|error| format!("{}: {error}", authority.display()))?;
        let agent = agent_with(&pem).map_err(|why| format!("{} {why}", authority.display()))?;
        let (token, authority) = (Some(account.join("token")), Some(authority));
        Ok(Self { address, token, authority, agent: Mutex::new((Arc::new(pem), agent)) })
    }

    /// At `http://…`, without a token, as `kubectl proxy` serves it.
    #[must_use]
    pub fn at(address: String) -> Self {
        let agent = Mutex::new((Arc::default(), agent_of(TlsConfig::default())));
        Self { address, token: None, authority: None, agent }
    }

    /// Scheme, host and port.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sends a request with a JSON body, or without one; returns the answer, whatever its status.
    ///
    /// # Errors
    /// The server does not answer, or the token cannot be read.
    pub fn send(
        &self,
        method: &str,
        url: &str,
        body: String,
        patience: Patience,
    ) -> Result<Response<Body>, String> {
        let mut request = Request::builder().method(method).uri(url);
        if let Some(path) = &self.token {
            let token = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
            request = request.header("authorization", format!("Bearer {}", token.trim()));
        }
        let request = request.header("accept", "application/json").header("content-type", "application/json");
        let request = request.body(body).map_err(|error| error.to_string())?;
        let agent = self.agent()?;
        let config = agent.configure_request(request);
        let request = match patience {
            Patience::Whole(time) => config.timeout_global(Some(time)).build(),
            Patience::PerRead(time) => config
                .timeout_connect(Some(time))
                .timeout_recv_response(Some(time))
                .timeout_per_read(Some(time))
                .build(),
        };
        agent.run(request).map_err(|error| error.to_string())
    }

    /// The agent; another one after the certificates were replaced.
    fn agent(&self) -> Result<Agent, String> {
        let mut agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(path) = &self.authority else { return Ok(agent.1.clone()) };
        match fs::read(path) {
            Ok(pem) if pem != *agent.0 => {
                let other = agent_with(&pem).map_err(|why| format!("{} {why}", path.display()))?;
                *agent = (Arc::new(pem), other);
            }
            // While a file is replaced, it may be missing.
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(format!("{}: {error}", path.display())),
        }
        Ok(agent.1.clone())
    }
}

fn agent_with(pem: &[u8]) -> Result<Agent, String> {
    let roots: Vec<Certificate<'static>> = parse_pem(pem)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if roots.is_empty() {
        return Err("has no certificate".to_owned());
    }
    Ok(agent_of(TlsConfig::builder().root_certs(RootCerts::new_with_certs(&roots)).build()))
}

fn agent_of(tls: TlsConfig) -> Agent {
    let config = Agent::config_builder()
        .tls_config(tls)
        .proxy(None)
        .http_status_as_error(false)
        .max_redirects(0)
        .user_agent("snowskin");
    config.build().new_agent()
}

/// Whether a text is the name of a namespace or of an object: a DNS label (RFC 1123 §2.1).
#[must_use]
pub fn is_name(text: &str, bytes_max: usize) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=bytes_max).contains(&text.len())
        && text.bytes().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Why an answer refuses: its status, and the message of its `Status` object.
#[must_use]
pub fn refusal(status: u16, body: &[u8], rights: &str) -> String {
    let said = serde_json::from_slice::<serde_json::Value>(body).unwrap_or_default();
    let why: String = said["message"].as_str().unwrap_or("no reason").chars().take(200).collect();
    let hint = match status {
        401 | 403 => format!(": give the service account {rights}"),
        _ => String::new(),
    };
    format!("status {status}: {why}{hint}")
}
