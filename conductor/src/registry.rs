//! Engines come and go: settings, `POST /register` and `/unregister`.

use std::fmt;
use std::sync::Arc;

use conductor_core::InstanceId;
use conductor_core::knowledge::{self, PublisherId, Registration};
use conductor_core::scheduler::{InstanceSpec, Role as Placed};
use conductor_core::stream::{FenceReason, Position};
use tokio::sync::oneshot;

use crate::config::{ConfigError, Endpoint, EngineConfig, Role};
use crate::directory::{Instance, Publisher};
use crate::io::{Command, Commander, Subscription};
use crate::proxy::Pool;
use crate::shared::Shared;

/// Why an engine was not registered.
#[derive(Debug)]
pub enum RegisterError {
    /// A value is out of its range.
    Config(ConfigError),
    /// The engine has to say something first that was left to it.
    Unresolved,
    /// The index refused it.
    Knowledge(knowledge::RegisterError),
    /// The instance is registered with another model, address or role.
    Differs(String),
    /// The scheduler refused it.
    Scheduler(conductor_core::scheduler::InstanceError),
    /// The Conductor is stopping.
    Stopping,
}

impl fmt::Display for RegisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(ConfigError { field, need }) => write!(f, "`{field}` {need}"),
            Self::Unresolved => {
                f.write_str("`block_size` and `dp_ranks` must be given, or the engine must say them")
            }
            Self::Knowledge(error) => error.fmt(f),
            Self::Differs(what) => {
                write!(f, "the instance is registered with another {what}: unregister it first")
            }
            Self::Scheduler(error) => error.fmt(f),
            Self::Stopping => f.write_str("the Conductor is stopping"),
        }
    }
}

impl std::error::Error for RegisterError {}

/// Where the publishers of a snapshot were.
pub(crate) type Positions = std::collections::HashMap<PublisherId, Position>;

/// Registers every rank of an engine and subscribes to it. Ranks that are registered already with the same
/// values stay as they are; those whose endpoint has changed are subscribed to anew.
///
/// # Errors
/// See [`RegisterError`]. Ranks before the one that was refused are registered.
pub(crate) fn register(
    shared: &Shared,
    commander: &Commander,
    engine: &EngineConfig,
    positions: &Positions,
) -> Result<InstanceId, RegisterError> {
    engine.validate().map_err(RegisterError::Config)?;
    if engine.block_tokens == 0 || engine.dp_ranks == 0 {
        return Err(RegisterError::Unresolved);
    }
    check_same(shared, engine)?;
    let mut instance = None;
    for rank in 0..engine.dp_ranks {
        let of_rank = of_rank(engine, rank);
        let registration = registration(&of_rank);
        let mut knowledge = shared.knowledge.write();
        let id = knowledge.register(registration).map_err(RegisterError::Knowledge)?;
        let named = knowledge.publishers().find(|(known, ..)| *known == id).map(|(.., instance)| instance);
        drop(knowledge);
        let Some(number) = named else { continue };
        instance = Some(number);
        let known = shared.directory().publishers.get(&id).map(|known| known.engine.clone());
        match known {
            Some(known) if known == of_rank => continue,
            // The endpoint has changed: no caller waits for the former subscription to end, because commands
            // are carried out in their order.
            Some(_) => _ = commander.send(Command::Remove(id, oneshot::channel().0)),
            None => add_instance(shared, number, engine)?,
        }
        subscribe(shared, commander, id, number, of_rank, positions)?;
    }
    instance.ok_or(RegisterError::Unresolved)
}

/// The entry of one rank.
fn of_rank(engine: &EngineConfig, rank: u32) -> EngineConfig {
    let at = |text: &str| {
        let endpoint = Endpoint::parse(text).and_then(|endpoint| endpoint.of_rank(rank));
        endpoint.map(|endpoint| format!("tcp://{}", endpoint.authority())).unwrap_or_default()
    };
    EngineConfig {
        endpoint: at(&engine.endpoint),
        replay_endpoint: at(&engine.replay_endpoint),
        dp_rank: engine.dp_rank + rank,
        dp_ranks: 1,
        ..engine.clone()
    }
}

