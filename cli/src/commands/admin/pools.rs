//! `snowskin admin pools`: which processes own extents of CXL pools, and which have pages of them.

use std::fmt::Write as _;

use serde::Serialize;
use store_core::message::{FreePage, ListPools, PageFreed, PoolEntry};

use super::list::node_name;
use crate::commands::{MasterArg, no_master};
use crate::exit::{EXIT_CODES, Exit};
use crate::output::{Align, Table, printable};
use crate::{Outcome, output};

const AFTER_HELP: &str = "Examples:
  snowskin admin pools
  snowskin admin pools --json | jq '.[] | select(.what == \"page\" and .number == 3)'
  snowskin admin pools --free-page 3 --epoch 3843995742208 --pool 6f1c0d3a2b4e4f5a8c9d0e1f2a3b4c5d";

/// List who has which extents and pages of CXL pools, or free a page
///
/// A page stays with its process until another process of the same host finds that it has ended. Free one
/// only when its process, or its host, can write the pool no more: otherwise bytes of other processes may
/// change.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    /// Free this page: the process that had it can write the pool no more.
    #[arg(long, value_name = "NUMBER", requires_all = ["pool", "epoch"])]
    free_page: Option<u32>,
    /// The epoch of the page, as the list shows it: a page that was given to another process since is not
    /// freed.
    #[arg(long, value_name = "EPOCH", requires = "free_page")]
    epoch: Option<u64>,
    /// The pool of the page, as the list shows it.
    #[arg(long, value_name = "POOL", requires = "free_page", value_parser = pool_of)]
    pool: Option<[u8; 16]>,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
}

/// Extents or a page, for tables and JSON.
#[derive(Debug, Serialize)]
struct Row {
    pool: String,
    /// `extents` or `page`.
    what: &'static str,
    /// The first extent, or the page.
    number: u32,
    count: u32,
    /// Epochs and identities are texts in JSON, because numbers above 2^53 are not exact in many languages.
    epoch: String,
    /// The name and the number of the node of extents, the identity of the process of a page.
    holder: String,
    /// `alive` or `silent` for extents; `taken` or `free` for a page.
    state: &'static str,
}

impl Row {
    fn of(entry: PoolEntry<'_>) -> Self {
        match entry {
            PoolEntry::Extents { pool, first, count, node, name, epoch, alive } => Self {
                pool: name_of(pool),
                what: "extents",
                number: first,
                count,
                epoch: epoch.to_string(),
                holder: format!("{} ({})", printable(name), node_name(node)),
                state: if alive { "alive" } else { "silent" },
            },
            PoolEntry::Page { pool, slot, identity, epoch, free } => Self {
                pool: name_of(pool),
                what: "page",
                number: slot,
                count: 1,
                epoch: epoch.to_string(),
                holder: if identity == 0 { "unknown".to_owned() } else { format!("{identity:016x}") },
                state: if free { "free" } else { "taken" },
            },
        }
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    let mut rpc = args.master.connect()?;
    if let (Some(slot), Some(pool), Some(epoch)) = (args.free_page, args.pool, args.epoch) {
        rpc.call::<FreePage>(&PageFreed { pool, slot, epoch }, std::iter::empty()).map_err(no_master)?;
    }
    let ((), entries) = rpc.call::<ListPools>(&(), std::iter::empty()).map_err(no_master)?;
    let rows: Vec<Row> = entries.map(Row::of).collect();
    if args.json {
        output::print_json(&rows)?;
    } else if rows.is_empty() {
        output::print("the master knows no CXL pool: a node with `cxl.pool` contributes one\n")?;
    } else {
        output::print(&table(&rows))?;
    }
    Ok(Exit::Ok)
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new(&[
        ("pool", Align::Left),
        ("what", Align::Left),
        ("number", Align::Right),
        ("count", Align::Right),
        ("epoch", Align::Right),
        ("holder", Align::Left),
        ("state", Align::Left),
    ]);
    for row in rows {
        table.row([
            row.pool.clone(),
            row.what.to_owned(),
            row.number.to_string(),
            row.count.to_string(),
            row.epoch.clone(),
            row.holder.clone(),
            row.state.to_owned(),
        ]);
    }
    table.render()
}

fn name_of(pool: [u8; 16]) -> String {
    pool.iter().fold(String::new(), |mut text, byte| {
        // Writing to a text does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Reads the name of a pool: 32 hexadecimal digits, with dashes or without.
fn pool_of(text: &str) -> Result<[u8; 16], String> {
    let digits = text.replace('-', "");
    let is_name = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| is_name);
    number
        .map(u128::to_be_bytes)
        .ok_or_else(|| format!("`{text}` is not the name of a pool: give its 32 hexadecimal digits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_pool_is_read_as_it_is_written_and_other_texts_are_refused() {
        let pool = std::array::from_fn(|at| 0x11 * at as u8);
        assert_eq!(pool_of(&name_of(pool)), Ok(pool));
        assert_eq!(pool_of("00112233-4455-6677-8899-aabbccddeeff"), Ok(pool));
        for bad in ["", "0011", "+0112233445566778899aabbccddeeff", "00112233445566778899aabbccddeeff00"] {
            let refused = pool_of(bad);
            assert!(refused.is_err_and(|text| text.contains("32 hexadecimal digits")), "{bad}");
        }
    }

    #[test]
    fn a_table_shows_extents_and_pages() {
        let extents = PoolEntry::Extents {
            pool: [7; 16],
            first: 4,
            count: 8,
            node: store_core::NodeId::new(3),
            name: "n1",
            epoch: 12,
            alive: true,
        };
        let page = PoolEntry::Page { pool: [7; 16], slot: 2, identity: 0, epoch: 13, free: true };
        let text = table(&[Row::of(extents), Row::of(page)]);
        for part in ["07070707", "extents", "n1 (0000000000000003)", "alive", "page", "unknown", "free"] {
            assert!(text.contains(part), "{part}:\n{text}");
        }
    }
}
