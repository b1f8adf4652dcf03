//! What the machine has, which path each pair takes, why not a faster one, what to do about it.
//!
//! Four parts: [`facts`] reads, [`probe`], [`fabric`], [`rdma`] and [`cuda`] try, [`verdict`] judges, [`topology`] pairs GPUs and
//! NICs; here it is put into words.

pub mod child;
pub mod cuda;
pub mod fabric;
pub mod facts;
pub mod probe;
pub mod rdma;
pub mod topology;
pub mod verdict;

use crate::report::bytes_text;
use comfy_table::{ContentArrangement, Table, presets};
use cuda::Cuda;
use fabric::Libfabric;
use facts::{Facts, Limit};
use probe::{Attempt, Probes};
use rdma::Verbs;
use serde::Serialize;
use std::fmt::Write as _;
use topology::Pairing;
use verdict::Verdict;

/// Everything a doctor has to say. Serialises to one JSON object.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnosis {
    /// What was read.
    pub facts: Facts,
    /// What was tried.
    pub probes: Probes,
    /// Which NICs belong to which GPU.
    pub topology: Pairing,
    /// What follows.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// Examines this machine. Takes about half a second; starts some child processes and reaps them.
///
/// # Errors
///
/// An I/O error if this program cannot find itself.
pub fn examine() -> std::io::Result<Diagnosis> {
    let library_path = std::env::var("LD_LIBRARY_PATH").ok();
    let root = std::path::Path::new("/");
    let facts = facts::gather(root, library_path.as_deref());
    let again = crate::again::command;
    let probes = probe::probe([again()?, again()?, again()?, again()?]);
    let table = immwire::topology::Table::capture(root);
    // Without pairs there is none that cannot be.
    let topology = topology::pair(&table, "").unwrap_or_default();
    let verdict = verdict::judge(&facts, &probes);
    Ok(Diagnosis { facts, probes, topology, verdict })
}

impl Diagnosis {
    /// The diagnosis in words, no line wider than `width` columns where words allow.
    #[must_use]
    pub fn text(&self, width: u16) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "{}\n", grid(width, self.found(), None));
        let paths = self.verdict.paths.iter().map(|path| {
            [path.pair.to_owned(), path.path.clone(), path.why.clone(), path.todo.clone()]
        });
        let header = ["pair", "path", "why not faster", "what to do"];
        let _ = writeln!(text, "{}", grid(width, paths, Some(header)));
        let _ = writeln!(text, "\n{}", self.topology.text(width));
        for note in &self.verdict.notes {
            let _ = write!(text, "\nnote: {}\n      {}\n", note.seen, note.todo);
        }
        let result = match self.verdict.exit_code {
            0 => "result: can run",
            1 => "result: can run; some pairs take a slower path",
            _ => "result: cannot run",
        };
        let _ = write!(text, "\n{result}");
        text
    }

    fn found(&self) -> Vec<[String; 2]> {
        let facts = &self.facts;
        let unknown = || "unknown".to_owned();
        let bytes = |bytes: Option<u64>| bytes.map_or_else(unknown, bytes_text);
        let cpus = facts.cpu.online.map_or_else(unknown, |count| count.to_string());
        let mut rows = vec![
            ["kernel".into(), facts.kernel.clone().unwrap_or_else(unknown)],
            [
                "processors".into(),
                format!("{cpus} x {}", facts.cpu.model.as_deref().unwrap_or("unknown model")),
            ],
            ["NUMA".into(), numa_text(facts)],
            [
                "memory".into(),
                format!(
                    "{}, {} available; huge pages: {}; shared memory: {}",
                    bytes(facts.memory.total_bytes),
                    bytes(facts.memory.available_bytes),
                    huge_text(facts),
                    facts.memory.shmem_huge.as_deref().unwrap_or("unknown"),
                ),
            ],
            [
                "limits".into(),
                format!(
                    "locked memory {}, open files {}",
                    limit_text(facts.limits.locked, bytes_text),
                    limit_text(facts.limits.open_files, |files| files.to_string()),
                ),
            ],
            ["memfd sealing".into(), attempt_text(&self.probes.memfd_sealing)],
            ["Unix sockets".into(), attempt_text(&self.probes.unix_socket)],
            [
                "process_vm_writev".into(),
                format!(
                    "to a child: {}; yama: {}{}",
                    attempt_text(&self.probes.process_vm_writev),
                    facts
                        .ptrace_scope
                        .map_or("not there".into(), |scope| format!("ptrace_scope {scope}")),
                    if facts.cap_sys_ptrace { "; with CAP_SYS_PTRACE" } else { "" },
                ),
            ],
        ];
        for library in &facts.libraries {
            let found = library.path.as_ref().map(|path| path.display().to_string());
            rows.push([library.name.into(), found.unwrap_or_else(|| "not found".into())]);
        }
        rows.push(["libfabric".into(), fabric_text(&self.probes.libfabric)]);
        rows.push(["GPUs".into(), gpu_text(facts)]);
        rows.push(["CUDA".into(), cuda_text(&self.probes.cuda)]);
        rows.push(["RDMA".into(), rdma_text(facts)]);
        rows.push(["libibverbs".into(), verbs_text(&self.probes.verbs)]);
        rows.push(["network".into(), network_text(facts)]);
        rows
    }
}

