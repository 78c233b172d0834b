//! Metrics of the publisher of KV events.

use prometheus_client::registry::Registry;

use super::{counter, gauge};
use crate::kv_events::KvEventsStats;

/// Registers them, if this master publishes.
pub(crate) fn register(registry: &mut Registry, stats: Option<&KvEventsStats>) {
    let Some(stats) = stats else { return };
    gauge(registry, "kv_events_followers", "Subscribers to KV events", stats.followers);
    gauge(
        registry,
        "kv_events_objects",
        "Objects that are found, as far as followers were told",
        stats.objects,
    );
    for (name, help, value) in [
        (
            "kv_events",
            "KV events: objects that are found on a tier from then on, or no more",
            stats.events_total,
        ),
        ("kv_events_messages", "Messages with KV events", stats.messages_total),
        ("kv_events_epochs", "Epochs of KV events: followers forgot everything", stats.epochs_total),
        ("kv_events_replays", "Requests of followers for events that they missed", stats.replays_total),
        ("kv_events_snapshots", "Followers that were told every object", stats.snapshots_total),
        (
            "kv_events_missed",
            "Messages that a follower missed because it read too slowly",
            stats.missed_total,
        ),
        (
            "kv_events_refused",
            "Followers that were refused because too many were connected",
            stats.refused_total,
        ),
    ] {
        counter(registry, name, help, value);
    }
}
