//! The command line from outside: exit codes, help, JSON, signals.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Instant;
use support::{Listening, ended, immwire, run, signal, text, until};

const FIELDS: [&str; 18] = [
    "bench",
    "provider",
    "fabric",
    "nics",
    "bytes",
    "pages",
    "page_bytes",
    "depth",
    "gb_per_s",
    "mops",
    "half_rtt_us",
    "p99_us",
    "baseline_gb_per_s",
    "baseline_half_rtt_us",
    "ratio",
    "early_ratio",
    "spread",
    "verified",
];

fn rows(args: &[&str]) -> Vec<Value> {
    let output = run(["bench"].iter().chain(args).chain(&["--json", "--seconds", "0.05"]));
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    let rows: Vec<Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for row in &rows {
        let fields: Vec<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
        let (mut expected, mut found) = (FIELDS.to_vec(), fields);
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected);
        assert_eq!(row["verified"], true, "{row}");
        assert_eq!((&row["provider"], &row["fabric"]), (&"shm".into(), &Value::Null));
        assert!(row["early_ratio"].is_null());
        assert!(row["p99_us"].as_f64().unwrap() > 0.0);
    }
    rows
}

#[test]
fn dispatch_and_combine_are_measured_and_checked() {
    let small = ["--tokens", "5", "--hidden", "64", "--experts", "6", "--top-k", "3"];
    let mut back = Vec::new();
    for (ranks, exact) in [("1", false), ("3", false), ("3", true)] {
        let more = ["--ep", ranks, "--chunk", "2", "--rounds", "4", "--json"];
        let exact = exact.then_some(&"--exact");
        let output = run(["bench", "moe"].iter().chain(&small).chain(&more).chain(exact));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let rows: Vec<Value> =
            text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let ops: Vec<_> = rows.iter().map(|row| row["op"].as_str().unwrap()).collect();
        assert_eq!(ops, ["dispatch", "combine"]);
        for row in &rows {
            assert!(positive(row, "p50_us") && row["p99_us"].as_f64() >= row["p50_us"].as_f64());
            assert_eq!(positive(row, "gb_per_s"), ranks != "1", "one rank writes to nobody: {row}");
        }
        back.push(rows[1]["bytes_out"].as_f64().unwrap());
    }
    // The same routes: as many results as choices elsewhere are more than ranks elsewhere.
    assert!(back[2] > back[1], "{back:?}");
    for refused in [
        &["--experts", "2", "--top-k", "3"][..],
        &["--hidden", "12"],
        &["--gpus", "0", "--fabric", "tcp"],
        &["--gpus", "0", "--provider", "libfabric"],
        &["--shm-on-host"],
    ] {
        let output = run(["bench", "moe", "--json"].iter().chain(refused));
        assert_eq!(output.status.code(), Some(1), "{refused:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty());
    }
}

#[test]
fn dispatch_without_a_gpu_says_what_to_do() {
    let args = ["bench", "moe", "--provider", "nvlink", "--json"];
    let output = ended(immwire(args).env("CUDA_VISIBLE_DEVICES", "").spawn().unwrap());
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(output.stdout.is_empty() && said.contains("immwire doctor"), "{said}");
}

fn positive(row: &Value, field: &str) -> bool {
    row[field].as_f64().is_some_and(|value| value > 0.0)
}

#[test]
fn every_bench_gives_rows_that_were_verified() {
    let write = rows(&["write", "--size", "100,64K", "--nics", "2", "--depth", "3"]);
    assert_eq!(write.len(), 2);
    assert_eq!((&write[0]["bytes"], &write[1]["bytes"]), (&100.into(), &65536.into()));
    assert!(write.iter().all(|row| row["nics"] == 2 && row["depth"] == 3));
    for field in ["gb_per_s", "mops", "baseline_gb_per_s", "ratio"] {
        assert!(positive(&write[1], field), "{field}");
    }
    assert!(write[0]["half_rtt_us"].is_null() && write[0]["pages"].is_null());

    let pages = rows(&["pages", "--pages", "100", "--page-size", "4K"]);
    assert_eq!((&pages[0]["pages"], &pages[0]["page_bytes"]), (&100.into(), &4096.into()));
    assert!(positive(&pages[0], "baseline_gb_per_s"));

    let latency = rows(&["latency", "--size", "8,12,4000"]);
    for row in &latency {
        assert!(positive(row, "half_rtt_us") && positive(row, "baseline_half_rtt_us"), "{row}");
        assert!(row["gb_per_s"].is_null());
    }

    let rate = rows(&["rate", "--size", "64", "--mode", "thread"]);
    assert!(positive(&rate[0], "mops"));

    let scatter = rows(&["scatter", "--size", "4K", "--peers", "2"]);
    assert_eq!(scatter[0]["bytes"], 8192);

    let barrier = rows(&["barrier", "--peers", "2"]);
    assert!(positive(&barrier[0], "half_rtt_us") && barrier[0]["bytes"].is_null());
}

#[test]
fn without_a_baseline_its_fields_are_null() {
    let row = &rows(&["write", "--size", "4K", "--no-baseline"])[0];
    assert!(row["baseline_gb_per_s"].is_null() && row["ratio"].is_null());
    assert!(positive(row, "gb_per_s"));
}

#[test]
fn two_terminals_measure_with_each_other_and_draw() {
    let dir = tempfile::tempdir().unwrap();
    let plot = dir.path().join("out.svg");
    let listening = Listening::start(immwire(["bench", "--listen", "--nics", "1"]));
    for mode in ["polled", "thread"] {
        let output = run([
            "bench",
            "write",
            "--connect",
            &listening.address,
            "--nics",
            "4",
            "--size",
            "1M",
            "--seconds",
            "0.05",
            "--mode",
            mode,
            "--plot",
            plot.to_str().unwrap(),
        ]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stdout).contains("verified"), "{}", text(&output.stdout));
        assert!(std::fs::read_to_string(&plot).unwrap().contains("write (GB/s)"));
    }
    signal(&listening.child, Signal::INT);
    assert!(listening.ended().status.success());
}

