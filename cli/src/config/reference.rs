//! The reference page, out of the keys.

use std::fmt::Write as _;

use super::keys;

/// `docs/reference/config.md`.
pub(crate) fn page() -> String {
    let mut out = String::from(
        "# Settings\n\n\
         This page is generated: `cargo xtask reference` writes it, and a test fails when it is not what the program says.\n\n\
         Every command reads, each over the one before: its defaults, a TOML file (`--config FILE` or `SNOWSKIN_CONFIG`), variables\n\
         `SNOWSKIN_*`, flags. One file may hold the sections of all processes of a cluster. What is not a setting, has another type\n\
         or is out of its limits keeps the command from starting, with the file and line. `snowskin config check FILE` says so\n\
         without starting anything; `snowskin config show` prints what is in force and where it came from. Variables that look\n\
         like settings and are none are warned of, not refused: orchestrators invent such (`SNOWSKIN_MASTER_SERVICE_HOST`).\n\n\
         A setting `section.name` is `name` under `[section]` in the file, and `SNOWSKIN_SECTION_NAME` in the environment. Its flag\n\
         is in the table: of `snowskin master` for `[master]`, `snowskin node` for `[node]`, commands that move objects for\n\
         `[client]`, all that ask a master for `[cluster]`, and every command for `[log]`. The long form of a flag, such as\n\
         `--store-lease-ttl-ms` for `--lease-ms`, is taken as well. Where a value may be none, write `none`. Sizes may be written as\n\
         `64KiB`, in quotes in the file.\n\n\
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
        let short = key.variable_short.map(|name| format!(" Also `{name}`.")).unwrap_or_default();
        let _ = writeln!(
            out,
            "| `{name}` | `--{}` | {} | `{}` | {}{short} |",
            key.flag,
            cell(&key.kind()),
            cell(&key.default_shown()),
            cell(&key.doc),
        );
    }
    out
}
