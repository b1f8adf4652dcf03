//! The command with GPUs: on the stand-in for the CUDA driver, in the folder that `IMMWIRE_FAKE_CUDA` names
//! (`verification/fake-cuda/check --place` prints it), built with kernels (`IMMWIRE_NVCC`); NICs are those of the library that
//! `IMMWIRE_FAKE_EFA` names.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use serde_json::Value;
use std::process::{Command, Output};
use support::{Listening, ended, immwire, text};

/// The command, where two GPUs are.
fn on_gpus(args: &[&str]) -> Command {
    let place = std::env::var("IMMWIRE_FAKE_CUDA")
        .expect("IMMWIRE_FAKE_CUDA: the folder that verification/fake-cuda/check --place prints");
    assert!(std::path::Path::new(&place).join("libcuda.so.1").exists(), "no stand-in in {place}");
    let mut command = immwire(args);
    command.env("LD_LIBRARY_PATH", place).env("IMMWIRE_FAKE_CUDA_GPUS", "2");
    command.env_remove("CUDA_VISIBLE_DEVICES");
    command
}

fn run_on_gpus(args: &[&str]) -> Output {
    ended(on_gpus(args).spawn().unwrap())
}

fn rows(args: &[&str]) -> Vec<Value> {
    let args: Vec<_> = ["bench", "--provider", "nvlink", "--json", "--seconds", "0.05"]
        .iter()
        .chain(args)
        .copied()
        .collect();
    let output = run_on_gpus(&args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The same by NICs that reach GPUs: those of `verification/fake-efa`.
#[test]
#[ignore = "needs the stand-in for a CUDA driver, and the model of EFA"]
fn nics_read_and_write_the_memory_of_gpus() {
    let model = std::env::var("IMMWIRE_FAKE_EFA")
        .expect("IMMWIRE_FAKE_EFA: the library that verification/fake-efa/check --place prints");
    for (what, gpus) in [("write", "0,1"), ("pages", "1"), ("write", "host,1"), ("write", "0,host")]
    {
        let mut args = vec!["bench", what, "--json", "--seconds", "0.05", "--gpus", gpus];
        args.extend(["--provider", "libfabric", "--fabric", "efa"]);
        args.extend(if what == "pages" { ["--pages", "50"] } else { ["--size", "100,64K"] });
        let mut command = on_gpus(&args);
        let output = ended(command.env("IMMWIRE_LIBFABRIC", &model).spawn().unwrap());
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        for line in text(&output.stdout).lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            assert_eq!((&row["provider"], &row["verified"]), (&"libfabric".into(), &true.into()));
            assert!(positive(&row, "gb_per_s") && row["ratio"].is_null(), "{gpus}: {row}");
        }
    }
}

fn positive(row: &Value, field: &str) -> bool {
    row[field].as_f64().is_some_and(|value| value > 0.0)
}

#[test]
#[ignore = "needs the stand-in for a CUDA driver, and a build with kernels"]
fn writes_between_gpus_and_the_host_are_verified_beside_the_drivers_own() {
    for gpus in ["0,1", "1", "host,1", "0,host"] {
        let rows = rows(&["write", "--gpus", gpus, "--size", "100,64K", "--depth", "3"]);
        assert_eq!(rows.len(), 2);
        for row in rows {
            assert_eq!((&row["provider"], &row["verified"]), (&"nvlink".into(), &true.into()));
            for field in ["gb_per_s", "baseline_gb_per_s", "ratio"] {
                assert!(positive(&row, field), "{field} of {gpus}: {row}");
            }
        }
    }
}

#[test]
#[ignore = "needs the stand-in for a CUDA driver, and a build with kernels"]
fn pages_between_gpus_are_verified_too() {
    let pages = ["pages", "--gpus", "0,1", "--sms", "2", "--pages", "300", "--page-size", "4K"];
    let rows = rows(&pages);
    assert_eq!((&rows[0]["pages"], &rows[0]["verified"]), (&300.into(), &true.into()));
    assert!(positive(&rows[0], "baseline_gb_per_s"));
}

#[test]
#[ignore = "needs the stand-in for a CUDA driver, and a build with kernels"]
fn dispatch_and_combine_among_gpus_are_measured_and_checked() {
    let small =
        ["--tokens", "5", "--hidden", "256", "--experts", "8", "--top-k", "3", "--rounds", "3"];
    let cases: [(&[&str], u64, bool); 4] = [
        (&["--provider", "nvlink"], 2, true),
        (&["--gpus", "1,0", "--ep", "4", "--exact"], 4, true),
        (&["--gpus", "1", "--ep", "2"], 2, false),
        (&["--gpus", "0"], 1, false),
    ];
    for (more, ranks, crosses) in cases {
        let output = run_on_gpus(
            &["bench", "moe", "--json"]
                .iter()
                .chain(&small)
                .chain(more)
                .copied()
                .collect::<Vec<_>>(),
        );
        assert!(output.status.success(), "{more:?}: {}", text(&output.stderr));
        let rows: Vec<Value> =
            text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let ops: Vec<_> = rows.iter().map(|row| row["op"].as_str().unwrap()).collect();
        assert_eq!(ops, ["dispatch", "combine"]);
        for row in rows {
            assert_eq!((&row["provider"], &row["ep"]), (&"nvlink".into(), &ranks.into()), "{row}");
            assert!(positive(&row, "p50_us") && row["p99_us"].as_f64() >= row["p50_us"].as_f64());
            for field in ["gb_per_s", "bytes_out", "baseline_us", "ratio"] {
                assert_eq!(positive(&row, field), crosses, "{field}: {row}");
            }
        }
    }
    for (refused, why) in [
        (&["--gpus", "2"][..], "GPU 2"),
        (&["--gpus", "0", "--chunk", "2"], "--chunk"),
        (&["--gpus", "0", "--provider", "shm"], "--gpus"),
        (&["--gpus", "0", "--hidden", "24"], "16"),
    ] {
        let output = run_on_gpus(&[&["bench", "moe"], refused].concat());
        assert_eq!(output.status.code(), Some(1), "{refused:?}");
        assert!(text(&output.stderr).contains(why), "{refused:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty());
    }
}

#[test]
#[ignore = "needs the stand-in for a CUDA driver, and a build with kernels"]
fn a_peer_in_another_terminal_has_the_second_gpu() {
    let peer = ["bench", "--listen", "--provider", "nvlink", "--gpus", "0,1"];
    let listening = Listening::start(on_gpus(&peer));
    let connect = ["rate", "--gpus", "0,1", "--size", "64", "--connect", &listening.address];
    let row = &rows(&connect)[0];
    assert!(positive(row, "mops") && row["verified"] == true, "{row}");
}

#[test]
#[ignore = "needs the stand-in for a CUDA driver, and a build with kernels"]
fn doctor_lists_the_gpus_and_what_they_reach() {
    let output = run_on_gpus(&["doctor", "--json"]);
    let diagnosis: Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = &diagnosis["probes"]["cuda"]["found"];
    assert_eq!(found["kernels"], true, "{found}");
    let gpus = found["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 2);
    for (gpu, reached) in gpus.iter().zip([1, 0]) {
        assert_eq!((&gpu["reaches"][0], &gpu["why_not"]), (&reached.into(), &Value::Null));
        assert!(gpu["uuid"].as_str().unwrap().starts_with("GPU-"), "{gpu}");
    }
    let path = &diagnosis["paths"][2];
    assert_eq!(
        (&path["path"], &path["state"]),
        (&"shm: copies by GPUs 0, 1".into(), &"best".into())
    );
}

#[test]
#[ignore = "needs the stand-in for a CUDA driver, and a build with kernels"]
fn a_gpu_that_is_not_there_is_named_and_what_to_do() {
    let output = run_on_gpus(&["bench", "write", "--provider", "nvlink", "--gpus", "0,7"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains("no GPU 7") && said.contains("what to do: name GPUs"), "{said}");
}

#[test]
fn without_a_driver_it_says_so_and_what_to_do() {
    // No driver is where nothing is: CUDA's loader looks in this folder first, and finds what is none.
    let place = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(place.path().join(name), "no library").unwrap();
    }
    let mut command = immwire(["bench", "write", "--provider", "nvlink", "--gpus", "0,1"]);
    let output = ended(command.env("LD_LIBRARY_PATH", place.path()).spawn().unwrap());
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains("what to do: ") && said.contains("driver"), "{said}");
}

#[test]
fn what_has_no_meaning_is_refused() {
    for (args, why) in [
        (&["bench", "latency", "--provider", "nvlink", "--gpus", "0,1"][..], "latency"),
        (&["bench", "--provider", "nvlink"][..], "--gpus"),
        (&["bench", "--provider", "nvlink", "--gpus", "host"][..], "--gpus"),
        (&["bench", "--provider", "shm", "--gpus", "0"][..], "nvlink"),
        (&["recv", "--dir", "x", "--provider", "nvlink"][..], "is for bench"),
    ] {
        let output = ended(immwire(args).spawn().unwrap());
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(text(&output.stderr).contains(why), "{args:?}: {}", text(&output.stderr));
    }
}
