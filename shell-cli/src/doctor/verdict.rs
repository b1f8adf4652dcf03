//! Which path each pair takes, why not a faster one, and what to do about it.
//!
//! A pure function of [`Facts`] and [`Probes`].
//!
//! # Invariants
//!
//! - Every row that is not the fastest says why and what to do.
//! - The level follows from the rows alone: what this version cannot do on any machine is said, but
//!   is not held against this machine.

use super::facts::{Facts, Limit};
use super::probe::{Attempt, Probes};
use serde::Serialize;

/// How well a pair is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// By the fastest path there is.
    Best,
    /// By a slower path.
    Degraded,
    /// Not, for a reason of this machine.
    Broken,
    /// Not, because this version has no provider for it.
    NotInThisVersion,
}

/// How one kind of pair is served.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Path {
    /// From where to where.
    pub pair: &'static str,
    /// By what.
    pub path: String,
    /// How well.
    pub state: State,
    /// Why not faster, or why it does not apply.
    pub why: String,
    /// What to do about it.
    pub todo: String,
}

/// Something that costs speed without changing the path.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Note {
    /// What was seen.
    pub seen: String,
    /// What to do about it.
    pub todo: String,
}

/// The judgement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// One entry for each kind of pair.
    pub paths: Vec<Path>,
    /// Advice.
    pub notes: Vec<Note>,
    /// For scripts: 0 can run, 1 can run on degraded paths, 2 cannot run.
    pub exit_code: u8,
}

/// Judges a machine.
#[must_use]
pub fn judge(facts: &Facts, probes: &Probes) -> Verdict {
    let mapped = mapped(probes);
    let runs = mapped.state == State::Best;
    let paths = vec![mapped, registered(facts, probes, runs), gpus(facts), hosts(facts)];
    let any = |state| paths.iter().any(|path| path.state == state);
    let exit_code = if any(State::Broken) { 2 } else { u8::from(any(State::Degraded)) };
    Verdict { exit_code, notes: notes(facts), paths }
}

fn mapped(probes: &Probes) -> Path {
    let pair = "same host, memory from the engine's alloc";
    let needs = [
        ("memfd_create and sealing", &probes.memfd_sealing),
        ("Unix sockets", &probes.unix_socket),
    ];
    let missing = needs.iter().find_map(|(what, attempt)| match attempt {
        Attempt::Works => None,
        Attempt::Fails(why) => Some(format!("{what} failed: {why}")),
    });
    match missing {
        None => Path {
            pair,
            path: "shm: one copy into the peer's memory".into(),
            state: State::Best,
            why: "the fastest there is on one host".into(),
            todo: "-".into(),
        },
        Some(why) => Path {
            pair,
            path: "none".into(),
            state: State::Broken,
            why,
            todo: "allow these calls in the sandbox or container profile".into(),
        },
    }
}

fn registered(facts: &Facts, probes: &Probes, runs: bool) -> Path {
    let pair = "same host, other registered memory";
    if !runs {
        return Path {
            pair,
            path: "none".into(),
            state: State::Broken,
            why: "peers on this host cannot connect, see above".into(),
            todo: "as above".into(),
        };
    }
    let why = match (&probes.process_vm_writev, facts.ptrace_scope) {
        (Attempt::Works, None | Some(0)) => {
            return Path {
                pair,
                path: "shm: process_vm_writev, one copy by the kernel".into(),
                state: State::Best,
                why: "memory from alloc saves the system call".into(),
                todo: "use the engine's alloc where you can".into(),
            };
        }
        (Attempt::Works, Some(scope)) => {
            format!(
                "process_vm_writev is refused to processes other than descendants (kernel.yama.ptrace_scope = {scope})"
            )
        }
        (Attempt::Fails(why), _) => format!("{why} (a container's seccomp profile may refuse it)"),
    };
    Path {
        pair,
        path: "shm: bounce ring, two copies".into(),
        state: State::Degraded,
        why,
        todo: match facts.ptrace_scope {
            Some(1..) => "use the engine's alloc, or set kernel.yama.ptrace_scope=0",
            _ => "use the engine's alloc, or run both processes as one user with CAP_SYS_PTRACE allowed",
        }
        .into(),
    }
}

fn gpus(facts: &Facts) -> Path {
    let count = facts.gpus.len();
    Path {
        pair: "GPU memory",
        path: "none: stage through host memory".into(),
        state: State::NotInThisVersion,
        why: match count {
            0 => "no GPU found; GPU memory is not part of this version".into(),
            _ => format!("{count} GPU(s) found; GPU memory is not part of this version"),
        },
        todo: "copy to memory from the engine's alloc".into(),
    }
}

fn hosts(facts: &Facts) -> Path {
    let active: Vec<_> = facts
        .rdma
        .iter()
        .filter(|device| device.ports.iter().any(|port| port.active))
        .map(|device| device.name.as_str())
        .collect();
    let found = match (active.as_slice(), facts.rdma.len() + facts.efa.len()) {
        ([], 0) => "no RDMA device found".to_owned(),
        ([], _) => "RDMA devices found, none with an active port".to_owned(),
        (names, _) => format!("RDMA found: {}", names.join(", ")),
    };
    Path {
        pair: "other hosts",
        path: "none".into(),
        state: State::NotInThisVersion,
        why: format!("{found}; the verbs and libfabric providers are not part of this version"),
        todo: "wait for a version with them".into(),
    }
}

