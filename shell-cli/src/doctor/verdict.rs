//! Which path each pair takes, why not a faster one, and what to do about it.
//!
//! A pure function of [`Facts`] and [`Probes`].
//!
//! # Invariants
//!
//! - Every row that is not the fastest says why and what to do.
//! - The level follows from the rows alone: what a machine alone has no need of is said, but is not held against this
//!   machine.

use super::cuda::{Cuda, CudaGpu, Gpus, Nics};
use super::fabric::{Fabric, Libfabric};
use super::facts::{Facts, Limit};
use super::probe::{Attempt, Probes};
use super::rdma::Verbs;
use serde::Serialize;

/// How well a pair is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// By the fastest path there is.
    Best,
    /// By a slower path, or by none while devices for one lie idle.
    Degraded,
    /// Not, for a reason of this machine.
    Broken,
    /// Not, until something is installed or set up that not every machine needs.
    Missing,
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
    let (gpus, hosts) = (gpus(facts, &probes.cuda), hosts(facts, probes));
    let both = both(runs, &gpus, &hosts);
    let far = gpus_far(facts, probes, &hosts);
    let paths = vec![mapped, registered(facts, probes, runs), gpus, hosts, far, both];
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
    let allow =
        "use the engine's alloc, or run both processes as one user with CAP_SYS_PTRACE allowed";
    let (why, todo) = match (&probes.process_vm_writev, yama(facts)) {
        (Attempt::Works, None) => {
            return Path {
                pair,
                path: "shm: process_vm_writev, one copy by the kernel".into(),
                state: State::Best,
                why: "memory from alloc saves the system call".into(),
                todo: "use the engine's alloc where you can".into(),
            };
        }
        // Scope 1 would have let the child be written to.
        (Attempt::Fails(why), None | Some((1, ..))) => {
            (format!("{why} (a container's seccomp profile may refuse it)"), allow)
        }
        (_, Some((scope, whom, todo))) => (
            format!("process_vm_writev is refused to {whom} (kernel.yama.ptrace_scope = {scope})"),
            todo,
        ),
    };
    Path {
        pair,
        path: "shm: bounce ring, two copies".into(),
        state: State::Degraded,
        why,
        todo: todo.into(),
    }
}

/// Whether Yama is in the way of peers: its scope, whom it refuses, and what to do about it.
fn yama(facts: &Facts) -> Option<(u32, &'static str, &'static str)> {
    let lower = "use the engine's alloc, or set kernel.yama.ptrace_scope=0";
    match (facts.ptrace_scope?, facts.cap_sys_ptrace) {
        (0, _) | (1 | 2, true) => None,
        (1, false) => Some((1, "processes other than descendants", lower)),
        (2, false) => Some((2, "processes without CAP_SYS_PTRACE", lower)),
        (scope, _) => Some((
            scope,
            "all processes until the next boot",
            "use the engine's alloc, or boot with a lower kernel.yama.ptrace_scope",
        )),
    }
}

fn gpus(facts: &Facts, cuda: &Cuda) -> Path {
    let pair = "same host, GPU memory";
    let none = |why: String, todo: &str| Path {
        pair,
        path: "none: stage through host memory".into(),
        state: State::Missing,
        why,
        todo: todo.into(),
    };
    let count = facts.gpus.len();
    let found = match cuda {
        Cuda::Found(found) => found,
        Cuda::NotFound(_) if count == 0 => return none("no GPU found".into(), "-"),
        Cuda::NotFound(_) => {
            let why = format!("{count} GPU(s) on the PCI bus, and no CUDA driver");
            return none(why, "install NVIDIA's driver, if they are NVIDIA's");
        }
        Cuda::Fails(why) => {
            return none(format!("the CUDA driver fails: {why}"), "see that nvidia-smi works");
        }
    };
    let usable: Vec<_> = found.usable().map(|gpu| gpu.ordinal.to_string()).collect();
    let Some(unused) = found.gpus.iter().find(|gpu| gpu.why_not.is_some()) else {
        if usable.is_empty() {
            return none("the CUDA driver has no GPU".into(), "see CUDA_VISIBLE_DEVICES");
        }
        let path = format!("shm: copies by GPUs {}", usable.join(", "));
        if let Some((from, to)) = apart(found) {
            let why = format!(
                "GPU {from} does not reach the memory of GPU {to}: writes from one to the other are refused"
            );
            let todo = "between these, go by way of host memory, or over TCP with --provider libfabric --staging 64M; \
                        `nvidia-smi topo -p2p r` says who reaches whom";
            return Path { pair, path, state: State::Degraded, why, todo: todo.into() };
        }
        return Path {
            pair,
            path,
            state: State::Best,
            why: "over NVLink where it is, else PCIe; engines must name their GPUs".into(),
            todo: "-".into(),
        };
    };
    let why = unused.why_not.as_deref().unwrap_or_default();
    let why = format!("GPU {} cannot be used: {why}", unused.ordinal);
    let todo = if found.kernels {
        "leave it out"
    } else {
        "build it again where there is an nvcc, or with IMMWIRE_NVCC naming one"
    };
    if usable.is_empty() {
        return none(why, todo);
    }
    let path = format!("shm: copies by GPUs {}", usable.join(", "));
    Path { pair, path, state: State::Degraded, why, todo: todo.into() }
}

