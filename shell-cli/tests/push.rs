//! Files between real processes: whole trees, broken-off transfers, hostile senders, full disks.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use immwire_cli::motor::{Mode, Motor};
use immwire_cli::push::message::{Assembler, FromReceiver, Have, VERSION, fragments};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};
use support::{
    Listening, Stops, ended, immwire, is_stopped, noise, run, signal, status, text, until,
};

fn push(paths: &[&Path], address: &str) -> std::process::Output {
    let paths = paths.iter().map(|path| path.to_str().unwrap());
    run(["push"].into_iter().chain(paths).chain([address]))
}

#[test]
fn a_tree_arrives_with_its_contents_modes_and_times() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let model = from.path().join("model");
    fs::create_dir_all(model.join("deep/er")).unwrap();
    fs::create_dir(model.join("nothing here")).unwrap();
    let sizes = [0, 1, 65_535, 65_536, 65_537, 1 << 20, (3 << 20) + 17];
    for (seed, size) in sizes.into_iter().enumerate() {
        fs::write(model.join(format!("deep/er/{size}")), noise(seed as u64, size)).unwrap();
    }
    fs::write(model.join("run.sh"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(model.join("run.sh"), fs::Permissions::from_mode(0o754)).unwrap();
    let past = SystemTime::UNIX_EPOCH + Duration::new(1_500_000_000, 123_000_000);
    fs::File::open(model.join("run.sh")).unwrap().set_modified(past).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", model.join("link")).unwrap();
    let extra = from.path().join("extra file");
    fs::write(&extra, b"alone").unwrap();

    let receiver = Listening::once(&to.path().join("new/inbox"));
    let sent = push(&[&model, &extra], &receiver.address);
    assert!(sent.status.success(), "{}", text(&sent.stderr));
    assert!(text(&sent.stderr).contains("link is neither file nor folder"));
    let received = receiver.ended();
    assert!(received.status.success(), "{}", text(&received.stderr));

    let inbox = to.path().join("new/inbox");
    for (seed, size) in sizes.into_iter().enumerate() {
        let got = fs::read(inbox.join(format!("model/deep/er/{size}"))).unwrap();
        assert!(got == noise(seed as u64, size), "{size}");
    }
    assert_eq!(fs::read(inbox.join("extra file")).unwrap(), b"alone");
    assert!(inbox.join("model/nothing here").is_dir());
    assert!(!inbox.join("model/link").exists());
    let script = fs::metadata(inbox.join("model/run.sh")).unwrap();
    assert_eq!(script.permissions().mode() & 0o777, 0o754);
    assert_eq!((script.mtime(), script.mtime_nsec()), (1_500_000_000, 123_000_000));
    assert_eq!(
        fs::read_dir(inbox.join("model/deep/er")).unwrap().count(),
        sizes.len(),
        "no partial files"
    );

    // Again: nothing is sent, and nothing is wrong.
    let receiver = Listening::once(&inbox);
    let sent = push(&[&model, &extra], &receiver.address);
    assert!(
        sent.status.success() && text(&sent.stderr).contains("0 B sent"),
        "{}",
        text(&sent.stderr)
    );
    assert!(receiver.ended().status.success());
}

/// As where it goes into `grep -m1 iw1:`.
#[test]
fn a_receiver_whose_words_nobody_reads_receives_all_the_same() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = from.path().join("x");
    fs::write(&file, b"hello").unwrap();
    let dir = to.path().to_str().unwrap();
    let mut command = immwire(["recv", "--once", "--dir", dir]);
    // Its log, too.
    command.env("IMMWIRE_LOG", "trace");
    let mut receiver = Listening::start(command);
    drop(receiver.child.stderr.take());
    let sent = push(&[&file], &receiver.address);
    assert!(sent.status.success(), "{}", text(&sent.stderr));
    assert_eq!(status(&mut receiver.child).code(), Some(0));
    assert_eq!(fs::read(to.path().join("x")).unwrap(), b"hello");
}