fn registration(engine: &EngineConfig) -> Registration {
    let text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    Registration {
        instance: engine.instance.clone(),
        tenant: engine.tenant.clone(),
        model: engine.model.clone(),
        block_tokens: engine.block_tokens,
        lora: text(&engine.lora),
        salt: text(&engine.salt),
        dp_rank: engine.dp_rank,
        dialect: engine.kind.dialect(),
        role: match engine.kind.is_store() {
            true => knowledge::Role::Store { objects_per_block: 1 },
            false => knowledge::Role::Engine,
        },
    }
}

/// Refuses an entry that contradicts what is known of its instance.
fn check_same(shared: &Shared, engine: &EngineConfig) -> Result<(), RegisterError> {
    let directory = shared.directory();
    let Some(known) =
        directory.find(&engine.tenant, &engine.instance).and_then(|id| directory.instances.get(&id))
    else {
        return Ok(());
    };
    let differs = [
        ("model", known.model != engine.model),
        ("block_size", known.block_tokens != engine.block_tokens),
        ("role", known.role != engine.role),
        ("class", known.class != engine.class),
        ("HTTP address", !engine.http.is_empty() && known.http != engine.http_address()),
        ("type", known.is_store != engine.kind.is_store()),
    ];
    match differs.into_iter().find(|(_, differs)| *differs) {
        Some((what, _)) => Err(RegisterError::Differs(what.to_owned())),
        None => Ok(()),
    }
}

/// Makes an instance known to the scheduler, unless it is.
fn add_instance(shared: &Shared, number: InstanceId, engine: &EngineConfig) -> Result<(), RegisterError> {
    if shared.directory().instances.contains_key(&number) {
        return Ok(());
    }
    let instance = Instance {
        tenant: engine.tenant.clone(),
        name: engine.instance.clone(),
        model: engine.model.clone(),
        block_tokens: engine.block_tokens,
        bootstrap_port: engine.bootstrap_port,
        role: engine.role,
        class: engine.class.clone(),
        is_store: engine.kind.is_store(),
        http: engine.http_address().to_owned(),
        pool: match engine.http_address() {
            "" => None,
            address => Pool::new(address).ok().map(Arc::new),
        },
        kind: engine.kind,
    };
    if !instance.is_store {
        let mut schedule = shared.schedule();
        let role = placed(engine.role);
        let of = (engine.tenant.as_str(), engine.model.as_str());
        let (model, kind) = schedule.join(of, role, &engine.class);
        let spec = InstanceSpec { model, ..InstanceSpec::new(number, role, kind) };
        if let Err(error) = schedule.scheduler.add_instance(spec) {
            schedule.kinds.leave(of, role, &engine.class);
            return Err(RegisterError::Scheduler(error));
        }
        // Nothing is placed on it before it is heard.
        schedule.scheduler.instance_lost(shared.now(), number);
    }
    shared.directory_mut().instances.insert(number, instance);
    Ok(())
}

/// A role, as the scheduler names it.
const fn placed(role: Role) -> Placed {
    match role {
        Role::Prefill => Placed::Prefill,
        Role::Decode => Placed::Decode,
        Role::Both => Placed::Both,
    }
}

/// Subscribes to one rank.
fn subscribe(
    shared: &Shared,
    commander: &Commander,
    id: PublisherId,
    instance: InstanceId,
    engine: EngineConfig,
    positions: &Positions,
) -> Result<(), RegisterError> {
    let endpoint = Endpoint::parse(&engine.endpoint);
    let served = endpoint.is_none();
    let mut position = positions.get(&id).copied();
    if position.is_some() && shared.replicas.follows(engine.kind) {
        // The names of objects are not in snapshots: the store tells everything anew.
        shared.knowledge.write().fence(id, FenceReason::Unverifiable);
        position = None;
    }
    let subscription = endpoint.map(|endpoint| Subscription {
        id,
        name: format!("{}/{}", engine.instance, engine.dp_rank),
        kind: engine.kind,
        endpoint,
        replay: Endpoint::parse(&engine.replay_endpoint),
        bind: engine.bind,
        topic: engine.topic.clone(),
        position,
    });
    let publisher = Publisher { instance, dp_rank: engine.dp_rank, engine, served };
    shared.directory_mut().publishers.insert(id, publisher);
    match subscription {
        Some(subscription) => match commander.send(Command::Add(Box::new(subscription))) {
            true => Ok(()),
            false => Err(RegisterError::Stopping),
        },
        // An engine that publishes nothing is taken to be there.
        None => {
            shared.set_up(instance, true);
            Ok(())
        }
    }
}