/// The first two, of the GPUs that engines can use, of which one does not reach the other's memory.
fn apart(found: &Gpus) -> Option<(u32, u32)> {
    found.usable().find_map(|from| {
        let missed =
            |to: &&CudaGpu| to.ordinal != from.ordinal && !from.reaches.contains(&to.ordinal);
        Some((from.ordinal, found.usable().find(missed)?.ordinal))
    })
}

/// By which NICs a GPU's memory goes to other hosts. That it does not is held against no machine: it is staged then.
fn gpus_far(facts: &Facts, probes: &Probes, hosts: &Path) -> Path {
    let none = |why: String, todo: &str| Path {
        pair: "other hosts, GPU memory",
        path: "none: stage through host memory".into(),
        state: State::Missing,
        why,
        todo: todo.into(),
    };
    let Cuda::Found(found) = &probes.cuda else {
        return none("no GPU that engines can use, see above".into(), "-");
    };
    // NICs need no copier: a GPU that is open will do.
    if found.opened().next().is_none() {
        return none("no GPU that the CUDA driver opens, see above".into(), "-");
    }
    // That takes one.
    let staged = match found.usable().next() {
        Some(_) => "stage it: --staging, or Builder::staging",
        None => "see the row on GPU memory of the same host: staging takes the same GPUs",
    };
    let reached = |gpu: &&CudaGpu| gpu.nics != Nics::Never;
    let Some(by_address) = found.opened().find(reached).map(|gpu| gpu.nics == Nics::ByAddress)
    else {
        return none("CUDA lets no NIC at the memory of a GPU here".into(), staged);
    };
    let rdma = !facts.rdma.is_empty() && hosts.path.starts_with("verbs");
    let efa = hosts.path.contains("efa on ");
    if !rdma && !efa {
        let why = "it takes RDMA devices or EFA: TCP carries host memory".into();
        return none(why, &format!("see the row above, or {staged}"));
    }
    let peermem = ["nvidia_peermem", "nv_peer_mem"];
    let peermem = facts.gpu_modules.iter().any(|module| peermem.contains(&module.as_str()));
    if by_address && !peermem {
        let why = "the driver has no DMA-BUF of a GPU's memory, and nvidia-peermem is not loaded";
        let todo = "install NVIDIA's open kernel modules (Linux 5.12 or later), or modprobe nvidia-peermem";
        return none(why.into(), &format!("{todo}, or {staged}"));
    }
    Path {
        pair: "other hosts, GPU memory",
        path: hosts.path.clone(),
        state: State::Best,
        why: match by_address {
            true => "the NIC reads and writes it itself, by nvidia-peermem; engines must name their GPUs",
            false => "the NIC reads and writes it itself, by DMA-BUF, if its own driver takes that (not tried here); engines must name their GPUs",
        }
        .into(),
        todo: "-".into(),
    }
}

/// What is said for a path where there is none.
const NO_PATH: &str = "none";

