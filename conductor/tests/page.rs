//! The status page in a headless browser. Skipped by name where Chromium is not installed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::process::{Command, Stdio};

use common::{config, engine, eventually, matched, post, publisher, send, start, stored, tokens};
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::json;

fn main() {
    let arguments = Arguments::from_args();
    let browser = ["chromium", "chromium-browser", "google-chrome"].into_iter().find(|name| {
        let version =
            Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        version.is_ok_and(|status| status.success())
    });
    if browser.is_none() {
        eprintln!(
            "Chromium is not installed: the status page is not tested (Debian has the package `chromium`)"
        );
    }
    let name = browser.unwrap_or_default();
    let trials = [
        (
            "the_page_shows_hits_queues_predictions_and_hot_prefixes_and_names_stay_text",
            shows as fn(&str) -> Result<(), Failed>,
        ),
        ("the_page_says_that_a_conductor_without_engines_wants_one", wants_an_engine),
    ];
    let trials = trials
        .map(|(title, test)| Trial::test(title, move || test(name)).with_ignored_flag(browser.is_none()));
    libtest_mimic::run(&arguments, trials.into()).exit();
}

/// The document after its script has run for a few seconds of virtual time. An error of the script is one of
/// the test.
fn dom(browser: &str, url: &str) -> Result<String, Failed> {
    let profile = tempfile::tempdir()?;
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
        .args(["--virtual-time-budget=4000", "--timeout=60000", "--enable-logging=stderr", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(url)
        .stdin(Stdio::null())
        .output()?;
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        return Err(log.into());
    }
    // No page has an icon.
    if let Some(line) = log.lines().find(|line| line.contains(":CONSOLE") && !line.contains("favicon")) {
        return Err(format!("the page's script says: {line}").into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn holds(document: &str, parts: &[&str]) -> Result<(), Failed> {
    match parts.iter().find(|part| !document.contains(**part)) {
        Some(part) => Err(format!("no {part:?} in\n{document}").into()),
        None => Ok(()),
    }
}

fn shows(browser: &str) -> Result<(), Failed> {
    let publisher = publisher();
    let name = "<img src=x>";
    let conductor = start(conductor::Config { engines: vec![engine(name, &publisher)], ..config() });
    let addr = conductor.addr();
    publisher.publish(&stored(1, 0, 100))?;
    eventually("it is heard", || matched(addr, name, 1, 100) == 400);
    // 400 of 480 tokens are reused; one request has had its first token, and one waits.
    let ask = json!({"model": "m", "token_ids": tokens(1, 120), "max_tokens": 32});
    let [first, _waits] = [post(addr, "/schedule", &ask).1, post(addr, "/schedule", &ask).1];
    let id = first["reservation"].as_str().ok_or("no reservation")?;
    if send(addr, "POST", &format!("/reservations/{id}/first_token"), "").0 != 204 {
        return Err("the first token is not taken".into());
    }
    let document = dom(browser, &format!("http://{addr}/"))?;
    holds(
        &document,
        &[
            ">1 of 1 publishers heard",
            "&lt;img src=x",
            // Hit rate, requests in progress, and the queue's length.
            "Hit rate, all time</span>",
            "Requests in progress</span><strong>2</strong>",
            "Longest queue</span>",
            // Predicted beside actual.
            "id=\"ttft-sum\">1 latest requests",
            "<circle ",
            // The map of hot prefixes.
            "requests · 400 tokens on 1</div>",
            "100</td>",
        ],
    )?;
    if document.contains("<img") {
        return Err(format!("a name became markup:\n{document}").into());
    }
    Ok(())
}

fn wants_an_engine(browser: &str) -> Result<(), Failed> {
    let conductor = start(config());
    let document = dom(browser, &format!("http://{}/", conductor.addr()))?;
    holds(
        &document,
        &[">No engine is registered", "class=\"bad\"", "id=\"ttft-sum\">No request has reported"],
    )
}