/// Forgets what one rank said, and reads it from the start.
pub(crate) fn read_anew(shared: &Shared, commander: &Commander, tenant: &str, instance: &str, dp_rank: u32) {
    if let Some((_, found)) = publishers_of(shared, tenant, instance, Some(dp_rank)) {
        for (id, _) in found {
            commander.send(Command::ReadAnew(id));
        }
    }
}

/// An instance, and its publishers: that of one rank, or all.
fn publishers_of(
    shared: &Shared,
    tenant: &str,
    instance: &str,
    dp_rank: Option<u32>,
) -> Option<(InstanceId, Vec<(PublisherId, u32)>)> {
    let directory = shared.directory();
    let number = directory.find(tenant, instance)?;
    let wanted = |publisher: &Publisher| {
        publisher.instance == number && dp_rank.is_none_or(|rank| rank == publisher.dp_rank)
    };
    let found = directory.publishers.iter().filter(|(_, publisher)| wanted(publisher));
    Some((number, found.map(|(id, publisher)| (*id, publisher.dp_rank)).collect()))
}

/// Takes out the publishers of an instance: that of one rank, or all. Returns the ranks that were taken out.
pub(crate) async fn unregister(
    shared: &Shared,
    commander: &Commander,
    tenant: &str,
    instance: &str,
    dp_rank: Option<u32>,
) -> Vec<u32> {
    let Some((number, found)) = publishers_of(shared, tenant, instance, dp_rank) else { return Vec::new() };
    for (id, _) in &found {
        let (done, wait) = oneshot::channel();
        if commander.send(Command::Remove(*id, done)) {
            let _ = wait.await;
        }
        shared.knowledge.write().unregister(*id);
        shared.directory_mut().publishers.remove(id);
    }
    forget_if_empty(shared, number);
    found.into_iter().map(|(_, rank)| rank).collect()
}

/// Forgets an instance without publishers.
fn forget_if_empty(shared: &Shared, number: InstanceId) {
    let mut directory = shared.directory_mut();
    if directory.publishers.values().all(|publisher| publisher.instance != number) {
        let Some(gone) = directory.instances.remove(&number) else { return };
        drop(directory);
        let mut schedule = shared.schedule();
        if schedule.scheduler.remove_instance(shared.now(), number) {
            schedule.kinds.leave((&gone.tenant, &gone.model), placed(gone.role), &gone.class);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::config::{Config, LimitsConfig};
    use crate::io::EventThread;

    #[tokio::test]
    async fn ten_thousand_engines_that_come_and_go_leave_nothing_behind() {
        let limits = LimitsConfig { contexts_max: 32, publishers_max: 64, ..LimitsConfig::default() };
        let (commander, prepared) = EventThread::prepare().unwrap();
        let shared = Arc::new(Shared::new(Config { limits, ..Config::default() }));
        let events = EventThread::start(prepared, Arc::clone(&shared)).unwrap();
        for round in 0..10_000 {
            let engine = EngineConfig {
                instance: format!("i{round}"),
                model: format!("m{}", round % 100),
                class: format!("c{}", round % 3_000),
                // It publishes nothing, so that no socket is opened.
                http: "127.0.0.1:1".into(),
                ..EngineConfig::default()
            };
            register(&shared, &commander, &engine, &Positions::new()).unwrap();
            let ranks = unregister(&shared, &commander, &engine.tenant, &engine.instance, None).await;
            assert_eq!(ranks, [0], "round {round}");
        }
        let directory = shared.directory();
        assert_eq!((directory.instances.len(), directory.publishers.len()), (0, 0));
        let knowledge = shared.knowledge.read();
        assert_eq!((knowledge.contexts().count(), knowledge.publishers().count()), (32, 0));
        let sizes = shared.schedule().kinds.sizes();
        assert!(sizes.0 <= 32 && sizes.1 <= crate::kinds::KINDS_MAX, "{sizes:?}");
        drop((directory, knowledge, events));
    }
}