#[test]
fn links_arrive_under_their_own_names_and_dots_under_those_of_their_folders() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let snapshot = from.path().join("snapshot");
    fs::create_dir(&snapshot).unwrap();
    fs::create_dir(snapshot.join("here")).unwrap();
    fs::write(from.path().join("1f3a"), b"weights").unwrap();
    fs::write(snapshot.join("here/config"), b"config").unwrap();
    std::os::unix::fs::symlink("../1f3a", snapshot.join("model.safetensors")).unwrap();
    let pushes: [(&str, &[&str]); 3] = [
        ("model.safetensors", &["model.safetensors"]),
        ("here/.", &["here/config"]),
        (".", &["snapshot/here/config"]),
    ];
    for (argument, arrived) in pushes {
        let receiver = Listening::once(to.path());
        let mut sender = immwire(["push", argument, &receiver.address]);
        let sent = ended(sender.current_dir(&snapshot).spawn().unwrap());
        assert!(sent.status.success(), "{argument}: {}", text(&sent.stderr));
        assert!(receiver.ended().status.success(), "{argument}");
        for path in arrived {
            assert!(to.path().join(path).is_file(), "{argument}: {path}");
        }
    }
    let receiver = Listening::once(to.path());
    let mut sender = immwire(["push", "..", &receiver.address]);
    let sent = ended(sender.current_dir(snapshot.join("here")).spawn().unwrap());
    assert!(sent.status.success(), "{}", text(&sent.stderr));
    assert_eq!(fs::read(to.path().join("model.safetensors")).unwrap(), b"weights");
    let mut names: Vec<_> =
        fs::read_dir(to.path()).unwrap().map(|found| found.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["here", "model.safetensors", "snapshot"]);
}

const BIG: usize = 192 << 20;

/// A big file, pushed to `receiver` until some of it has arrived: there the receiver stands still.
fn broken_off(from: &Path, to: &Path, receiver: Listening) -> (Listening, Child) {
    fs::write(from, noise(9, BIG)).unwrap();
    let sender = begun(&[from], to, &to.join("big.immwire-partial"), &receiver);
    (receiver, sender)
}

/// A push of a big file, among others, to `receiver`, which stands still once some of it lies in `partial`, and no more than the receiver
/// wrote by the call that it is stopped in: the push cannot end, however long nobody looks.
fn begun(paths: &[&Path], to: &Path, partial: &Path, receiver: &Listening) -> Child {
    let stops = Stops::at_changes(&receiver.child, to);
    let paths = paths.iter().map(|path| path.to_str().unwrap());
    let words = ["push"].into_iter().chain(paths).chain([&*receiver.address]);
    let mut sender = immwire(words).spawn().unwrap();
    loop {
        until("some of it arrives", || is_stopped(&receiver.child));
        let here = fs::metadata(partial).map_or(0, |metadata| metadata.len());
        if here > 8 << 20 {
            break;
        }
        // Which the receiver may have made just now.
        let folder = partial.parent().unwrap();
        if folder.exists() {
            stops.watch(folder);
        }
        stops.go_on(&receiver.child);
    }
    assert!(sender.try_wait().unwrap().is_none(), "it ended before it could be broken off");
    sender
}

fn goes_on(from: &Path, to: &Path, address: &str) {
    let here = fs::metadata(to.join("big.immwire-partial")).unwrap().len();
    assert!(here > 8 << 20 && here < BIG as u64);
    let sent = push(&[from], address);
    let said = text(&sent.stderr);
    assert!(sent.status.success() && said.contains("were there already"), "{said}");
    assert!(fs::read(to.join("big")).unwrap() == noise(9, BIG));
    assert!(!to.join("big.immwire-partial").exists());
}

#[test]
fn a_push_goes_on_after_its_sender_was_killed() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = from.path().join("big");
    let (mut receiver, mut sender) = broken_off(&file, to.path(), Listening::receiver(to.path()));
    sender.kill().unwrap();
    sender.wait().unwrap();
    signal(&receiver.child, Signal::CONT);
    // All that had come is written by then.
    receiver.says("gone");
    assert!(!to.path().join("big").exists());
    // The receiver is still there, and takes the next one.
    goes_on(&file, to.path(), &receiver.address);
    assert!(receiver.child.try_wait().unwrap().is_none());
    signal(&receiver.child, Signal::INT);
    let ended = receiver.ended();
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    assert!(text(&ended.stderr).contains("gone"), "{}", text(&ended.stderr));
}

