//! What the answer of an S3-compatible store says, as far as it is read here and not by `object_store`: the
//! status, and the code of an error in the text.

use std::fmt;

use super::fault::BucketFault;

/// Bytes of an answer in which the code of an error is looked for.
const ERROR_BYTES_MAX: usize = 4_096;
/// Longest code.
const CODE_CHARS_MAX: usize = 64;

/// A status that means neither success nor a condition that was not met, and the code in the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: u16,
    pub(super) code: String,
}

impl Refusal {
    /// What an answer refuses. Conditions that were not met, and objects that do not exist, are for
    /// `object_store`.
    pub(super) fn of(status: u16, body: &[u8]) -> Option<Self> {
        let code = code_of(body);
        let expected = match status {
            404 => code != "NoSuchBucket",
            // Not modified, precondition failed, conflict.
            304 | 412 | 409 => true,
            // Some errors come in answers that have begun as successes. No object of ours begins like that.
            _ => (200..300).contains(&status) && (code.is_empty() || !body.starts_with(b"<")),
        };
        (!expected).then_some(Self { status, code })
    }

    /// What is wrong, and what to do.
    pub(super) fn fault(&self) -> BucketFault {
        let Self { status, code } = self;
        match (*status, code.as_str()) {
            (_, "NoSuchBucket") => BucketFault::NoBucket,
            (_, "RequestTimeTooSkewed") => BucketFault::Clock,
            (429 | 503, _) | (_, "SlowDown" | "Throttling" | "TooManyRequests") => BucketFault::Slow,
            (401, code)
            | (
                _,
                code @ ("InvalidAccessKeyId"
                | "SignatureDoesNotMatch"
                | "ExpiredToken"
                | "InvalidToken"
                | "AuthorizationHeaderMalformed"),
            ) => BucketFault::Credentials(if code.is_empty() { "status 401".into() } else { code.into() }),
            (403, "") => BucketFault::Denied("status 403".into()),
            (403, code) => BucketFault::Denied(code.into()),
            (300..=399, _) => BucketFault::Elsewhere(*status),
            (408, _) | (_, "RequestTimeout") => BucketFault::Timeout,
            (status, code) => {
                // An error that began as a success.
                let status = if status < 300 { 500 } else { status };
                BucketFault::Server(status, if code.is_empty() { "no code".into() } else { code.into() })
            }
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "status {} {}", self.status, self.code)
    }
}

impl std::error::Error for Refusal {}

/// The code of an error, as far as it is one.
fn code_of(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(ERROR_BYTES_MAX)]);
    let code = text.split_once("<Error>").and_then(|(_, rest)| rest.split_once("<Code>"));
    let code = code.and_then(|(_, rest)| rest.split_once("</Code>")).map_or("", |(code, _)| code);
    code.chars().filter(char::is_ascii_alphanumeric).take(CODE_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_from_answers() {
        let of =
            |status: u16, body: &str| Refusal::of(status, body.as_bytes()).map(|it| (it.status, it.code));
        let error =
            |code: &str| format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Key>k</Key></Error>");
        assert_eq!(of(200, "<ListBucketResult/>"), None);
        assert_eq!(of(206, "bytes of an object, in which <Code>SlowDown</Code> may be"), None);
        assert_eq!(of(404, &error("NoSuchKey")), None);
        assert_eq!(of(404, &error("NoSuchBucket")), Some((404, "NoSuchBucket".into())));
        assert_eq!(of(412, &error("PreconditionFailed")), None);
        assert_eq!(of(403, &error("RequestTimeTooSkewed")), Some((403, "RequestTimeTooSkewed".into())));
        assert_eq!(of(503, ""), Some((503, String::new())));
        assert_eq!(of(200, &error("SlowDown")), Some((200, "SlowDown".into())));
    }

    #[test]
    fn what_a_store_refuses_says_what_to_do() {
        let of = |status: u16, code: &str| Refusal { status, code: code.into() }.fault();
        for (status, code, expected, advice) in [
            (403, "AccessDenied", BucketFault::Denied("AccessDenied".into()), "s3:GetObject"),
            (403, "RequestTimeTooSkewed", BucketFault::Clock, "NTP"),
            (
                403,
                "SignatureDoesNotMatch",
                BucketFault::Credentials("SignatureDoesNotMatch".into()),
                "AWS_SECRET",
            ),
            (404, "NoSuchBucket", BucketFault::NoBucket, "AWS_ENDPOINT_URL"),
            (301, "PermanentRedirect", BucketFault::Elsewhere(301), "AWS_REGION"),
            (503, "SlowDown", BucketFault::Slow, "fewer requests"),
            (429, "", BucketFault::Slow, "fewer requests"),
            (200, "InternalError", BucketFault::Server(500, "InternalError".into()), "log"),
            (408, "", BucketFault::Timeout, "network"),
        ] {
            let fault = of(status, code);
            assert_eq!(fault, expected);
            assert!(fault.to_string().contains(advice), "{fault}");
        }
        assert!(of(503, "").is_passing() && of(200, "InternalError").is_passing());
        assert!(!of(403, "AccessDenied").is_passing() && !of(404, "NoSuchBucket").is_passing());
    }
}
