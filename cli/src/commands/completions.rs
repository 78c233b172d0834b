//! `snowskin completions` and `snowskin man`: completion scripts for shells, and manual pages.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::args::Cli;
use crate::exit::{EXIT_CODES, Exit};
use crate::{Outcome, output};

const COMPLETIONS_HELP: &str = "Examples:
  snowskin completions bash > /etc/bash_completion.d/snowskin
  snowskin completions zsh > \"${fpath[1]}/_snowskin\"
  snowskin completions fish > ~/.config/fish/completions/snowskin.fish";

const MAN_HELP: &str = "Examples:
  snowskin man | man -l -
  snowskin man --out /usr/local/share/man/man1
  man snowskin-put";

/// Print the completion script of a shell
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{COMPLETIONS_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Completions {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Print the manual page, or write the pages of all commands
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{MAN_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Man {
    /// Write one page per command into this directory, which is created if it does not exist.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Completions) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "snowskin", &mut script);
    output::print_bytes(&script)?;
    Ok(Exit::Ok)
}

pub(crate) fn man(args: &Man) -> Outcome {
    match &args.out {
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command()).render(&mut page)?;
            output::print_bytes(&page)?;
        }
        Some(dir) => {
            let context = || format!("cannot write manual pages to {}", dir.display());
            std::fs::create_dir_all(dir).with_context(context)?;
            clap_mangen::generate_to(Cli::command(), dir).with_context(context)?;
        }
    }
    Ok(Exit::Ok)
}
