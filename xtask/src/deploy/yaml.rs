//! YAML as JSON values: anchors and merge keys are resolved, and nothing is accepted that JSON cannot
//! express.

use anyhow::{Context as _, Result, bail};
use serde_json::{Map, Value};
use std::path::Path;
use yaml_rust2::{Yaml, YamlLoader};

/// Reads the only document of a file.
///
/// # Errors
/// The file cannot be read, is not YAML, has a duplicate key, or has no or several documents.
pub(super) fn read(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text).with_context(|| format!("{}", path.display()))
}

fn parse(text: &str) -> Result<Value> {
    let documents = YamlLoader::load_from_str(text)?;
    let [document] = documents.as_slice() else { bail!("{} documents instead of one", documents.len()) };
    value(document)
}

fn value(yaml: &Yaml) -> Result<Value> {
    Ok(match yaml {
        Yaml::Null => Value::Null,
        Yaml::Boolean(yes) => Value::Bool(*yes),
        Yaml::Integer(number) => (*number).into(),
        // Numbers stay as they were written: `1.10` as a number would be another version.
        Yaml::Real(text) | Yaml::String(text) => Value::String(text.clone()),
        Yaml::Array(items) => Value::Array(items.iter().map(value).collect::<Result<_>>()?),
        Yaml::Hash(hash) => {
            let mut map = Map::new();
            for (key, yaml) in hash {
                let key = key.as_str().context("a key is not a text")?;
                let inner = value(yaml)?;
                if key != "<<" {
                    map.insert(key.to_owned(), inner);
                    continue;
                }
                let Value::Object(merged) = inner else { bail!("`<<` merges a value that is not a mapping") };
                for (key, inner) in merged {
                    // Keys of the mapping itself take precedence, wherever they are.
                    if !hash.contains_key(&Yaml::String(key.clone())) {
                        map.insert(key, inner);
                    }
                }
            }
            Value::Object(map)
        }
        Yaml::Alias(_) | Yaml::BadValue => bail!("an alias without an anchor"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn merge_keys_are_resolved_and_the_mappings_own_keys_take_precedence() {
        let text = "x: &x {a: 1, b: [2, two]}\ny: {a: 3, <<: *x}\n";
        assert_eq!(
            parse(text).expect("it is YAML"),
            json!({"x": {"a": 1, "b": [2, "two"]}, "y": {"a": 3, "b": [2, "two"]}})
        );
    }

    #[test]
    fn a_duplicate_key_is_refused() {
        assert!(parse("a: 1\na: 2\n").is_err());
    }
}