fn hosts(facts: &Facts, probes: &Probes) -> Path {
    let pair = "other hosts";
    if let Verbs::Found(found) = &probes.verbs
        && !found.devices.is_empty()
    {
        let devices: Vec<_> = found.devices.iter().map(|device| device.name.as_str()).collect();
        return Path {
            pair,
            path: format!("verbs: {}", devices.join(", ")),
            state: State::Best,
            why: "the fastest there is between RDMA NICs; ask for it by --provider verbs".into(),
            todo: "-".into(),
        };
    }
    let missing = |why: String, todo: &str| {
        let path = NO_PATH.into();
        match idle(facts, &probes.libfabric, &probes.verbs) {
            Some(Idle { why, todo }) => Path { pair, path, state: State::Degraded, why, todo },
            None => Path { pair, path, state: State::Missing, why, todo: todo.into() },
        }
    };
    match &probes.libfabric {
        Libfabric::Found(found) => over(facts, &probes.libfabric, found, &probes.verbs).unwrap_or_else(|| {
            missing(
                format!("libfabric {} has no device that leads to another host", found.version),
                "bring a network interface up; the line on libfabric above says why others do not fit",
            )
        }),
        Libfabric::NotFound(_) => missing(
            "no libfabric found".into(),
            "install libfabric (with EFA: by AWS's installer), or have IMMWIRE_LIBFABRIC name its \
             libfabric.so.1",
        ),
        Libfabric::Fails(why) => {
            missing(format!("libfabric fails: {why}"), "install another version of it")
        }
    }
}

/// What leads where from an engine with two transports.
fn both(runs: bool, gpus: &Path, hosts: &Path) -> Path {
    let pair = "either, from one engine";
    let (near, far) = (runs, hosts.path != NO_PATH);
    if !(near && far) {
        let missing =
            if near { "nothing leads to other hosts" } else { "peers on this host cannot connect" };
        return Path {
            pair,
            path: "none".into(),
            state: State::Missing,
            why: format!("{missing}, see above"),
            todo: "as above".into(),
        };
    }
    let near = if gpus.state != State::Missing { "shm, GPUs' memory too" } else { "shm" };
    Path {
        pair,
        path: format!("{near}, on the same host; else {}", hosts.path),
        state: State::Best,
        why: "the same host: one kernel and network namespace, and one user or group key".into(),
        todo: "build engines with shm_on_host".into(),
    }
}

/// What to do about forks. libfabric ends a process with EFA that forks where the kernel does not copy registered pages for its child
/// (since Linux 5.13), unless it is told to have them left out of the child (fi_efa(7)).
fn forks_with_efa(facts: &Facts) -> &'static str {
    match facts.kernel.as_deref().and_then(version) {
        Some(kernel) if kernel < (5, 13) => {
            "if the program forks or starts another, set FI_EFA_FORK_SAFE=1 before it begins: libfabric ends it otherwise, before Linux 5.13"
        }
        _ => "-",
    }
}

/// The first two numbers of a kernel's release: of `6.8.0-45-generic`, 6 and 8.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Devices that nothing uses, and why.
struct Idle {
    why: String,
    todo: String,
}

/// The fastest devices for other hosts, if something is missing between them and engines.
fn idle(facts: &Facts, libfabric: &Libfabric, verbs: &Verbs) -> Option<Idle> {
    if !facts.efa.is_empty() {
        return idle_efa(libfabric);
    }
    let active: Vec<_> = facts
        .rdma
        .iter()
        .filter(|device| device.ports.iter().any(|port| port.active))
        .map(|device| device.name.as_str())
        .collect();
    if active.is_empty() {
        return None;
    }
    let (why, todo) = match verbs {
        Verbs::NotFound(_) => {
            ("no libibverbs is found".to_owned(), "install rdma-core's libibverbs")
        }
        Verbs::Fails(why) => {
            (format!("libibverbs fails: {why}"), "install another version of rdma-core")
        }
        Verbs::Found(found) if !found.devices.is_empty() => return None,
        Verbs::Found(found) => {
            let why = found.unfit.iter().map(|device| format!("{}: {}", device.name, device.why));
            let why: Vec<_> = why.collect();
            let why = if why.is_empty() { "libibverbs lists none".into() } else { why.join("; ") };
            (why, "see that the driver's part of rdma-core is installed, and what it says above")
        }
    };
    Some(Idle { why: format!("RDMA found: {}; {why}", active.join(", ")), todo: todo.into() })
}

