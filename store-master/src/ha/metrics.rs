//! Metrics of one of several masters.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use store_core::ha::Role;

use super::HaStats;
use crate::metrics::{counter, gauge, signed};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MasterLabels {
    master: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabels {
    role: &'static str,
}

/// Registers the metrics. `answers_held` is the number of answers that wait for other masters.
pub(crate) fn register(registry: &mut Registry, ha: &HaStats, answers_held: u64) {
    let status = &ha.status;
    let roles = Family::<RoleLabels, Gauge>::default();
    for role in [Role::Joining, Role::Following, Role::Leading] {
        let is = i64::from(role == status.role);
        roles.get_or_create(&RoleLabels { role: role.name() }).set(is);
    }
    registry.register("ha_role", "1 for what this master does, 0 for what it does not", roles);
    let in_sync = status.record.as_ref().map_or(0, |record| record.in_sync.len() as u64);
    for (name, help, value) in [
        ("ha_serving", "Whether this master takes requests", u64::from(ha.serving)),
        ("ha_lineage", "Which state the store has: new when all was lost", status.reign.lineage),
        ("ha_term", "Which leader of this state is the latest that is known", status.reign.term),
        ("ha_lsn", "Number of the last command that this master has", status.lsn),
        ("ha_masters", "Masters that are known", ha.rpc.len() as u64),
        ("ha_in_sync", "Masters that may take over, the leader included", in_sync),
        ("ha_answers_held", "Answers that wait for other masters", answers_held),
        ("ha_history_bytes", "Commands that are kept for other masters, bytes", status.history_bytes),
    ] {
        gauge(registry, name, help, value);
    }
    let acked = Family::<MasterLabels, Gauge>::default();
    for peer in &status.peers {
        acked.get_or_create(&MasterLabels { master: peer.id.0.to_string() }).set(signed(peer.acked));
    }
    registry.register("ha_acked_lsn", "Number of the last command that another master has", acked);
    let totals = &status.totals;
    for (name, help, value) in [
        ("ha_takeovers", "Times that this master has begun to lead", totals.led),
        ("ha_depositions", "Times that this master has ceased to lead", totals.deposed),
        ("ha_arbiter_errors", "Requests that the arbiter has not answered", totals.arbiter_errors),
        ("ha_digest_mismatch", "Times that this master's state was not the leader's", totals.diverged),
        ("ha_snapshots_taken", "Snapshots for other masters", totals.snapshots_taken),
        ("ha_snapshots_loaded", "Snapshots of other masters", totals.snapshots_loaded),
        ("ha_snapshots_refused", "Snapshots that could not be loaded", totals.snapshots_refused),
        ("ha_messages_dropped", "Messages for which too many others waited", ha.links_dropped),
    ] {
        counter(registry, name, help, value);
    }
}
