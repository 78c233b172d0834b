//! A request as it came: its top-level fields, found in the text and left as they are.
//!
//! A prompt of a hundred thousand ids is not parsed into a tree and printed again: what engines get is the
//! client's own text, with some fields replaced.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use hyper::body::Bytes;
use serde::de::{self, DeserializeSeed, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Most fields of a request.
const FIELDS_MAX: usize = 128;
/// Most ids in a prompt.
pub(crate) const IDS_MAX: usize = 4 << 20;

/// A JSON object whose fields can be read and replaced.
#[derive(Clone, Debug)]
pub(crate) struct Fields {
    text: Bytes,
    fields: Vec<(String, Range<usize>)>,
}

impl Fields {
    /// Finds the fields of an object.
    ///
    /// # Errors
    /// It is not JSON, not an object, has too many fields, or one twice.
    pub(crate) fn parse(text: Bytes) -> Result<Self, String> {
        let checked =
            std::str::from_utf8(&text).map_err(|error| format!("the body is not UTF-8: {error}"))?;
        let mut deserializer = serde_json::Deserializer::from_str(checked);
        let fields = Finder(checked)
            .deserialize(&mut deserializer)
            .and_then(|fields| deserializer.end().map(|()| fields))
            .map_err(|error| format!("the body is not a JSON object as it should be: {error}"))?;
        Ok(Self { text, fields })
    }

    /// The text of a field's value; `None` when it is absent or null.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let (_, range) = self.fields.iter().find(|(field, _)| field == name)?;
        let text = std::str::from_utf8(self.text.get(range.clone())?).ok()?;
        (text != "null").then_some(text)
    }

    /// A field's value, of a simple type.
    ///
    /// # Errors
    /// It has another type.
    pub(crate) fn parsed<T: de::DeserializeOwned>(&self, name: &str) -> Result<Option<T>, String> {
        let parse = |text| serde_json::from_str(text).map_err(|error| format!("field `{name}`: {error}"));
        self.get(name).map(parse).transpose()
    }

    /// The object with some fields replaced, added, or left out (`None`).
    pub(crate) fn with(&self, changes: &[(&str, Option<Cow<'_, str>>)]) -> Bytes {
        let added: usize = changes
            .iter()
            .map(|(name, value)| name.len() + value.as_ref().map_or(0, |value| value.len()) + 4)
            .sum();
        let mut out = Vec::with_capacity(self.text.len() + added);
        out.push(b'{');
        let mut put = |name: &[u8], value: &[u8]| {
            if out.len() > 1 {
                out.push(b',');
            }
            for part in [name, b":", value] {
                out.extend_from_slice(part);
            }
        };
        for (name, range) in &self.fields {
            if !changes.iter().any(|(changed, _)| changed == name) {
                let quoted = serde_json::to_vec(name).unwrap_or_default();
                put(&quoted, &self.text[range.clone()]);
            }
        }
        for (name, value) in changes {
            if let Some(value) = value {
                put(format!("\"{name}\"").as_bytes(), value.as_bytes());
            }
        }
        out.push(b'}');
        out.into()
    }
}

/// Finds the fields of an object in a text.
struct Finder<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Finder<'de> {
    type Value = Vec<(String, Range<usize>)>;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Finder<'de> {
    type Value = Vec<(String, Range<usize>)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields: Self::Value = Vec::with_capacity(16);
        while let Some(name) = map.next_key::<String>()? {
            let value: &RawValue = map.next_value()?;
            if fields.len() >= FIELDS_MAX {
                return Err(de::Error::custom(format_args!("more than {FIELDS_MAX} fields")));
            }
            if fields.iter().any(|(field, _)| *field == name) {
                return Err(de::Error::custom(format_args!("field `{name}` is there twice")));
            }
            // The value borrows from the text, so that its place is a difference of addresses.
            let start = value.get().as_ptr() as usize - self.0.as_ptr() as usize;
            fields.push((name, start..start + value.get().len()));
        }
        Ok(fields)
    }
}

/// What a prompt is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// Token ids.
    Ids(Vec<u32>),
    /// Text, as it is written in JSON.
    Text,
}

impl Prompt {
    /// Reads the JSON of a prompt: a string, ids, or an array with one of those.
    ///
    /// # Errors
    /// It is something else, or several prompts.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let bytes = text.as_bytes();
        let second = bytes.iter().skip(1).find(|byte| !byte.is_ascii_whitespace());
        match (bytes.first(), second) {
            (Some(b'"'), _) => Ok(Self::Text),
            (Some(b'['), Some(b'0'..=b'9')) => ids(bytes).map(Self::Ids),
            (Some(b'['), Some(b'[' | b'"')) => {
                let prompts: Vec<&RawValue> =
                    serde_json::from_str(text).map_err(|error| error.to_string())?;
                match prompts[..] {
                    [prompt] if !prompt.get().starts_with("[[") => Self::parse(prompt.get()),
                    _ => Err(format!("{} prompts: send one per request", prompts.len())),
                }
            }
            _ => Err("send a string, or an array of at least one token id".to_owned()),
        }
    }
}

