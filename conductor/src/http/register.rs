//! `/register` and `/unregister`.

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde::Serialize;

use super::forms::RegisterForm;
use super::{App, From, Refused, value};
use crate::discovery;
use crate::registry::{self, Positions, RegisterError};

#[derive(Serialize)]
struct Registered {
    status: &'static str,
    instance_id: String,
}

#[derive(Serialize)]
struct Unregistered {
    status: &'static str,
    removed_instances: Vec<String>,
}

/// Registers an engine, and begins to read its events.
pub(super) async fn register(
    State(app): State<App>,
    from: From,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refused> {
    app.authorize(&headers, from.0).await?;
    let form: RegisterForm = form(&app, body).await?;
    let engine = app.counted(form.engine().map_err(Refused::Bad))?;
    let checked =
        engine.validate().map_err(|error| Refused::Bad(format!("`{}` {}", error.field, error.need)));
    app.counted(checked)?;
    let engine = discovery::complete(engine).await.map_err(|error| Refused::Engine(error.to_string()))?;
    let registered = registry::register(&app.shared, &app.commander, &engine, &Positions::new());
    app.counted(registered.map_err(|error| match error {
        RegisterError::Differs(_) | RegisterError::Knowledge(_) | RegisterError::Scheduler(_) => {
            Refused::Conflict(error.to_string())
        }
        RegisterError::Config(_) | RegisterError::Unresolved => Refused::Bad(error.to_string()),
        RegisterError::Stopping => Refused::Busy("the Conductor is stopping"),
    }))?;
    let status = "registered successfully";
    Ok(value(&Registered { status, instance_id: engine.instance }))
}

/// Takes out an instance or one of its ranks, with everything that is known of it.
pub(super) async fn unregister(
    State(app): State<App>,
    from: From,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refused> {
    app.authorize(&headers, from.0).await?;
    let form: RegisterForm = form(&app, body).await?;
    let (tenant, instance, rank) = app.counted(form.identity().map_err(Refused::Bad))?;
    let ranks = registry::unregister(&app.shared, &app.commander, &tenant, &instance, rank).await;
    if ranks.is_empty() {
        return Err(Refused::Missing(format!("tenant {tenant} has no instance {instance} of that rank")));
    }
    let status = "unregistered successfully";
    let removed_instances = ranks.iter().map(|rank| format!("{instance}|{tenant}|{rank}")).collect();
    Ok(value(&Unregistered { status, removed_instances }))
}

/// A form.
async fn form<T: serde::de::DeserializeOwned>(app: &App, body: Body) -> Result<T, Refused> {
    let body = app.body(body).await?;
    app.counted(serde_json::from_slice(&body).map_err(|error| Refused::Bad(error.to_string())))
}