fn grid<const N: usize>(
    width: u16,
    rows: impl IntoIterator<Item = [String; N]>,
    header: Option<[&str; N]>,
) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_width(width);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    if let Some(header) = header {
        table.set_header(header);
    }
    table.add_rows(rows);
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

fn joined(items: impl IntoIterator<Item = String>, none: &str) -> String {
    let text = items.into_iter().collect::<Vec<_>>().join("; ");
    if text.is_empty() { none.to_owned() } else { text }
}

fn numa_text(facts: &Facts) -> String {
    let node = |node: &facts::NumaNode| {
        let memory = node.total_bytes.map_or_else(|| "memory unknown".into(), bytes_text);
        format!("node {}: cpus {}, {memory}", node.node, node.cpus)
    };
    joined(facts.numa.iter().map(node), "one node")
}

fn huge_text(facts: &Facts) -> String {
    let reserved = facts.memory.huge_pages.iter().filter(|pool| pool.total > 0);
    joined(
        reserved.map(|pool| {
            format!("{} of {} x {} free", pool.free, pool.total, bytes_text(pool.page_bytes))
        }),
        "none reserved",
    )
}

fn limit_text(limit: Option<Limit>, text: impl Fn(u64) -> String) -> String {
    match limit {
        None => "unknown".into(),
        Some(Limit::Unlimited) => "unlimited".into(),
        Some(Limit::At(value)) => text(value),
    }
}

fn attempt_text(attempt: &Attempt) -> String {
    match attempt {
        Attempt::Works => "works".into(),
        Attempt::Fails(why) => format!("fails: {why}"),
    }
}

fn fabric_text(libfabric: &Libfabric) -> String {
    let provider = |provider: &fabric::FabricProvider| match &provider.why_not {
        Some(why) => format!("{}: {why}", provider.name),
        None => format!("{} fits on {}", provider.name, provider.interfaces.join(", ")),
    };
    match libfabric {
        Libfabric::Found(found) => {
            let providers = joined(found.providers.iter().map(provider), "no provider");
            format!("{} at {}: {providers}", found.version, found.path.display())
        }
        Libfabric::NotFound(why) | Libfabric::Fails(why) => why.clone(),
    }
}

fn gpu_text(facts: &Facts) -> String {
    let gpu = |gpu: &facts::Gpu| {
        let node = gpu.numa_node.map_or(String::new(), |node| format!(" on node {node}"));
        format!("{} at {}{node}", gpu.vendor, gpu.pci)
    };
    let mut text = joined(facts.gpus.iter().map(gpu), "none");
    if let Some(driver) = &facts.nvidia_driver {
        let _ = write!(text, "; driver {driver}");
    }
    if !facts.gpu_modules.is_empty() {
        let _ = write!(text, "; modules {}", facts.gpu_modules.join(", "));
    }
    text
}

