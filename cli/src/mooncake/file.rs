//! `--config_path`: the settings of Mooncake's master in a file, as JSON or as YAML of one level. The keys
//! are the names of its flags.

use std::path::Path;

/// Longest file that is read, bytes.
const BYTES_MAX: u64 = 1 << 20;

/// The settings of a file, in their order. JSON if its name ends in `.json`.
///
/// # Errors
/// What is wrong, with the line in YAML.
pub(super) fn read(path: &Path) -> Result<Vec<(String, String)>, String> {
    let len = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
    if len > BYTES_MAX {
        return Err(format!("it has {len} bytes, and a file of settings has at most {BYTES_MAX}"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json")) {
        json(&text)
    } else {
        yaml(&text)
    }
}

fn json(text: &str) -> Result<Vec<(String, String)>, String> {
    use serde_json::Value;
    let settings: serde_json::Map<String, Value> =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    settings
        .into_iter()
        .map(|(name, value)| match value {
            Value::String(text) => Ok((name, text)),
            Value::Bool(_) | Value::Number(_) => Ok((name, value.to_string())),
            Value::Null => Ok((name, String::new())),
            _ => Err(format!("{name}: write a text, a number, true or false")),
        })
        .collect()
}

/// Lines `name: value`. Comments, quotes and the marks of a document are understood, lists and levels are
/// not: no setting has them.
fn yaml(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut settings = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let whole = line.trim_end();
        if whole.trim_start().is_empty()
            || whole.trim_start().starts_with('#')
            || matches!(whole, "---" | "...")
        {
            continue;
        }
        let wrong = |what: &str| format!("line {number}: {what}: write lines such as `rpc_port: 50051`");
        if line.starts_with([' ', '\t']) {
            return Err(wrong("levels are not understood"));
        }
        let (name, value) = whole.split_once(':').ok_or_else(|| wrong("there is no colon"))?;
        if !value.is_empty() && !value.starts_with([' ', '\t']) {
            return Err(wrong("a space must follow the colon"));
        }
        let value = scalar(value.trim()).ok_or_else(|| wrong("its value is not understood"))?;
        settings.push((name.trim().trim_matches(['"', '\'']).to_owned(), value));
    }
    Ok(settings)
}

/// A value without its quotes and the comment behind it.
fn scalar(text: &str) -> Option<String> {
    for quote in ['"', '\''] {
        if let Some(rest) = text.strip_prefix(quote) {
            let (inner, after) = rest.split_once(quote)?;
            let after = after.trim_start();
            return (after.is_empty() || after.starts_with('#')).then(|| inner.to_owned());
        }
    }
    let text = text.split_once(" #").map_or(text, |(value, _)| value).trim();
    if text.starts_with('#') || matches!(text, "~" | "null") {
        return Some(String::new());
    }
    let plain = !text.starts_with(['[', '{', '&', '*', '!', '|', '>', '%', '@', '`']);
    plain.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn yaml_of_one_level_is_read_with_comments_and_quotes() {
        let text = "---\n# a comment\nrpc_port: 50051\nrpc_address: \"0.0.0.0\" # all\n\
                    enable_ha: false\n\nmode: 'a # b'\nurl: http://h:1/#x\nempty:\nnothing: ~\r\n";
        let expected = pairs(&[
            ("rpc_port", "50051"),
            ("rpc_address", "0.0.0.0"),
            ("enable_ha", "false"),
            ("mode", "a # b"),
            ("url", "http://h:1/#x"),
            ("empty", ""),
            ("nothing", ""),
        ]);
        assert_eq!(yaml(text), Ok(expected));
        for (bad, what) in [
            ("a: 1\n  b: 2", "line 2: levels"),
            ("rpc_port 1", "line 1: there is no colon"),
            ("rpc_port:1", "line 1: a space"),
            ("a: [1, 2]", "line 1: its value"),
            ("a: \"open", "line 1: its value"),
            ("a: \"x\" y", "line 1: its value"),
        ] {
            assert!(yaml(bad).unwrap_err().starts_with(what), "{bad}");
        }
    }

    #[test]
    fn json_is_read_as_one_object_of_scalars() {
        let text = r#"{"rpc_port": 50051, "rpc_address": "0.0.0.0", "enable_ha": false, "x": null}"#;
        let expected =
            pairs(&[("enable_ha", "false"), ("rpc_address", "0.0.0.0"), ("rpc_port", "50051"), ("x", "")]);
        let mut read = json(text).unwrap();
        read.sort();
        assert_eq!(read, expected);
        for bad in ["", "[]", "{\"a\": []}", "{\"a\": {}}", "{"] {
            assert!(json(bad).is_err(), "{bad}");
        }
    }
}
