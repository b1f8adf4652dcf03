//! The commands over libfabric: whichever library the machine has, over loopback.
//!
//! A machine without one fails these tests, unless `IMMWIRE_WITHOUT_LIBFABRIC=1` says that it is meant to be
//! without. `IMMWIRE_LIBFABRIC` names another library than the machine's.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::process::{Command, Output};
use support::{Listening, ended, immwire, noise, run, signal, text};

/// What `doctor` says of libfabric.
fn asked(configure: impl FnOnce(&mut Command)) -> Value {
    let mut command = immwire(["doctor", "--json"]);
    configure(&mut command);
    let output = ended(command.spawn().unwrap());
    serde_json::from_slice(&output.stdout).unwrap()
}

/// libfabric's providers that work over loopback here; none on a machine that is to be without.
fn fabrics() -> Vec<String> {
    if std::env::var("IMMWIRE_WITHOUT_LIBFABRIC").is_ok_and(|value| value == "1") {
        eprintln!("no libfabric here, as IMMWIRE_WITHOUT_LIBFABRIC says: nothing is tested");
        return Vec::new();
    }
    let diagnosis = asked(|_| {});
    let found = &diagnosis["probes"]["libfabric"]["found"];
    let all = found["providers"].as_array().unwrap_or_else(|| {
        panic!(
            "no libfabric: install one, name one by IMMWIRE_LIBFABRIC, or set \
             IMMWIRE_WITHOUT_LIBFABRIC=1: {}",
            diagnosis["probes"]["libfabric"]
        )
    });
    let on_loopback =
        |provider: &&Value| provider["interfaces"].as_array().unwrap().contains(&Value::from("lo"));
    let names: Vec<_> = all
        .iter()
        .filter(on_loopback)
        .map(|provider| provider["name"].as_str().unwrap().to_owned())
        .collect();
    assert!(!names.is_empty(), "libfabric, but nothing on loopback: {found}");
    names
}

fn rows(args: &[&str]) -> Vec<Value> {
    let output = run(["bench"].iter().chain(args).chain(&["--json", "--seconds", "0.05"]));
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    let rows: Vec<Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for row in &rows {
        assert_eq!(row["verified"], true, "{row}");
        assert_eq!(row["provider"], "libfabric", "{row}");
    }
    rows
}

fn positive(row: &Value, field: &str) -> bool {
    row[field].as_f64().is_some_and(|value| value > 0.0)
}

#[test]
fn every_bench_runs_beside_a_bare_loop_of_the_same_provider() {
    for fabric in fabrics() {
        let on = |args: &[&str]| rows(&[args, &["--fabric", &fabric]].concat());
        let write = on(&["write", "--size", "1000,64K", "--depth", "3"]);
        assert_eq!(write.len(), 2);
        let rates = write.iter().chain(&on(&["rate", "--size", "64"])).cloned().collect::<Vec<_>>();
        let pages = on(&["pages", "--pages", "100", "--page-size", "4K"]);
        for row in rates.iter().chain(&pages) {
            assert_eq!(row["fabric"], fabric.as_str());
            for field in ["gb_per_s", "mops", "baseline_gb_per_s", "ratio"] {
                assert!(positive(row, field), "{field} in {row}");
            }
        }
        let latency = &on(&["latency", "--size", "8,64"])[1];
        for field in ["half_rtt_us", "baseline_half_rtt_us", "ratio", "p99_us"] {
            assert!(positive(latency, field), "{field} in {latency}");
        }
    }
}

#[test]
fn several_peers_and_several_nics_need_no_baseline() {
    if fabrics().is_empty() {
        return;
    }
    let scatter = &rows(&["scatter", "--size", "4K", "--peers", "2", "--provider", "libfabric"])[0];
    assert_eq!(scatter["bytes"], 8192);
    assert!(scatter["baseline_gb_per_s"].is_null() && positive(scatter, "gb_per_s"));
    let barrier = &rows(&["barrier", "--peers", "2", "--provider", "libfabric"])[0];
    assert!(positive(barrier, "half_rtt_us") && barrier["ratio"].is_null());
    let args = ["write", "--size", "4M", "--nics", "2", "--no-baseline", "--interface", "lo"];
    let write = &rows(&args)[0];
    assert!(write["ratio"].is_null() && write["nics"] == 2, "{write}");
}

/// Ranks of a mixture of experts write to each other so, too; every result is checked.
#[test]
fn dispatch_and_combine_go_over_libfabric() {
    for fabric in fabrics() {
        let small = ["--tokens", "9", "--hidden", "64", "--experts", "7", "--top-k", "3"];
        let more = ["--ep", "3", "--chunk", "4", "--rounds", "5", "--json", "--fabric", &fabric];
        let output = run(["bench", "moe"].iter().chain(&small).chain(&more));
        assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        assert_eq!(text(&output.stdout).lines().count(), 2, "{fabric}: a row for each way");
        for line in text(&output.stdout).lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            assert_eq!(row["provider"], "libfabric", "{row}");
            assert!(positive(&row, "p50_us") && positive(&row, "gb_per_s"), "{row}");
        }
    }
}