fn notes(facts: &Facts) -> Vec<Note> {
    let mut notes = Vec::new();
    let mut note = |seen: String, todo: &str| notes.push(Note { seen, todo: todo.to_owned() });
    if facts.cpu.online == Some(1) {
        note(
            "one processor: two processes take turns, so a hand-over costs a scheduler's turn"
                .into(),
            "use the blocking idle mode; do not spin",
        );
    }
    if facts.numa.len() > 1 {
        note(
            format!("{} NUMA nodes: a copy across them is slower", facts.numa.len()),
            "keep both processes and their memory on one node (numactl --cpunodebind --membind)",
        );
    }
    if matches!(facts.memory.shmem_huge.as_deref(), Some("never" | "deny")) {
        note(
            "shared memory has small pages only (transparent_hugepage/shmem_enabled = never)"
                .into(),
            "for large regions: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        );
    }
    if let Some(Limit::At(files)) =
        facts.limits.open_files.filter(|limit| matches!(limit, Limit::At(..256)))
    {
        note(
            format!("at most {files} open files: each peer and each shared region takes one"),
            "raise it (ulimit -n)",
        );
    }
    if let Some(Limit::At(bytes)) = facts.limits.locked.filter(|_| !facts.rdma.is_empty()) {
        note(
            format!("at most {bytes} bytes may be locked; shared memory needs none, a NIC will"),
            "raise it (ulimit -l unlimited) before a version with NICs",
        );
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::facts::{Gpu, NumaNode, RdmaDevice, RdmaPort};

    fn probes(memfd: bool, writev: bool, socket: bool) -> Probes {
        let attempt = |works| {
            if works { Attempt::Works } else { Attempt::Fails("refused".into()) }
        };
        Probes {
            memfd_sealing: attempt(memfd),
            process_vm_writev: attempt(writev),
            unix_socket: attempt(socket),
        }
    }

    #[test]
    fn the_exit_code_follows_from_what_peers_on_this_host_can_use() {
        for bits in 0..8 {
            let (memfd, writev, socket) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
            for ptrace_scope in [None, Some(0), Some(1), Some(2), Some(3)] {
                let facts = Facts { ptrace_scope, ..Facts::default() };
                let verdict = judge(&facts, &probes(memfd, writev, socket));
                let expected = match (memfd && socket, writev && ptrace_scope.unwrap_or(0) == 0) {
                    (false, _) => 2,
                    (true, false) => 1,
                    (true, true) => 0,
                };
                assert_eq!(verdict.exit_code, expected, "{bits} {ptrace_scope:?}");
                assert_eq!(verdict.paths.len(), 4);
                for path in &verdict.paths {
                    assert!(!path.why.is_empty() && !path.todo.is_empty(), "{path:?}");
                }
            }
        }
    }

    #[test]
    fn the_reason_of_a_slower_path_is_the_one_that_holds() {
        let yama = Facts { ptrace_scope: Some(1), ..Facts::default() };
        let path = &judge(&yama, &probes(true, true, true)).paths[1];
        assert!(path.why.contains("ptrace_scope = 1") && path.todo.contains("ptrace_scope=0"));
        let path = &judge(&Facts::default(), &probes(true, false, true)).paths[1];
        assert!(path.why.contains("refused") && !path.todo.contains("yama"));
        assert_eq!(path.state, State::Degraded);
    }

    #[test]
    fn gpus_and_nics_are_named_and_never_promised() {
        let port = |active| RdmaPort { active, ..RdmaPort::default() };
        let device = |name: &str, active| RdmaDevice {
            name: name.into(),
            ports: vec![port(active)],
            ..RdmaDevice::default()
        };
        let facts = Facts {
            gpus: vec![Gpu::default(), Gpu::default()],
            rdma: vec![device("mlx5_0", true), device("mlx5_1", false)],
            ..Facts::default()
        };
        let verdict = judge(&facts, &probes(true, true, true));
        assert!(verdict.paths[2].why.starts_with("2 GPU(s)"));
        assert!(verdict.paths[3].why.starts_with("RDMA found: mlx5_0;"));
        assert!(verdict.paths[2..].iter().all(|path| path.state == State::NotInThisVersion));
        assert_eq!(verdict.exit_code, 0);
        let down = Facts { rdma: vec![device("mlx5_1", false)], ..Facts::default() };
        assert!(
            judge(&down, &probes(true, true, true)).paths[3]
                .why
                .contains("none with an active port")
        );
    }

    #[test]
    fn advice_is_given_where_it_applies_and_only_there() {
        assert!(judge(&Facts::default(), &probes(true, true, true)).notes.is_empty());
        let mut facts = Facts::default();
        facts.cpu.online = Some(1);
        facts.numa = vec![NumaNode::default(), NumaNode::default()];
        facts.memory.shmem_huge = Some("never".into());
        facts.limits.open_files = Some(Limit::At(255));
        facts.limits.locked = Some(Limit::At(65536));
        assert_eq!(
            judge(&facts, &probes(true, true, true)).notes.len(),
            4,
            "no NIC, so no locked memory"
        );
        facts.rdma = vec![RdmaDevice::default()];
        assert_eq!(judge(&facts, &probes(true, true, true)).notes.len(), 5);
        facts.limits.open_files = Some(Limit::At(256));
        assert_eq!(judge(&facts, &probes(true, true, true)).notes.len(), 4);
    }
}