/// What is published stands beside the same exchange only.
#[test]
fn predictions_of_other_shapes_stand_beside_no_published_times() {
    for (shape, published) in
        [(&[][..], true), (&["--bytes", "1K"], false), (&["--top-k", "1"], false)]
    {
        let args = ["sim", "ep", "--world", "8", "--nic", "cx7", "--rounds", "2", "--json"];
        let output = run(args.iter().chain(shape));
        assert!(output.status.success(), "{shape:?}: {}", text(&output.stderr));
        let row: Value = serde_json::from_str(text(&output.stdout).trim()).unwrap();
        let fields = ["published_post_us", "published_dispatch_us"].map(|it| positive(&row, it));
        assert_eq!(fields, [published; 2], "{shape:?}: {row}");
        assert!(positive(&row, "scatter_us") && row["bytes_moved"] == true, "{row}");
    }
}

/// Counters of peers that have served others before, and not all the same, agree all the same.
#[test]
fn peers_that_have_served_before_take_part_in_scatters_and_barriers() {
    let peers = [(); 2].map(|()| Listening::start(immwire(["bench", "--listen"])));
    let [first, second] = peers.each_ref().map(|peer| ["--connect", &peer.address]);
    let both = [first, second].concat();
    let measures = |bench: &[&str], to: &[&str]| {
        let how = ["--seconds", "0.05", "--json", "--no-baseline"];
        let output = run(["bench"].iter().chain(bench).chain(to).chain(&how));
        assert!(output.status.success(), "{bench:?} {to:?}: {}", text(&output.stderr));
    };
    for _ in 0..2 {
        measures(&["write", "--size", "4K"], &first);
        measures(&["scatter", "--size", "4K"], &both);
        measures(&["barrier"], &both);
    }
}

/// Processes of this user whose parent is `pid`.
fn children(pid: u32) -> Vec<u32> {
    let found = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let child: u32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse::<u32>().ok()?;
        (parent == pid).then_some(child)
    });
    found.collect()
}

#[test]
fn ctrl_c_ends_a_bench_and_its_peers() {
    for signal_kind in [Signal::INT, Signal::KILL] {
        let child = immwire(["bench", "barrier", "--seconds", "60"]).spawn().unwrap();
        let mut peers = Vec::new();
        until("its peers start", || {
            peers = children(child.id());
            peers.len() == 3
        });
        std::thread::sleep(std::time::Duration::from_millis(300));
        let start = Instant::now();
        signal(&child, signal_kind);
        let output = ended(child);
        if signal_kind == Signal::INT {
            assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
            assert!(text(&output.stderr).contains("interrupted"), "{}", text(&output.stderr));
        }
        assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
        // Also when it was killed: their input has ended.
        let gone = |pid: &u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
        };
        until("its peers end", || peers.iter().all(gone));
    }
}

/// How many bytes a line of `/proc/PID/maps` is about.
fn mapped(line: &str) -> u64 {
    let ends = line.split(' ').next().and_then(|range| range.split_once('-')).unwrap();
    let [from, to] = [ends.0, ends.1].map(|end| u64::from_str_radix(end, 16).unwrap());
    to - from
}

#[test]
fn a_killed_peer_is_an_error_that_says_so() {
    let mut child =
        immwire(["bench", "write", "--size", "64K", "--seconds", "60"]).spawn().unwrap();
    let mut peers = Vec::new();
    until("its peer starts", || {
        peers = children(child.id());
        peers.len() == 1
    });
    // And it has the memory that it was asked for, to be written to: what comes from then on is of the row.
    until("it is asked for memory", || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", peers[0])).unwrap_or_default();
        maps.lines().any(|line| line.contains("immwire-region") && mapped(line) >= 64 << 20)
    });
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(child.try_wait().unwrap().is_none());
    let pid = rustix::process::Pid::from_raw(i32::try_from(peers[0]).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
    let start = Instant::now();
    let output = ended(child);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("write: "), "{}", text(&output.stderr));
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