#[test]
fn an_engine_that_sleeps_is_measured_too() {
    if fabrics().is_empty() {
        return;
    }
    let row = &rows(&["latency", "--size", "8", "--provider", "libfabric", "--mode", "thread"])[0];
    assert!(positive(row, "half_rtt_us") && positive(row, "baseline_half_rtt_us"), "{row}");
}

#[test]
fn two_terminals_measure_with_each_other() {
    if fabrics().is_empty() {
        return;
    }
    let args = ["bench", "--listen", "--provider", "libfabric", "--interface", "lo"];
    let listening = Listening::start(immwire(args));
    // The address says that it is libfabric's.
    for what in ["write", "latency"] {
        let args = [what, "--connect", &listening.address, "--interface", "lo", "--size", "64"];
        assert!(positive(&rows(&args)[0], "ratio"));
    }
    signal(&listening.child, Signal::INT);
    assert!(listening.ended().status.success());
}

#[test]
fn files_go_over_libfabric() {
    if fabrics().is_empty() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (file, inbox) = (dir.path().join("file"), dir.path().join("in"));
    let bytes = noise(3, 5_000_000);
    std::fs::write(&file, &bytes).unwrap();
    let inbox_text = inbox.to_str().unwrap();
    let receiver = Listening::start(immwire([
        "recv",
        "--once",
        "--dir",
        inbox_text,
        "--provider",
        "libfabric",
        "--interface",
        "lo",
    ]));
    let pushed = run(["push", file.to_str().unwrap(), &receiver.address, "--interface", "lo"]);
    assert!(pushed.status.success(), "{}", text(&pushed.stderr));
    let received = receiver.ended();
    assert!(received.status.success(), "{}", text(&received.stderr));
    assert_eq!(std::fs::read(inbox.join("file")).unwrap(), bytes);
}

fn refused(output: &Output, said: &[&str]) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    for said in said {
        assert!(error.contains(said), "{said:?} in {error}");
    }
}

#[test]
fn what_goes_wrong_says_what_to_do() {
    // Needs no library: these are refused, or fail, before there is one.
    let shm = ["bench", "write", "--provider", "shm", "--interface", "lo"];
    refused(&run(shm), &["--interface is for --provider libfabric"]);
    let mut without = immwire(["bench", "write", "--provider", "libfabric"]);
    without.env("IMMWIRE_LIBFABRIC", "/dev/null");
    let output = ended(without.spawn().unwrap());
    refused(&output, &["no libfabric could be loaded", "/dev/null", "install libfabric"]);
    if fabrics().is_empty() {
        return;
    }
    let nowhere = ["bench", "write", "--provider", "libfabric", "--interface", "nowhere0"];
    refused(&run(nowhere), &["on nowhere0", "found ", "lo", "what to do: ", "--interface"]);
    let unknown = ["bench", "write", "--fabric", "carrier-pigeon"];
    refused(
        &run(unknown),
        &["carrier-pigeon", "supported are efa, tcp", "what to do: ", "--fabric"],
    );
    let listening = Listening::start(immwire([
        "bench",
        "--listen",
        "--provider",
        "libfabric",
        "--interface",
        "lo",
    ]));
    let other = ["bench", "write", "--connect", &listening.address, "--provider", "shm"];
    refused(&run(other), &["for libfabric", "what to do: ", "--provider libfabric"]);
}

#[test]
fn nobody_at_the_address_is_an_error_that_ends() {
    if fabrics().is_empty() {
        return;
    }
    let listening = Listening::start(immwire([
        "bench",
        "--listen",
        "--provider",
        "libfabric",
        "--interface",
        "lo",
    ]));
    let address = listening.address.clone();
    drop(listening);
    let start = std::time::Instant::now();
    let output = run(["bench", "write", "--connect", &address, "--interface", "lo"]);
    refused(&output, &["what to do: see that the peer runs"]);
    assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
}

#[test]
fn doctor_tells_which_libfabric_and_what_fits() {
    let diagnosis = asked(|command| {
        command.env("IMMWIRE_LIBFABRIC", "/dev/null");
    });
    let found = &diagnosis["probes"]["libfabric"];
    assert!(found["not_found"].as_str().unwrap().contains("/dev/null"), "{found}");
    let hosts = &diagnosis["paths"][3];
    assert_eq!((&hosts["path"], &hosts["state"]), (&"none".into(), &"missing".into()));
    assert!(hosts["todo"].as_str().unwrap().contains("install libfabric"), "{hosts}");
    if fabrics().is_empty() {
        return;
    }
    let diagnosis = asked(|_| {});
    let found = &diagnosis["probes"]["libfabric"]["found"];
    assert!(found["path"].as_str().unwrap().contains("libfabric"), "{found}");
    assert!(found["version"].as_str().unwrap().contains('.'), "{found}");
    let providers = found["providers"].as_array().unwrap();
    for provider in providers {
        let fits = !provider["interfaces"].as_array().unwrap().is_empty();
        let why_not = &provider["why_not"];
        assert_eq!(why_not.is_null(), fits, "{provider}");
        assert!(why_not.as_str() != Some(""), "{provider}");
    }
    let words = text(&run(["doctor"]).stdout);
    for needle in [" fits on ", "efa: ", "other hosts"] {
        assert!(words.contains(needle), "{needle} in {words}");
    }
}