#[test]
fn a_push_goes_on_after_its_receiver_was_killed() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = from.path().join("big");
    let (receiver, sender) = broken_off(&file, to.path(), Listening::receiver(to.path()));
    drop(receiver);
    assert!(!to.path().join("big").exists());
    let sent = ended(sender);
    assert_eq!(sent.status.code(), Some(1));
    assert!(text(&sent.stderr).contains("gone"), "{}", text(&sent.stderr));
    let receiver = Listening::once(to.path());
    goes_on(&file, to.path(), &receiver.address);
    assert!(receiver.ended().status.success());
}

#[test]
fn a_push_that_replaces_a_file_of_the_same_size_goes_on_after_a_kill() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = from.path().join("big");
    fs::write(to.path().join("big"), noise(8, BIG)).unwrap();
    let overwriting = || {
        let dir = to.path().to_str().unwrap();
        Listening::start(immwire(["recv", "--overwrite", "--dir", dir]))
    };
    let (receiver, sender) = broken_off(&file, to.path(), overwriting());
    drop(receiver);
    assert_eq!(ended(sender).status.code(), Some(1));
    assert!(fs::read(to.path().join("big")).unwrap() == noise(8, BIG));
    let receiver = overwriting();
    goes_on(&file, to.path(), &receiver.address);
    // With nothing left over, what is there is found to be right.
    let sent = push(&[&file], &receiver.address);
    let said = text(&sent.stderr);
    assert!(sent.status.success() && said.contains("0 B sent"), "{said}");
}

#[test]
fn folders_of_a_push_that_goes_on_get_their_modes_and_times() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (tree, old) = (from.path().join("tree"), from.path().join("old"));
    let folders =
        [("tree", 0o751), ("tree/open", 0o777), ("tree/open/deep", 0o750), ("tree/secret", 0o700)];
    fs::create_dir(&old).unwrap();
    for (folder, _) in folders {
        fs::create_dir(from.path().join(folder)).unwrap();
    }
    fs::write(tree.join("secret/key"), b"key").unwrap();
    fs::write(tree.join("big"), noise(9, BIG)).unwrap();
    let seconds = |number: usize| 1_500_000_000 + number as u64;
    for (number, (folder, mode)) in folders.iter().enumerate() {
        let path = from.path().join(folder);
        fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).unwrap();
        let past = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds(number));
        fs::File::open(&path).unwrap().set_modified(past).unwrap();
    }
    let mode = |path: &str| fs::metadata(to.path().join(path)).unwrap().mode() & 0o7777;
    let set = |path: &str, mode| {
        fs::set_permissions(to.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
    };
    fs::create_dir(to.path().join("old")).unwrap();
    set("old", 0o705);

    let receiver = Listening::receiver(to.path());
    let partial = to.path().join("tree/big.immwire-partial");
    let sender = begun(&[&tree, &old], to.path(), &partial, &receiver);
    drop(receiver);
    assert_eq!(ended(sender).status.code(), Some(1));
    assert_eq!(mode("tree/secret") & 0o77, 0, "nobody else sees what arrives");
    let receiver = Listening::receiver(to.path());
    let sent = push(&[&tree, &old], &receiver.address);
    let said = text(&sent.stderr);
    assert!(sent.status.success() && said.contains("were there already"), "{said}");
    for (number, (folder, expected)) in folders.iter().enumerate() {
        let time = fs::metadata(to.path().join(folder)).unwrap().mtime();
        assert_eq!((mode(folder), time), (*expected, seconds(number) as i64), "{folder}");
    }
    assert_eq!(mode("old"), 0o705, "it was there before");
    // Now they all were.
    set("tree/open", 0o705);
    assert!(push(&[&tree, &old], &receiver.address).status.success());
    assert_eq!(mode("tree/open"), 0o705);
}

#[test]
fn ctrl_c_ends_a_push_with_its_own_code_and_leaves_what_came() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = from.path().join("big");
    let (mut receiver, mut sender) = broken_off(&file, to.path(), Listening::receiver(to.path()));
    signal(&sender, Signal::INT);
    assert_eq!(status(&mut sender).code(), Some(130));
    signal(&receiver.child, Signal::CONT);
    // Why it ended, or that the sender is gone, if that did not come to say so. All that had come is written by then.
    receiver.says("immwire: ");
    goes_on(&file, to.path(), &receiver.address);
}

