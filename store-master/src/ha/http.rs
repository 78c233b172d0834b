//! What one of several masters says over HTTP.

use std::net::SocketAddr;

use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::http::HeaderMap;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use store_core::ha::{MemberId, Role, Stage};

use super::HaStats;
use crate::admin::{Refusal, json, read};
use crate::http::Asker;

/// The masters, as one of them sees them.
#[derive(Debug, Serialize)]
struct Masters {
    /// This one. Numbers are texts, because those above 2^53 are not exact in many languages.
    id: String,
    /// `leading`, `following` or `joining`; `alone`: it is not one of several.
    role: &'static str,
    /// Whether it takes requests.
    serving: bool,
    lineage: u64,
    term: u64,
    /// The last command that it has.
    lsn: u64,
    masters: Vec<Master>,
}

#[derive(Debug, Serialize)]
struct Master {
    id: String,
    /// Where clients and nodes reach it.
    rpc: String,
    leads: bool,
    /// It has every command whose answer was given, so it may take over.
    in_sync: bool,
    /// What this master knows of it, if this one leads: `waits`, `receives`, `follows`.
    stage: Option<&'static str>,
    /// The last command that it has, if this one leads.
    lsn: Option<u64>,
}

impl HaStats {
    /// What Mooncake's master says of its role.
    pub(crate) fn mooncake_role(&self) -> &'static str {
        if self.status.role == Role::Leading { "leader" } else { "standby" }
    }

    /// What Mooncake's master says of its state.
    pub(crate) fn mooncake_state(&self) -> &'static str {
        match self.status.role {
            Role::Leading if self.serving => "serving",
            Role::Leading => "switching_over",
            Role::Following => "standby",
            Role::Joining => "joining",
        }
    }

    fn masters(&self) -> Masters {
        let status = &self.status;
        let record = status.record.as_ref();
        let master = |(id, rpc): (&u64, &String)| {
            let peer = status.peers.iter().find(|peer| peer.id.0 == *id);
            let own = *id == self.id;
            Master {
                id: id.to_string(),
                rpc: rpc.clone(),
                leads: record.is_some_and(|record| record.leader.0 == *id),
                in_sync: match peer {
                    Some(peer) => peer.in_sync,
                    None => record.is_some_and(|record| record.in_sync.contains(&MemberId(*id))),
                },
                stage: peer.map(|peer| match peer.stage {
                    Stage::Waits => "waits",
                    Stage::Receives { .. } => "receives",
                    Stage::Follows => "follows",
                }),
                lsn: peer.map(|peer| peer.acked).or(own.then_some(status.lsn)),
            }
        };
        Masters {
            id: self.id.to_string(),
            role: status.role.name(),
            serving: self.serving,
            lineage: status.reign.lineage,
            term: status.reign.term,
            lsn: status.lsn,
            masters: self.rpc.iter().map(master).collect(),
        }
    }
}

pub(crate) async fn masters(State(asker): State<Asker>) -> Result<Response, Refusal> {
    let snapshot = asker.snapshot().await?;
    let alone = || Masters {
        id: "0".into(),
        role: "alone",
        serving: true,
        lineage: snapshot.epoch.into(),
        term: 1,
        lsn: 0,
        masters: Vec::new(),
    };
    Ok(json(&snapshot.ha.as_ref().map_or_else(alone, HaStats::masters)))
}

/// Body of a POST to `/api/v1/switchover`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct To {
    /// Which master is to lead, as `/api/v1/masters` names it; none: the one that is least behind.
    to: Option<String>,
}

#[derive(Serialize)]
struct Begun {
    to: String,
}

pub(crate) async fn switchover(
    State(asker): State<Asker>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refusal> {
    asker.may_change(peer, &headers).await?;
    let to: To = read(&headers, body).await?;
    let wrong = |to: &str| Refusal::Body(format!("`to` is {to:?}: write the number of a master, as text"));
    let to = match &to.to {
        None => None,
        Some(to) => Some(MemberId(to.parse().map_err(|_| wrong(to))?)),
    };
    match asker.hand_over(to).await? {
        Ok(to) => Ok(json(&Begun { to: to.0.to_string() })),
        Err(error) => Err(Refusal::HandOver(error)),
    }
}