fn cuda_text(cuda: &Cuda) -> String {
    let gpu = |gpu: &cuda::CudaGpu| {
        let cuda::CudaGpu { ordinal, name, uuid, pci, reaches, nics, why_not, .. } = gpu;
        if let Some(why) = why_not {
            return format!("{ordinal}: {name} cannot be used: {why}");
        }
        let reached: Vec<_> = reaches.iter().map(u32::to_string).collect();
        let reached = if reached.is_empty() { "no other".into() } else { reached.join(", ") };
        let nics = match nics {
            cuda::Nics::Never => "by no NIC",
            cuda::Nics::ByAddress => "by NICs with nvidia-peermem",
            cuda::Nics::ByDmaBuf => "by NICs by DMA-BUF",
        };
        format!("{ordinal}: {name} at {pci}, {uuid}, reaches {reached}, is reached {nics}")
    };
    match cuda {
        Cuda::Found(found) => {
            let kernels = if found.kernels { "kernels built in" } else { "built without kernels" };
            let gpus = joined(found.gpus.iter().map(gpu), "no GPU");
            let connections = match &found.connections {
                Some(set) => format!("CUDA_DEVICE_MAX_CONNECTIONS={set}"),
                None => "CUDA_DEVICE_MAX_CONNECTIONS is not set: 32 is better where streams wait for counts".into(),
            };
            format!("{gpus}; {kernels}; flags for kernels lie {}; {connections}", found.flags)
        }
        Cuda::NotFound(why) | Cuda::Fails(why) => why.clone(),
    }
}

fn rdma_text(facts: &Facts) -> String {
    let port = |port: &facts::RdmaPort| {
        let state = if port.active { "active" } else { "down" };
        format!("port {} {state} {} {}", port.port, port.link_layer, port.rate)
    };
    let device = |device: &facts::RdmaDevice| {
        format!("{}: {}", device.name, device.ports.iter().map(port).collect::<Vec<_>>().join(", "))
    };
    let efa = facts.efa.iter().map(|pci| format!("EFA at {pci}"));
    joined(facts.rdma.iter().map(device).chain(efa), "none")
}

fn verbs_text(verbs: &Verbs) -> String {
    let fitting = |device: &rdma::Fitting| {
        let link = if device.ethernet { "RoCE" } else { "InfiniBand" };
        let rdma::Fitting { name, gbps, mtu_bytes, calls, .. } = device;
        let paging = device.no_on_demand.as_deref().unwrap_or("it offers on-demand paging");
        format!(
            "{name} fits: {link}, {gbps} Gbit/s, packets of {mtu_bytes} bytes; {paging}; {calls}"
        )
    };
    match verbs {
        Verbs::Found(found) => {
            let unfit = found.unfit.iter().map(|device| format!("{}: {}", device.name, device.why));
            let devices = joined(found.devices.iter().map(fitting).chain(unfit), "no device");
            // Of no interest where there is nothing to be registered with.
            let forks = (!found.devices.is_empty()).then(|| format!("; {}", found.forks));
            devices + &forks.unwrap_or_default()
        }
        Verbs::NotFound(why) | Verbs::Fails(why) => why.clone(),
    }
}

fn network_text(facts: &Facts) -> String {
    let interface = |interface: &facts::NetworkInterface| {
        let state = if interface.up { "up" } else { "down" };
        let speed =
            interface.mbit_per_s.map_or("speed unknown".into(), |mbit| format!("{mbit} Mbit/s"));
        format!("{} {state}, {speed}", interface.name)
    };
    joined(facts.network.iter().map(interface), "none")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_every_path_and_fits_the_width() {
        let fails = Attempt::Fails("operation not permitted".into());
        let probes = Probes {
            memfd_sealing: Attempt::Works,
            process_vm_writev: fails,
            unix_socket: Attempt::Works,
            libfabric: Libfabric::NotFound("no libfabric could be loaded".into()),
            verbs: Verbs::NotFound("no libibverbs at all".into()),
            cuda: Cuda::NotFound("no driver anywhere".into()),
        };
        let mut facts = Facts::default();
        facts.cpu.online = Some(1);
        let verdict = verdict::judge(&facts, &probes);
        let topology =
            topology::pair(&immwire::topology::Table::from_text("").unwrap(), "").unwrap();
        let text = Diagnosis { facts, probes, topology, verdict }.text(100);
        for needle in [
            "pair",
            "bounce ring",
            "other hosts",
            "no NIC with a link",
            "could be loaded",
            "no libibverbs at all",
            "no driver anywhere",
            "note: one processor",
            "slower path",
        ] {
            assert!(text.contains(needle), "{needle} in\n{text}");
        }
        let tabled = text.lines().filter(|line| !line.trim_start().starts_with("note"));
        assert!(tabled.map(|line| line.chars().count()).max() <= Some(100), "{text}");
    }
}