#[test]
fn a_prefix_that_is_not_ours_is_not_gone_on_from() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = from.path().join("x");
    fs::write(&file, noise(1, 3 << 20)).unwrap();
    fs::write(to.path().join("x.immwire-partial"), noise(2, 1 << 20)).unwrap();
    let receiver = Listening::once(to.path());
    let sent = push(&[&file], &receiver.address);
    assert!(sent.status.success(), "{}", text(&sent.stderr));
    assert!(!text(&sent.stderr).contains("already"));
    assert!(fs::read(to.path().join("x")).unwrap() == noise(1, 3 << 20));
}

#[test]
fn an_existing_file_stays_unless_it_may_be_replaced() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = from.path().join("x");
    fs::write(&file, b"theirs").unwrap();
    for mine in [&b"mine"[..], b"mine!!"] {
        fs::write(to.path().join("x"), mine).unwrap();
        let receiver = Listening::once(to.path());
        let sent = push(&[&file], &receiver.address);
        assert_eq!(sent.status.code(), Some(1));
        assert!(
            text(&sent.stderr).contains("x is here with other contents"),
            "{}",
            text(&sent.stderr)
        );
        assert_eq!(receiver.ended().status.code(), Some(1));
        assert_eq!(fs::read(to.path().join("x")).unwrap(), mine);
        let dir = to.path().to_str().unwrap();
        let receiver = Listening::start(immwire(["recv", "--once", "--overwrite", "--dir", dir]));
        let sent = push(&[&file], &receiver.address);
        assert!(sent.status.success(), "{}", text(&sent.stderr));
        assert_eq!(fs::read(to.path().join("x")).unwrap(), b"theirs");
    }
}

#[test]
fn a_file_that_may_not_grow_is_a_clear_error_on_both_sides() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = from.path().join("x");
    fs::write(&file, noise(1, BIG)).unwrap();
    // 80 or 160 MiB, as the shell counts: smaller than the file, bigger than the staging memory.
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "ulimit -f 163840; exec \"$0\" recv --once --dir \"$1\""]);
    limited.args([env!("CARGO_BIN_EXE_immwire"), to.path().to_str().unwrap()]);
    limited.stdin(std::process::Stdio::null());
    limited.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let receiver = Listening::start(limited);
    let sent = push(&[&file], &receiver.address);
    assert_eq!(sent.status.code(), Some(1));
    let reason = "x cannot grow to 192 MiB: file too large";
    assert!(text(&sent.stderr).contains(reason), "{}", text(&sent.stderr));
    let received = receiver.ended();
    assert_eq!(received.status.code(), Some(1), "{}", text(&received.stderr));
    assert!(text(&received.stderr).contains(reason), "{}", text(&received.stderr));
    // What fitted is gone on from.
    let receiver = Listening::once(to.path());
    let sent = push(&[&file], &receiver.address);
    assert!(
        sent.status.success() && text(&sent.stderr).contains("already"),
        "{}",
        text(&sent.stderr)
    );
    assert!(fs::read(to.path().join("x")).unwrap() == noise(1, BIG));
}

/// Says `words` to a receiver as a sender would, raw; returns its first answer.
fn answer_to(address: &str, fragments: &[Vec<u8>]) -> FromReceiver {
    let mut motor = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
    let second = Duration::from_secs(1);
    let peer = motor.connect(&address.parse().unwrap(), 20 * second).unwrap();
    for fragment in fragments {
        motor.send(peer, fragment, 20 * second).unwrap();
    }
    let mut assembler = Assembler::default();
    loop {
        let message = motor.message(20 * second).unwrap().expect("an answer");
        if let Some(answer) = assembler.take(&message.bytes).unwrap() {
            return answer;
        }
    }
}

