//! The settings reference page, generated from the keys.

use std::fmt::Write as _;

use super::keys;

/// The text of `docs/reference/config.md`.
pub(crate) fn page() -> String {
    let mut out = String::from(
        "# Settings\n\n\
         This page is generated: `cargo xtask reference` writes it, and a test fails when it differs from \
         the program.\n\n\
         Every command reads its settings from four sources, each overriding the one before: built-in \
         defaults, a TOML file\n\
         (`--config FILE` or `SNOWSKIN_CONFIG`), environment variables `SNOWSKIN_*`, and flags. One file may \
         hold the sections of\n\
         all processes of a cluster. An unknown setting, a value of the wrong type or a value out of its \
         limits keeps the command\n\
         from starting, and the error names the file and line. `snowskin config check FILE` checks a file \
         without starting\n\
         anything; `snowskin config show` prints the values in force and their origins. A variable that only \
         looks like a\n\
         setting causes a warning and not an error, because orchestrators define such variables\n\
         (`SNOWSKIN_MASTER_SERVICE_HOST`).\n\n\
         A setting `section.name` is `name` under `[section]` in the file, and `SNOWSKIN_SECTION_NAME` in \
         the environment. The\n\
         table lists its flag: `[master]` belongs to `snowskin master`, `[node]` to `snowskin node`, \
         `[client]` to commands that\n\
         move objects, `[cluster]` to all commands that send requests to a master, `[conductor]` to `snowskin \
         conductor serve`,\n\
         and `[log]` to every command. The long form of a flag, such as `--store-lease-ttl-ms` for \
         `--lease-ms`, is\n\
         accepted as well. Where a value may be none, write `none`.\n\
         Sizes may be written as `64KiB`, in quotes in the file. The old name of a renamed setting is \
         accepted for one release:\n\
         in the file and as a variable with a warning, as a flag without one. The new name wins over the old \
         one in the same\n\
         source.\n\n\
         ```toml\n\
         [cluster]\n\
         master = \"10.0.0.5:50051\"\n\n\
         [master]\n\
         rpc_listen = \"10.0.0.5:50051\"\n\
         http_listen = \"10.0.0.5:9003\"\n\n\
         [master.store]\n\
         lease_ttl_ms = 10000\n\n\
         [node]\n\
         capacity_bytes = \"64GiB\"\n\
         ```\n",
    );
    let mut section = String::new();
    for key in keys::all() {
        let (table, name) = key.path.rsplit_once('.').unwrap_or(("", &key.path));
        if table != section {
            section = table.to_owned();
            let _ = write!(
                out,
                "\n## `[{table}]`\n\n| Setting | Flag | May be | Default | What it is |\n|---|---|---|---|---|\n"
            );
        }
        let cell = |text: &str| text.replace('|', "\\|");
        let changes = key.path.strip_prefix("master.store.");
        let changes = changes.is_some_and(|name| store_core::ConfigChanges::NAMES.contains(&name));
        let changes = if changes { " Can be changed while the master serves." } else { "" };
        let short = key.variable_short.map(|name| format!(" Also `{name}`.")).unwrap_or_default();
        let _ = writeln!(
            out,
            "| `{name}` | `--{}` | {} | `{}` | {}{changes}{short} |",
            key.flag,
            cell(&key.kind()),
            cell(&key.default_shown()),
            cell(&key.doc),
        );
    }
    out
}