/// Reads `[1, 2, 3]`, of which the first digit is known to be there.
fn ids(bytes: &[u8]) -> Result<Vec<u32>, String> {
    let wrong = |at: usize| format!("byte {at} of the prompt does not belong into an array of token ids");
    // An id and its comma have rarely fewer than 4 bytes.
    let mut ids = Vec::with_capacity((bytes.len() / 4).min(IDS_MAX));
    let (mut at, mut value, mut digits) = (1, 0_u64, 0_u32);
    loop {
        let byte = *bytes.get(at).ok_or_else(|| wrong(at))?;
        match byte {
            b'0'..=b'9' => {
                value = value * 10 + u64::from(byte - b'0');
                digits += 1;
                if digits > 10 || (digits == 2 && value < 10) {
                    return Err(wrong(at));
                }
            }
            b',' | b']' => {
                if digits == 0 {
                    return Err(wrong(at));
                }
                ids.push(u32::try_from(value).map_err(|_| format!("{value} is not a token id"))?);
                if ids.len() > IDS_MAX {
                    return Err(format!("more than {IDS_MAX} token ids"));
                }
                (value, digits) = (0, 0);
                if byte == b']' {
                    return if at + 1 == bytes.len() { Ok(ids) } else { Err(wrong(at + 1)) };
                }
            }
            b' ' | b'\n' | b'\r' | b'\t' => {
                // Between an id and its comma, or before an id, and not within one.
                let next = bytes[at..].iter().position(|byte| !byte.is_ascii_whitespace());
                let next = at + next.ok_or_else(|| wrong(at))?;
                if digits > 0 && bytes[next].is_ascii_digit() {
                    return Err(wrong(next));
                }
                at = next;
                continue;
            }
            _ => return Err(wrong(at)),
        }
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &'static str) -> Result<Fields, String> {
        Fields::parse(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn fields_are_read_and_replaced_in_the_text() {
        let fields =
            fields(r#" {"model":"m", "prompt" : [1, 2] ,"stream":true,"n":null,"q\"":{"a":[]}} "#).unwrap();
        assert_eq!(fields.get("prompt"), Some("[1, 2]"));
        assert_eq!((fields.get("n"), fields.get("absent")), (None, None));
        assert_eq!(fields.parsed::<bool>("stream"), Ok(Some(true)));
        assert!(fields.parsed::<u32>("stream").unwrap_err().contains("`stream`"));
        let changed = fields.with(&[("stream", Some("false".into())), ("n", None), ("x", Some("1".into()))]);
        assert_eq!(changed, r#"{"model":"m","prompt":[1, 2],"q\"":{"a":[]},"stream":false,"x":1}"#);
    }

    #[test]
    fn hostile_bodies_are_refused() {
        for text in
            ["", "[]", "{", r#"{"a":1}{"#, r#"{"a":1,"a":2}"#, r#"{"a":}"#, "null", r#"{"a" 1}"#, "\"x\""]
        {
            assert!(fields(text).is_err(), "{text}");
        }
        assert!(Fields::parse(Bytes::from_static(b"{\"a\":\"\xff\"}")).is_err());
        let many: Vec<String> = (0..=FIELDS_MAX).map(|at| format!("\"{at}\":0")).collect();
        assert!(Fields::parse(format!("{{{}}}", many.join(",")).into()).is_err());
        // Depth costs no stack.
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(200_000), "]".repeat(200_000));
        assert!(Fields::parse(deep.into()).is_ok());
    }

    #[test]
    fn prompts_are_text_or_ids() {
        let ids = |ids: &[u32]| Ok(Prompt::Ids(ids.to_vec()));
        assert_eq!(Prompt::parse("[1,2 , 4294967295]"), ids(&[1, 2, u32::MAX]));
        assert_eq!(Prompt::parse("[ 0\n]"), ids(&[0]));
        assert_eq!(Prompt::parse("[[7,8]]"), ids(&[7, 8]));
        assert_eq!(Prompt::parse("\"x\""), Ok(Prompt::Text));
        assert_eq!(Prompt::parse("[\"x\"]"), Ok(Prompt::Text));
        for text in [
            "",
            "[]",
            "[",
            "[1",
            "[1,",
            "[1,]",
            "[,1]",
            "[1 2]",
            "[01]",
            "[1.5]",
            "[-1]",
            "[1e3]",
            "[4294967296]",
            "[99999999999999999999]",
            "[1]]",
            "[1],",
            "[\"a\",\"b\"]",
            "[[1],[2]]",
            "[[[1]]]",
            "{}",
            "1",
            "true",
        ] {
            assert!(Prompt::parse(text).is_err(), "{text}");
        }
    }
}
