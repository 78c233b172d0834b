//! `snowskin conductor query`: how much of a prompt each engine has.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::client::Client;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::{Align, Table, print, print_json, printable, thousands};
use crate::{Outcome, fail};

const AFTER_HELP: &str = "Examples:
  snowskin conductor query --model m --tokens 101,15,100,55
  snowskin conductor query --model m --tokens-file prompt.json     a JSON array, or numbers separated by blanks
  snowskin conductor query --model m --text 'You are a helpful assistant'
  snowskin conductor query --model m --tokens 1,2,3,4 --json";

/// Ask a Conductor how much of a prompt each engine has
///
/// Prints per instance the tokens of the prompt, from its beginning, that it has in the memory of its GPU, in
/// that or host memory, and on any tier. A text is tokenised by an engine that serves the model.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// HTTP address of the Conductor.
    #[arg(long, default_value = "127.0.0.1:13333", value_name = "HOST:PORT")]
    conductor: String,
    /// The model, as engines name it.
    #[arg(long, value_name = "NAME")]
    model: String,
    /// The tenant.
    #[arg(long, default_value = "default", value_name = "NAME")]
    of_tenant: String,
    /// Tokens per block; may be left out when all engines of the model agree.
    #[arg(long, value_name = "N")]
    block_size: Option<u32>,
    /// The LoRA adapter.
    #[arg(long, value_name = "NAME")]
    lora: Option<String>,
    #[command(flatten)]
    prompt: Prompt,
    /// Print the answer as JSON.
    #[arg(long)]
    json: bool,
    /// Timeout, milliseconds.
    #[arg(long, default_value_t = 5_000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    timeout_ms: u64,
}

/// The prompt, in one of three forms.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Prompt {
    /// Token ids, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "ID,…")]
    tokens: Option<Vec<u32>>,
    /// A file with token ids.
    #[arg(long, value_name = "FILE")]
    tokens_file: Option<PathBuf>,
    /// A text.
    #[arg(long, value_name = "TEXT")]
    text: Option<String>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let mut body = Map::new();
    body.insert("model".into(), json!(args.model));
    body.insert("tenant_id".into(), json!(args.of_tenant));
    if let Some(size) = args.block_size {
        body.insert("block_size".into(), json!(size));
    }
    if let Some(lora) = &args.lora {
        body.insert("lora_name".into(), json!(lora));
    }
    match (&args.prompt.tokens, &args.prompt.tokens_file, &args.prompt.text) {
        (Some(tokens), ..) => body.insert("token_ids".into(), json!(tokens)),
        (_, Some(path), _) => {
            let text = std::fs::read_to_string(path)
                .map_err(|error| Failure::usage(format!("--tokens-file {}: {error}", path.display())))?;
            let tokens = ids(&text).map_err(|wrong| {
                Failure::usage(format!("--tokens-file {}: {wrong:?} is not a token id", path.display()))
            })?;
            body.insert("token_ids".into(), json!(tokens))
        }
        (.., text) => body.insert("text".into(), json!(text)),
    };
    let body = Value::Object(body).to_string();
    let ask = || {
        Client::connect(&args.conductor, Duration::from_millis(args.timeout_ms))?.send(
            "POST",
            "/query",
            body.as_bytes(),
        )
    };
    let (status, answer) = ask().map_err(|error| {
        Failure::failed(format!("http://{}/query: {error:#}", printable(&args.conductor)))
            .hint("start one with `snowskin conductor serve`, or give its address with --conductor")
    })?;
    let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
    if status != 200 {
        let why = printable(answer["error"].as_str().unwrap_or_default());
        let exit = if status == 404 { Exit::NotFound } else { Exit::Failed };
        return fail(Failure::new(exit, format!("the Conductor answers {status}: {why}")));
    }
    if args.json {
        print_json(&answer)?;
        return Ok(Exit::Ok);
    }
    let columns = [
        ("instance", Align::Left),
        ("matched", Align::Right),
        ("gpu", Align::Right),
        ("cpu", Align::Right),
        ("disk", Align::Right),
    ];
    let mut table = Table::new(&columns);
    for (name, it) in answer[&args.of_tenant].as_object().into_iter().flatten() {
        let number = |field: &str| thousands(it[field].as_u64().unwrap_or_default());
        let cells =
            [printable(name), number("longest_matched"), number("GPU"), number("CPU"), number("DISK")];
        table.row(cells.each_ref().map(String::as_str));
    }
    print(&table.render())?;
    Ok(Exit::Ok)
}

/// Numbers of a JSON array, or separated by blanks or commas. The error is what is not one.
fn ids(text: &str) -> Result<Vec<u32>, String> {
    let split = |c: char| c.is_whitespace() || matches!(c, ',' | '[' | ']');
    text.split(split)
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().map_err(|_| word.chars().take(32).collect()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_tokens_is_a_json_array_or_words() {
        assert_eq!(ids("[1, 2,\n 4294967295]"), Ok(vec![1, 2, u32::MAX]));
        assert_eq!(ids("1 2\n3"), Ok(vec![1, 2, 3]));
        assert_eq!(ids("1 two"), Err("two".to_owned()));
        assert_eq!(ids("4294967296"), Err("4294967296".to_owned()));
    }
}