#[test]
fn doctor_says_the_same_in_words_json_and_exit_code() {
    let json = run(["doctor", "--json"]);
    let diagnosis: Value = serde_json::from_slice(&json.stdout).unwrap();
    let code = diagnosis["exit_code"].as_i64().unwrap();
    assert_eq!(json.status.code().map(i64::from), Some(code));
    assert_eq!(diagnosis["paths"].as_array().unwrap().len(), 6);
    assert_eq!(diagnosis["probes"]["memfd_sealing"], "works");
    assert!(diagnosis["facts"]["kernel"].is_string());
    let words = run(["doctor"]);
    assert_eq!(words.status.code(), json.status.code());
    for needle in ["result: ", "why not faster", "what to do", "other hosts", "kernel"] {
        assert!(text(&words.stdout).contains(needle), "{needle}");
    }
}

/// 1 would say that this machine can run.
#[test]
fn a_doctor_that_failed_itself_has_code_3() {
    for args in [["--topology", "/nonexistent"], ["--pairing", "nonsense"]] {
        let output = run(["doctor"].iter().chain(&args));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {said}");
        assert!(output.stdout.is_empty() && said.starts_with("immwire: "), "{args:?}: {said}");
    }
    // 2 would say that it cannot.
    for nonsense in [&["--jsno"][..], &["--json", "more"], &["--topology"]] {
        let output = run(["doctor"].iter().chain(nonsense));
        assert_eq!(output.status.code(), Some(3), "{nonsense:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{nonsense:?}");
    }
}

#[test]
fn operations_that_a_program_has_not_are_refused() {
    let output = run(["sim", "replay", "3", "--only", "0,1000000"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("no operation 1000000"), "{}", text(&output.stderr));
}

/// Has the kernel refuse `socket(AF_UNIX, ..)` to `command`, as systemd's `RestrictAddressFamilies` does:
/// by the number of the call, so that `socketpair` passes.
#[allow(clippy::cast_possible_truncation, reason = "all are small numbers of the kernel's")]
fn without_unix_sockets(command: &mut Command) -> &mut Command {
    const fn step(code: u32, k: u32, if_not: u8) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt: 0, jf: if_not, k }
    }
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const EQUALS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    // The call's number, and the low half of its first argument, in what the filter sees.
    static FILTER: [libc::sock_filter; 6] = [
        step(LOAD, 0, 0),
        step(EQUALS, libc::SYS_socket as u32, 3),
        step(LOAD, 16, 0),
        step(EQUALS, libc::AF_UNIX as u32, 1),
        step(RETURN, libc::SECCOMP_RET_ERRNO | libc::EAFNOSUPPORT as u32, 0),
        step(RETURN, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let refuse = || {
        let program = libc::sock_fprog { len: 6, filter: FILTER.as_ptr().cast_mut() };
        let (yes, no): (libc::c_ulong, libc::c_ulong) = (1, 0);
        let mode = libc::c_ulong::from(libc::SECCOMP_MODE_FILTER);
        // SAFETY: prctl alone, which may be called after a fork; it reads a local and, through it, the six
        // steps of a static.
        let refused = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, yes, no, no, no) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) == 0
        };
        if refused { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec it makes two system calls, allocates nothing, and takes no lock.
    unsafe { command.pre_exec(refuse) }
}

#[test]
fn doctor_tries_the_sockets_that_engines_have() {
    let mut doctor = immwire(["doctor", "--json"]);
    let json = ended(without_unix_sockets(&mut doctor).spawn().unwrap());
    let diagnosis: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json.status.code(), Some(2), "{diagnosis}");
    assert_eq!(diagnosis["paths"][0]["state"], "broken");
    let why = diagnosis["paths"][0]["why"].as_str().unwrap();
    assert!(why.contains("Unix sockets failed: Address family not supported"), "{why}");
    let dir = tempfile::tempdir().unwrap();
    let mut recv = immwire(["recv", "--dir", dir.path().to_str().unwrap()]);
    let failed = ended(without_unix_sockets(&mut recv).spawn().unwrap());
    assert_eq!(failed.status.code(), Some(1), "no engine can open its own either");
}

#[test]
fn every_command_has_help_with_examples_and_nonsense_has_code_2() {
    for command in ["bench", "push", "recv", "doctor"] {
        let help = run([command, "--help"]);
        assert!(help.status.success());
        assert!(text(&help.stdout).contains("Examples:\n  immwire "), "{command}");
    }
    for nonsense in
        [&["nothing"][..], &["bench", "--nics", "9"], &["recv"], &["push", "x", "not-an-address"]]
    {
        assert_eq!(run(nonsense).status.code(), Some(2), "{nonsense:?}");
    }
}

#[test]
fn what_cannot_be_done_has_code_1_and_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, b"x").unwrap();
    let address = Listening::receiver(&dir.path().join("in")).address.clone();
    let cases: [(&[&str], &str); 4] = [
        (&["push", file.to_str().unwrap(), &address], ""),
        (&["push", "/nonexistent/file", &address], "/nonexistent/file"),
        (&["recv", "--dir", file.to_str().unwrap()], "cannot use"),
        (&["bench", "write", "--pages", "3"], "no meaning for write"),
    ];
    for (args, reason) in cases {
        let output = run(args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.starts_with("immwire: ") && said.contains(reason), "{args:?}: {said}");
    }
}
