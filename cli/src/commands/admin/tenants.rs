//! `snowskin admin tenants`: the tenants that share the store, and their limits.

use serde::Serialize;
use store_client::RpcError;
use store_core::message::{
    RemoveMany, RemoveQuery, TenantList, TenantRemove, TenantSet, TenantSetting, TenantUsage,
};
use store_core::{ErrorCode, Key};

use crate::commands::{MasterArg, no_master};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::{Align, Table, printable, thousands};
use crate::size::ByteSize;
use crate::{Outcome, output};

const AFTER_HELP: &str = "Examples:
  snowskin admin tenants
  snowskin admin tenants --set team-a --quota 64GiB --guaranteed 16GiB
  snowskin admin tenants --remove team-a --force         and all its objects

Changes are lost when the master ends: put permanent ones into its settings.";

/// List tenants with their usage, or change one
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Add this tenant, or change its limits. A limit that is not given is removed.
    #[arg(long, value_name = "TENANT", conflicts_with = "remove")]
    set: Option<String>,
    /// Most bytes, such as 64GiB; each replica counts.
    #[arg(long, value_name = "SIZE", requires = "set")]
    quota: Option<ByteSize>,
    /// Most objects.
    #[arg(long, value_name = "N", requires = "set")]
    quota_objects: Option<u32>,
    /// Most bytes on disks, such as 2TiB.
    #[arg(long, value_name = "SIZE", requires = "set")]
    quota_disk: Option<ByteSize>,
    /// Bytes that puts of other tenants cannot evict.
    #[arg(long, value_name = "SIZE", requires = "set")]
    guaranteed: Option<ByteSize>,
    /// File with the new secret; without it, the secret is unchanged.
    #[arg(long, value_name = "FILE", requires = "set")]
    new_secret: Option<std::path::PathBuf>,
    /// Remove this tenant, which must have no objects.
    #[arg(long, value_name = "TENANT")]
    remove: Option<String>,
    /// Remove its objects first.
    #[arg(long, requires = "remove")]
    force: bool,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON object per tenant.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row<'a> {
    #[serde(flatten)]
    usage: TenantUsage<'a>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let mut rpc = args.master.connect()?;
    if let Some(name) = &args.set {
        let secret = args.new_secret.as_ref().map(std::fs::read_to_string).transpose();
        let secret = secret.map_err(|error| Failure::usage(format!("--new-secret: {error}")))?;
        let setting = TenantSetting {
            name,
            quota_bytes: args.quota.map(|size| size.0),
            quota_objects: args.quota_objects,
            quota_disk_bytes: args.quota_disk.map(|size| size.0),
            guaranteed_bytes: args.guaranteed.map_or(0, |size| size.0),
            secret: secret.as_deref().map(|text| Key(text.trim_end().as_bytes())),
        };
        rpc.call::<TenantSet>(&setting, std::iter::empty()).map_err(|error| match error {
            RpcError::Refused(ErrorCode::InvalidParams) => {
                anyhow::Error::from(Failure::failed(format!("the master refuses tenant {}: {error}", printable(name)))
                    .hint("a master that was started without tenants (`snowskin master --tenants FILE`) has the default tenant only"))
            }
            error => no_master(error),
        })?;
    }
    if let Some(name) = &args.remove {
        if args.force {
            let mut theirs = args.master.connect_to(name)?;
            let mut query = RemoveQuery { pattern: None, cursor: 0, force: true };
            loop {
                let (page, _) = theirs.call::<RemoveMany>(&query, std::iter::empty()).map_err(no_master)?;
                query.cursor = page.cursor;
                if page.cursor == 0 {
                    break;
                }
            }
        }
        rpc.call::<TenantRemove>(&name.as_str(), std::iter::empty()).map_err(no_master)?;
    }
    let ((), usages) = rpc.call::<TenantList>(&(), std::iter::empty()).map_err(no_master)?;
    let usages = usages.filter_map(Result::ok);
    if args.json {
        usages.map(|usage| Row { usage }).try_for_each(|row| output::print_json(&row))?;
    } else {
        output::print(&render(usages))?;
    }
    Ok(Exit::Ok)
}

fn render<'a>(usages: impl Iterator<Item = TenantUsage<'a>>) -> String {
    let mut table = Table::new(&[
        ("tenant", Align::Left),
        ("objects", Align::Right),
        ("used", Align::Right),
        ("not yet free", Align::Right),
        ("quota", Align::Right),
        ("guaranteed", Align::Right),
        ("on disks", Align::Right),
        ("quota there", Align::Right),
        ("evicted", Align::Right),
        ("refused", Align::Right),
    ]);
    let size = |bytes| ByteSize(bytes).approximate();
    for usage in usages {
        table.row([
            printable(usage.name),
            thousands(usage.objects),
            size(usage.bytes),
            size(usage.held_bytes),
            usage.quota_bytes.map_or_else(|| "none".to_owned(), size),
            size(usage.guaranteed_bytes),
            size(usage.disk_bytes),
            usage.quota_disk_bytes.map_or_else(|| "none".to_owned(), size),
            thousands(usage.evictions_total),
            thousands(usage.refusals_total),
        ]);
    }
    table.render()
}