fn idle_efa(libfabric: &Libfabric) -> Option<Idle> {
    let (why, todo) = match libfabric {
        Libfabric::NotFound(_) => (
            "EFA found, and no libfabric".to_owned(),
            "install libfabric with EFA (AWS's EFA software), or have IMMWIRE_LIBFABRIC name its \
             libfabric.so.1",
        ),
        Libfabric::Fails(why) => (
            format!("EFA found, and libfabric fails: {why}"),
            "install another version of libfabric (AWS's EFA software)",
        ),
        Libfabric::Found(found) => {
            let efa = found.providers.iter().find(|provider| provider.name == "efa");
            if efa.is_some_and(|efa| efa.outward().next().is_some()) {
                return None;
            }
            let why = efa.and_then(|efa| efa.why_not.as_deref());
            let why = why.unwrap_or("not a provider there");
            (
                format!("EFA found, but libfabric {} does not offer it: {why}", found.version),
                "install AWS's EFA software (driver, rdma-core, libfabric)",
            )
        }
    };
    Some(Idle { why, todo: todo.into() })
}

/// What an engine takes by itself: the first provider, on its devices but loopback.
fn over(facts: &Facts, libfabric: &Libfabric, found: &Fabric, verbs: &Verbs) -> Option<Path> {
    let outward = |name: &&super::fabric::FabricProvider| name.outward().next().is_some();
    let provider = found.providers.iter().find(outward)?;
    let interfaces: Vec<_> = provider.outward().collect();
    let (state, why, todo) = if provider.name == "efa" {
        let todo = forks_with_efa(facts).to_owned();
        (State::Best, "the fastest there is on AWS".to_owned(), todo)
    } else if let Some(Idle { why, todo }) = idle(facts, libfabric, verbs) {
        (State::Degraded, why, todo)
    } else {
        let why = match facts.rdma.len() {
            0 => "no RDMA device found",
            _ => "RDMA devices found, none with an active port",
        };
        (State::Best, why.to_owned(), "-".to_owned())
    };
    Some(Path {
        pair: "other hosts",
        path: format!("libfabric: {} on {}", provider.name, interfaces.join(", ")),
        state,
        why,
        todo,
    })
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
    // Whoever has that capability is held to no limit.
    let held = !facts.rdma.is_empty() && !facts.cap_ipc_lock;
    if let Some(Limit::At(bytes)) = facts.limits.locked.filter(|_| held) {
        note(
            format!(
                "at most {bytes} bytes may be locked: so much can be registered with RDMA NICs"
            ),
            "raise it (ulimit -l unlimited)",
        );
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::fabric::FabricProvider;
    use crate::doctor::facts::{Gpu, NumaNode, RdmaDevice, RdmaPort};
    use crate::doctor::rdma::{Fitting, Rdma, Unfitting};

    fn probes(memfd: bool, writev: bool, socket: bool) -> Probes {
        let attempt = |works| {
            if works { Attempt::Works } else { Attempt::Fails("refused".into()) }
        };
        Probes {
            memfd_sealing: attempt(memfd),
            process_vm_writev: attempt(writev),
            unix_socket: attempt(socket),
            libfabric: Libfabric::NotFound("not there".into()),
            verbs: Verbs::NotFound("not there".into()),
            cuda: Cuda::NotFound("not there".into()),
        }
    }

    #[test]
    fn gpus_are_used_where_the_driver_and_the_kernels_are() {
        let gpu = |ordinal, why_not: Option<&str>| CudaGpu {
            ordinal,
            why_not: why_not.map(str::to_owned),
            reaches: (0..3).filter(|other| *other != ordinal).collect(),
            ..CudaGpu::default()
        };
        let one_way =
            |ordinal, reaches: &[u32]| CudaGpu { reaches: reaches.into(), ..gpu(ordinal, None) };
        let found = |kernels, gpus| Cuda::Found(Gpus { kernels, gpus, ..Gpus::default() });
        let whole = found(true, vec![gpu(0, None), gpu(1, None)]);
        let apart = found(true, vec![one_way(0, &[]), one_way(1, &[])]);
        let partly = found(true, vec![gpu(0, None), one_way(1, &[0]), gpu(2, None)]);
        let alone = found(true, vec![one_way(0, &[])]);
        let part = found(true, vec![gpu(0, None), gpu(1, Some("too old"))]);
        let bare = found(false, vec![gpu(0, Some("no kernels"))]);
        for (cuda, state, path, why) in [
            (whole, State::Best, "GPUs 0, 1", "NVLink"),
            (alone, State::Best, "GPUs 0", "NVLink"),
            (apart, State::Degraded, "GPUs 0, 1", "GPU 0 does not reach the memory of GPU 1"),
            (partly, State::Degraded, "GPUs 0, 1, 2", "GPU 1 does not reach the memory of GPU 2"),
            (part, State::Degraded, "GPUs 0", "too old"),
            (bare, State::Missing, "none", "no kernels"),
            (found(true, Vec::new()), State::Missing, "none", "has no GPU"),
            (Cuda::Fails("it crashed".into()), State::Missing, "none", "it crashed"),
            (Cuda::NotFound("x".into()), State::Missing, "none", "no GPU found"),
        ] {
            let probes = Probes { cuda, ..probes(true, true, true) };
            let verdict = judge(&Facts::default(), &probes);
            let row = &verdict.paths[2];
            assert_eq!(row.state, state, "{row:?}");
            assert!(row.path.contains(path) && row.why.contains(why), "{row:?}");
            assert_eq!(verdict.exit_code, u8::from(state == State::Degraded));
        }
    }

    #[test]
    fn gpu_memory_goes_to_other_hosts_by_nics_that_reach_it() {
        let device = |name: &str| Fitting { name: name.into(), ..Fitting::default() };
        let mlx5 = Verbs::Found(Rdma { devices: vec![device("mlx5_0")], ..Rdma::default() });
        let none = Verbs::NotFound("not there".into());
        let efa = fabric(&[("efa", Ok(&["rdmap0s31-rdm"]))]);
        let tcp = fabric(&[("tcp", Ok(&["eth0"]))]);
        let (peermem, bare) = (vec!["nvidia_peermem".to_owned()], Vec::new());
        for (nics, verbs, libfabric, modules, state, text) in [
            (Nics::ByDmaBuf, &mlx5, &tcp, &bare, State::Best, "verbs: mlx5_0"),
            (Nics::ByDmaBuf, &none, &efa, &bare, State::Best, "efa on rdmap0s31-rdm"),
            (Nics::ByAddress, &mlx5, &tcp, &peermem, State::Best, "by nvidia-peermem"),
            (Nics::ByAddress, &mlx5, &tcp, &bare, State::Missing, "modprobe nvidia-peermem"),
            (Nics::ByDmaBuf, &none, &tcp, &peermem, State::Missing, "TCP carries host memory"),
            (Nics::Never, &mlx5, &efa, &peermem, State::Missing, "lets no NIC"),
        ] {
            let gpus = vec![CudaGpu { nics, ..CudaGpu::default() }];
            let cuda = Cuda::Found(Gpus { kernels: true, gpus, ..Gpus::default() });
            let (verbs, libfabric) = (verbs.clone(), libfabric.clone());
            let probes = Probes { cuda, verbs, libfabric, ..probes(true, true, true) };
            let rdma = vec![RdmaDevice { name: "mlx5_0".into(), ..RdmaDevice::default() }];
            let facts = Facts { rdma, gpu_modules: modules.clone(), ..Facts::default() };
            let row = judge(&facts, &probes).paths[4].clone();
            assert_eq!((row.pair, row.state), ("other hosts, GPU memory", state), "{row:?}");
            assert!(format!("{row:?}").contains(text), "{row:?}");
        }
        let probes = probes(true, true, true);
        let row = judge(&Facts::default(), &probes).paths[4].clone();
        assert_eq!((row.state, row.todo.as_str()), (State::Missing, "-"));
    }

    #[test]
    fn gpu_memory_needs_a_gpu_that_is_open_and_no_copier() {
        let why_not = Some("why not".to_owned());
        let nics = Nics::ByDmaBuf;
        let bare = CudaGpu { nics, why_not: why_not.clone(), ..CudaGpu::default() };
        let lost = CudaGpu { unopened: true, why_not, ..CudaGpu::default() };
        for (gpus, state) in [
            (vec![], State::Missing),
            (vec![lost.clone()], State::Missing),
            (vec![bare.clone()], State::Best),
            (vec![lost, bare], State::Best),
        ] {
            let cuda = Cuda::Found(Gpus { kernels: false, gpus, ..Gpus::default() });
            let devices = vec![Fitting { name: "mlx5_0".into(), ..Fitting::default() }];
            let verbs = Verbs::Found(Rdma { devices, ..Rdma::default() });
            let probes = Probes { cuda, verbs, ..probes(true, true, true) };
            let rdma = vec![RdmaDevice { name: "mlx5_0".into(), ..RdmaDevice::default() }];
            let row = judge(&Facts { rdma, ..Facts::default() }, &probes).paths[4].clone();
            assert_eq!(row.state, state, "{row:?}");
            let tried = row.why.contains("not tried here");
            assert_eq!((tried, row.todo.as_str()), (state == State::Best, "-"), "{row:?}");
        }
    }

    #[test]
    fn staging_is_advised_where_there_is_a_gpu_for_it() {
        for (gpus, advised) in [
            (vec![], false),
            (vec![CudaGpu { why_not: Some("no kernels".into()), ..CudaGpu::default() }], false),
            (vec![CudaGpu::default()], true),
        ] {
            let cuda = Cuda::Found(Gpus { gpus, ..Gpus::default() });
            let row = judge(&Facts::default(), &Probes { cuda, ..probes(true, true, true) });
            let row = row.paths[4].clone();
            assert_eq!((row.state, row.todo.contains("--staging")), (State::Missing, advised));
        }
    }

    #[test]
    fn devices_that_lie_idle_for_want_of_a_library_count() {
        let port = |active| RdmaPort { active, ..RdmaPort::default() };
        let rdma = |active| RdmaDevice {
            name: "mlx5_0".into(),
            ports: vec![port(active)],
            ..RdmaDevice::default()
        };
        let active = Facts { rdma: vec![rdma(true)], ..Facts::default() };
        let down = Facts { rdma: vec![rdma(false)], ..Facts::default() };
        let efa = Facts { efa: vec!["0000:00:1f.0".into()], ..active.clone() };
        let fabrics = || {
            [
                Libfabric::NotFound("x".into()),
                Libfabric::Fails("it crashed".into()),
                fabric(&[("efa", Err("no device")), ("tcp", Ok(&["lo"]))]),
            ]
        };
        for (facts, code, words) in [
            (&Facts::default(), 0, [""; 2]),
            (&down, 0, [""; 2]),
            (&active, 1, ["rdma-core", "libibverbs"]),
            (&efa, 1, ["libfabric", "EFA"]),
        ] {
            for libfabric in fabrics() {
                let probes = Probes { libfabric, ..probes(true, true, true) };
                let verdict = judge(facts, &probes);
                let row = &verdict.paths[3];
                assert_eq!((verdict.exit_code, row.path.as_str()), (code, "none"), "{row:?}");
                assert!(words.iter().all(|word| row.todo.contains(word)), "{row:?}");
                assert_eq!(row.state == State::Degraded, code == 1, "{row:?}");
                assert_eq!(verdict.paths[5].state, State::Missing);
                assert_eq!(verdict.paths[5].path, "none");
            }
        }
        for (verbs, word) in [
            (Verbs::Fails("it crashed".into()), "rdma-core"),
            (Verbs::Found(Rdma::default()), "rdma-core"),
        ] {
            let verdict = judge(&active, &Probes { verbs, ..probes(true, true, true) });
            assert_eq!(verdict.exit_code, 1);
            assert!(verdict.paths[3].todo.contains(word), "{:?}", verdict.paths[3]);
        }
    }

    /// A libfabric with these providers: interfaces, or why not.
    fn fabric(providers: &[(&str, Result<&[&str], &str>)]) -> Libfabric {
        let provider = |(name, found): &(&str, Result<&[&str], &str>)| FabricProvider {
            name: (*name).into(),
            interfaces: found.unwrap_or_default().iter().map(|name| (*name).to_owned()).collect(),
            why_not: found.err().map(str::to_owned),
        };
        let providers = providers.iter().map(provider).collect();
        Libfabric::Found(Fabric { path: "/l".into(), version: "1.17".into(), providers })
    }

    #[test]
    fn other_hosts_are_reached_by_what_libfabric_has() {
        let judged = |facts: &Facts, libfabric| {
            let probes = Probes { libfabric, ..probes(true, true, true) };
            let verdict = judge(facts, &probes);
            let (hosts, both) = (verdict.paths[3].clone(), &verdict.paths[5]);
            assert_eq!(both.state == State::Missing, hosts.state == State::Missing);
            assert!(hosts.state == State::Missing || both.path.ends_with(&hosts.path), "{both:?}");
            (hosts, verdict.exit_code)
        };
        let none = Facts::default();
        for (libfabric, why) in [
            (Libfabric::NotFound("x".into()), "no libfabric found"),
            (Libfabric::Fails("it crashed".into()), "it crashed"),
            (fabric(&[("tcp", Ok(&["lo"])), ("udp", Err("y"))]), "no device that leads"),
            (fabric(&[]), "no device that leads"),
        ] {
            let (path, code) = judged(&none, libfabric);
            assert_eq!((path.state, code), (State::Missing, 0), "{path:?}");
            assert!(path.why.contains(why) && path.todo.len() > 10, "{path:?}");
        }
        let tcp = || fabric(&[("efa", Err("no device")), ("tcp", Ok(&["eth0", "lo"]))]);
        let (path, code) = judged(&none, tcp());
        assert_eq!(
            (path.path.as_str(), path.state, code),
            ("libfabric: tcp on eth0", State::Best, 0)
        );
        let efa_there = Facts { efa: vec!["0000:00:1f.0".into()], ..Facts::default() };
        let (path, code) = judged(&efa_there, tcp());
        assert_eq!((path.state, code), (State::Degraded, 1));
        assert!(path.why.contains("1.17 does not offer it: no device"), "{path:?}");
        let efa = fabric(&[("efa", Ok(&["rdmap0s31-rdm"])), ("tcp", Ok(&["eth0"]))]);
        for (release, forks) in [
            ("5.10.245-241.978.amzn2", false),
            ("5.4", false),
            ("4.19.0-27", false),
            ("5.13.0", true),
            ("6.1.153", true),
            ("not a number", true),
        ] {
            let facts = Facts { kernel: Some(release.into()), ..Facts::default() };
            let (path, _) = judged(&facts, efa.clone());
            assert_eq!(path.todo.contains("FI_EFA_FORK_SAFE"), !forks, "{release}: {path:?}");
        }
        let (path, code) = judged(&efa_there, efa);
        assert_eq!((path.state, code), (State::Best, 0));
        assert!(path.path.contains("efa on rdmap0s31-rdm"), "{path:?}");
    }

    /// Yama's scope, whether we have `CAP_SYS_PTRACE`, and whether peers may then write to each other.
    const SCOPES: [(Option<u32>, bool, bool); 10] = [
        (None, false, true),
        (None, true, true),
        (Some(0), false, true),
        (Some(0), true, true),
        (Some(1), false, false),
        (Some(1), true, true),
        (Some(2), false, false),
        (Some(2), true, true),
        (Some(3), false, false),
        (Some(3), true, false),
    ];

    #[test]
    fn the_exit_code_follows_from_what_peers_on_this_host_can_use() {
        for bits in 0..8 {
            let (memfd, writev, socket) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
            for (ptrace_scope, cap_sys_ptrace, yama_lets) in SCOPES {
                let facts = Facts { ptrace_scope, cap_sys_ptrace, ..Facts::default() };
                let verdict = judge(&facts, &probes(memfd, writev, socket));
                let expected = match (memfd && socket, writev && yama_lets) {
                    (false, _) => 2,
                    (true, false) => 1,
                    (true, true) => 0,
                };
                let case = format!("{bits} {ptrace_scope:?} {cap_sys_ptrace}");
                assert_eq!(verdict.exit_code, expected, "{case}");
                assert_eq!(verdict.paths.len(), 6);
                for path in &verdict.paths {
                    assert!(!path.why.is_empty() && !path.todo.is_empty(), "{path:?}");
                }
            }
        }
    }

    #[test]
    fn the_reason_of_a_slower_path_is_the_one_that_holds() {
        let (profile, allow) = ("refused (a container's seccomp profile", "CAP_SYS_PTRACE allowed");
        let (lower, boot) = ("set kernel.yama.ptrace_scope=0", "boot with a lower");
        for (scope, capable, child_written, why, todo) in [
            (None, false, false, profile, allow),
            (Some(0), false, false, profile, allow),
            (Some(1), false, true, "other than descendants (kernel.yama.ptrace_scope = 1)", lower),
            (Some(1), false, false, profile, allow),
            (Some(1), true, false, profile, allow),
            (Some(2), false, false, "without CAP_SYS_PTRACE (kernel.yama.ptrace_scope = 2)", lower),
            (Some(2), true, false, profile, allow),
            (Some(3), false, false, "all processes until the next boot", boot),
            (Some(3), true, false, "all processes until the next boot", boot),
        ] {
            let facts = Facts { ptrace_scope: scope, cap_sys_ptrace: capable, ..Facts::default() };
            let path = &judge(&facts, &probes(true, child_written, true)).paths[1];
            assert_eq!(path.state, State::Degraded, "{scope:?} {capable}");
            assert!(path.why.contains(why) && path.todo.contains(todo), "{path:?}");
        }
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
        let tcp = || {
            let libfabric = fabric(&[("tcp", Ok(&["eth0"]))]);
            Probes { libfabric, ..probes(true, true, true) }
        };
        let verdict = judge(&facts, &tcp());
        assert!(verdict.paths[2].why.starts_with("2 GPU(s)"));
        assert_eq!(verdict.paths[2].state, State::Missing);
        let found = &verdict.paths[3];
        assert!(found.why.starts_with("RDMA found: mlx5_0; no libibverbs"), "{found:?}");
        assert_eq!((found.state, verdict.exit_code), (State::Degraded, 1));
        let down = Facts { rdma: vec![device("mlx5_1", false)], ..Facts::default() };
        assert!(judge(&down, &tcp()).paths[3].why.contains("none with an active port"));
    }

    #[test]
    fn rdma_nics_are_used_where_libibverbs_has_them_and_else_it_says_why_not() {
        let port = RdmaPort { active: true, ..RdmaPort::default() };
        let device =
            RdmaDevice { name: "mlx5_0".into(), ports: vec![port], ..RdmaDevice::default() };
        let facts = Facts { rdma: vec![device], ..Facts::default() };
        let judged = |verbs| {
            let libfabric = fabric(&[("tcp", Ok(&["eth0"]))]);
            judge(&facts, &Probes { libfabric, verbs, ..probes(true, true, true) })
        };
        let fits = Fitting {
            name: "mlx5_0".into(),
            gbps: 400,
            mtu_bytes: 4096,
            ethernet: true,
            no_on_demand: None,
            calls: "extended posts and polls".into(),
        };
        let unfit = Unfitting { name: "mlx5_0".into(), why: "its port has no GID".into() };
        let best = judged(Verbs::Found(Rdma { devices: vec![fits], ..Rdma::default() }));
        assert_eq!((best.paths[3].path.as_str(), best.exit_code), ("verbs: mlx5_0", 0));
        for (verbs, why) in [
            (Verbs::NotFound("x".into()), "no libibverbs"),
            (Verbs::Fails("it crashed".into()), "it crashed"),
            (Verbs::Found(Rdma { unfit: vec![unfit], ..Rdma::default() }), "has no GID"),
            (Verbs::Found(Rdma::default()), "lists none"),
        ] {
            let verdict = judged(verbs);
            let path = &verdict.paths[3];
            assert_eq!(
                (path.path.as_str(), path.state),
                ("libfabric: tcp on eth0", State::Degraded)
            );
            assert!(path.why.contains(why) && path.todo.len() > 10, "{path:?}");
        }
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
        facts.cap_ipc_lock = true;
        assert_eq!(judge(&facts, &probes(true, true, true)).notes.len(), 3, "nothing holds it");
    }
}