#[test]
fn hostile_senders_are_refused_and_the_receiver_goes_on() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let outside = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(outside.path(), to.path().join("exit")).unwrap();
    let inbox = to.path().join("inbox");
    fs::create_dir(&inbox).unwrap();
    std::os::unix::fs::symlink(outside.path(), inbox.join("exit")).unwrap();
    let receiver = Listening::receiver(&inbox);

    let entry = |path: &str, size: &str| {
        format!(r#"{{"path":{path:?},"size":{size},"mode":511,"mtime_s":0,"mtime_ns":0}}"#)
    };
    let offer = |version: u32, entries: &str| {
        let text = format!(
            r#"{{"say":"offer","version":{version},"credit_tag":0,"entries":[{entries}]}}"#
        );
        vec![[&[1], text.as_bytes()].concat()]
    };
    let hostile = [
        ("../evil", "1", "not a message"),
        ("/tmp/evil", "1", "not a message"),
        ("a/../../evil", "1", "not a message"),
        ("exit/evil", "1", "not a folder"),
        ("exit", "1", "not a regular file"),
        ("huge", "9223372036854775807", "disk full"),
        ("bigger", "18446744073709551615", "2^63"),
    ];
    for (path, size, reason) in hostile {
        let said = answer_to(&receiver.address, &offer(VERSION, &entry(path, size)));
        let FromReceiver::Failed { reason: found } = said else {
            // Whoever is let in so far is refused when it begins, before a byte is taken.
            assert_eq!(reason, "disk full", "{path}: {said:?}");
            continue;
        };
        assert!(found.contains(reason), "{path}: {found}");
    }
    let twice = [entry("a", "1"), entry("a", "2")].join(",");
    let raw = [
        (offer(VERSION, &twice), "twice"),
        (offer(VERSION, ""), "nothing to send"),
        (offer(1, &entry("a", "1")), "version 1"),
        (offer(VERSION + 1, &entry("a", "1")), "version 3"),
        (vec![b"\x01garbage".to_vec()], "not a message"),
        (vec![b"\x07".to_vec()], "fragment"),
        (vec![Vec::new()], "fragment"),
        (vec![b"\x01{\"say\":\"begin\",\"keep\":7}".to_vec()], "not a message"),
    ];
    for (fragments, reason) in raw {
        let said = answer_to(&receiver.address, &fragments);
        let FromReceiver::Failed { reason: found } = &said else { panic!("{reason}: {said:?}") };
        assert!(found.contains(reason), "{reason}: {found}");
    }
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    assert!(!to.path().join("evil").exists() && !Path::new("/tmp/evil").exists());

    // And then somebody honest.
    let file = from.path().join("good");
    fs::write(&file, b"good").unwrap();
    let sent = push(&[&file], &receiver.address);
    assert!(sent.status.success(), "{}", text(&sent.stderr));
    assert_eq!(fs::read(inbox.join("good")).unwrap(), b"good");
}

/// Offers `entry` as a sender would, raw, and keeps of what the receiver has what `keep` says; returns what it says to that.
fn begun_raw(
    address: &str,
    entry: &str,
    keep: impl FnOnce(Vec<Have>) -> Vec<serde_json::Value>,
) -> FromReceiver {
    let mut motor = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
    let wait = Duration::from_secs(20);
    let peer = motor.connect(&address.parse().unwrap(), wait).unwrap();
    let say = |motor: &mut Motor, message: &serde_json::Value| {
        for fragment in fragments(message, 1 << 15).unwrap() {
            motor.send(peer, &fragment, wait).unwrap();
        }
    };
    let mut assembler = Assembler::default();
    let mut hear = |motor: &mut Motor| loop {
        let message = motor.message(wait).unwrap().expect("an answer");
        match assembler.take(&message.bytes).unwrap() {
            None | Some(FromReceiver::Working) => {}
            Some(answer) => return answer,
        }
    };
    let entry: serde_json::Value = serde_json::from_str(entry).unwrap();
    let offer = serde_json::json!({
        "say": "offer", "version": VERSION, "credit_tag": 0, "entries": [entry]
    });
    say(&mut motor, &offer);
    let answer = hear(&mut motor);
    let FromReceiver::Accept { have, .. } = answer else { panic!("{answer:?}") };
    say(&mut motor, &serde_json::json!({"say": "begin", "keep": keep(have)}));
    hear(&mut motor)
}

