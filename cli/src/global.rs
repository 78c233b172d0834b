//! The options that every command has.

use clap::ArgAction;

/// Options of every command.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Global {
    /// Log more to stderr: -v info, -vv debug, -vvv trace. --log selects by module.
    #[arg(short, long, action = ArgAction::Count, global = true, display_order = 900)]
    pub(crate) verbose: u8,
    /// Show no progress bars. They appear only on a terminal.
    #[arg(
        short,
        long,
        global = true,
        env = "SNOWSKIN_QUIET",
        value_parser = clap::builder::FalseyValueParser::new(),
        action = ArgAction::SetTrue,
        hide_env_values = true,
        display_order = 901
    )]
    pub(crate) quiet: bool,
}

impl Global {
    /// The flags that pass these options on to a child process.
    pub(crate) fn to_args(self) -> Vec<String> {
        (0..self.verbose).map(|_| "--verbose".to_owned()).collect()
    }
}