#[test]
fn whoever_does_not_know_a_files_bytes_changes_neither_its_mode_nor_its_time() {
    let to = tempfile::tempdir().unwrap();
    let (secret, begun) = (to.path().join("secret"), to.path().join("begun.immwire-partial"));
    let past = SystemTime::UNIX_EPOCH + Duration::from_secs(1_500_000_000);
    for path in [&secret, &begun] {
        fs::write(path, b"a key").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::File::open(path).unwrap().set_modified(past).unwrap();
    }
    let receiver = Listening::receiver(to.path());
    for name in ["secret", "begun"] {
        let entry = format!(r#"{{"path":"{name}","size":5,"mode":438,"mtime_s":7,"mtime_ns":0}}"#);
        // All that it knows is what it was told.
        for echoes in [false, true] {
            let said = begun_raw(&receiver.address, &entry, |have| {
                let told = serde_json::to_value(have[0].digest).unwrap();
                let other = serde_json::Value::from("00".repeat(32));
                let digest = if echoes { told } else { other };
                vec![serde_json::json!({"file": 0, "bytes": have[0].bytes, "digest": digest})]
            });
            let FromReceiver::Failed { reason } = &said else { panic!("{name}: {said:?}") };
            assert!(reason.contains("does not know"), "{name}: {reason}");
        }
    }
    for path in [&secret, &begun] {
        let found = fs::metadata(path).unwrap();
        assert_eq!((found.mode() & 0o7777, found.mtime()), (0o600, 1_500_000_000), "{path:?}");
    }
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 2);
}

#[test]
fn an_offer_that_has_no_room_is_refused_when_it_begins() {
    let to = tempfile::tempdir().unwrap();
    let receiver = Listening::once(to.path());
    let huge = r#"{"path":"huge","size":9223372036854775807,"mode":0,"mtime_s":0,"mtime_ns":0}"#;
    let said = begun_raw(&receiver.address, huge, |_| Vec::new());
    let FromReceiver::Failed { reason } = said else {
        panic!("it has room for 2^63 bytes: {said:?}")
    };
    assert!(reason.contains("disk full"), "{reason}");
    let ended = receiver.ended();
    assert_eq!(ended.status.code(), Some(1));
    assert!(text(&ended.stderr).contains("disk full"));
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
}

/// Says `at_least` messages, and goes on to `at_most` while there is a push, and never listens; returns how
/// many were taken.
fn talks_without_listening(
    address: &str,
    (at_least, at_most): (usize, usize),
    push: impl FnOnce(),
) -> usize {
    let stop = AtomicBool::new(false);
    let mut motor = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
    let wait = Duration::from_secs(20);
    let peer = motor.connect(&address.parse().unwrap(), wait).unwrap();
    std::thread::scope(|scope| {
        let talker = scope.spawn(|| {
            let goes_on = |said: usize| said < at_least || !stop.load(Relaxed);
            let says = |said: &usize| goes_on(*said) && motor.send(peer, b"\x07", wait).is_ok();
            (0..at_most).take_while(says).count()
        });
        push();
        stop.store(true, Relaxed);
        talker.join().unwrap()
    })
}

#[test]
fn whoever_talks_and_never_listens_is_in_nobodys_way() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = from.path().join("x");
    fs::write(&file, noise(1, 32 << 20)).unwrap();
    let receiver = Listening::receiver(to.path());
    let said = talks_without_listening(&receiver.address, (320, 400), || {
        let sent = run(["push", file.to_str().unwrap(), &*receiver.address, "--patience", "3"]);
        assert!(sent.status.success(), "{}", text(&sent.stderr));
    });
    // More than a mailbox holds of answers.
    assert!(said >= 320, "{said}");
    assert!(fs::read(to.path().join("x")).unwrap() == noise(1, 32 << 20));
}

#[test]
fn what_a_stranger_says_does_not_reach_the_terminal_as_it_is() {
    let to = tempfile::tempdir().unwrap();
    let receiver = Listening::once(to.path());
    let hostile = vec![b"\x01{\"say\":\"\\u001b[2Jboo\"}".to_vec()];
    let FromReceiver::Failed { .. } = answer_to(&receiver.address, &hostile) else {
        panic!("it makes sense")
    };
    let ended = receiver.ended();
    assert_eq!(ended.status.code(), Some(1));
    assert!(text(&ended.stderr).contains("boo"), "{}", text(&ended.stderr));
    assert!(!ended.stderr.contains(&0x1b), "{:?}", text(&ended.stderr));
}
