//! What the machine has: read from `/proc`, `/sys` and the loader's folders, below a root.
//!
//! Reading only: nothing is loaded, linked, opened for writing, or needs privilege. Libraries are
//! searched for by name in the folders that the loader would search, and their ELF headers are read;
//! `dlopen` would run their constructors. What is missing or cannot be read is `None` or empty, never
//! an error: a doctor examines also a machine in a bad state.
//!
//! # Invariants
//!
//! Every path is taken below the root that [`gather`] was given, also where a file read names an
//! absolute one; the tests run on trees of their own.

use serde::Serialize;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Facts about the machine. `None` or empty: not there, or not to be seen from here.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Facts {
    /// Kernel release, such as `6.8.0-45-generic`.
    pub kernel: Option<String>,
    /// The processors.
    pub cpu: Cpu,
    /// NUMA nodes, by number.
    pub numa: Vec<NumaNode>,
    /// Memory of the machine.
    pub memory: Memory,
    /// Limits of this process.
    pub limits: Limits,
    /// `kernel.yama.ptrace_scope`; `None` where Yama is not built in.
    pub ptrace_scope: Option<u32>,
    /// Whether this process has `CAP_SYS_PTRACE`, which Yama lets through but for scope 3.
    pub cap_sys_ptrace: bool,
    /// Whether it has `CAP_IPC_LOCK`, which may lock memory beyond the limit.
    pub cap_ipc_lock: bool,
    /// Libraries that providers load at run time.
    pub libraries: Vec<Library>,
    /// GPUs on the PCI bus.
    pub gpus: Vec<Gpu>,
    /// Version of the NVIDIA kernel driver.
    pub nvidia_driver: Option<String>,
    /// Kernel modules that let a NIC reach GPU memory, and that are loaded.
    pub gpu_modules: Vec<String>,
    /// RDMA devices, by name.
    pub rdma: Vec<RdmaDevice>,
    /// Elastic Fabric Adapters on the PCI bus, whether or not a driver made an RDMA device of them.
    pub efa: Vec<String>,
    /// Network interfaces with a known speed, by name.
    pub network: Vec<NetworkInterface>,
}

/// The processors.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Cpu {
    /// Marketing name.
    pub model: Option<String>,
    /// Logical processors online.
    pub online: Option<u32>,
}

/// One NUMA node.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct NumaNode {
    /// Number.
    pub node: u32,
    /// Processors, as a list such as `0-15,32-47`.
    pub cpus: String,
    /// Memory in bytes.
    pub total_bytes: Option<u64>,
    /// Of it unused.
    pub free_bytes: Option<u64>,
}

/// Memory of the machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Memory {
    /// All of it, in bytes.
    pub total_bytes: Option<u64>,
    /// What can be had without swapping, in bytes.
    pub available_bytes: Option<u64>,
    /// Reserved huge pages, by size.
    pub huge_pages: Vec<HugePages>,
    /// Policy of transparent huge pages for shared memory (`always`, `advise`, `never`, ...).
    pub shmem_huge: Option<String>,
}

/// A pool of reserved huge pages.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct HugePages {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages reserved.
    pub total: u64,
    /// Of them unused.
    pub free: u64,
}

/// Limits of this process.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Limits {
    /// Bytes that may be locked, and thereby registered with a NIC.
    pub locked: Option<Limit>,
    /// Files that may be open.
    pub open_files: Option<Limit>,
}

/// A soft resource limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// No limit.
    Unlimited,
    /// The limit, in the resource's unit.
    At(u64),
}

/// A library that a provider would load.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Library {
    /// Name that is asked for.
    pub name: &'static str,
    /// Where it was found, with the architecture of this program.
    pub path: Option<PathBuf>,
}

/// A GPU on the PCI bus.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Gpu {
    /// PCI address.
    pub pci: String,
    /// Vendor, as a name if known.
    pub vendor: String,
    /// NUMA node.
    pub numa_node: Option<u32>,
}

/// A device under `/sys/class/infiniband`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RdmaDevice {
    /// Name.
    pub name: String,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// Ports, by number.
    pub ports: Vec<RdmaPort>,
}

/// One port of an RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RdmaPort {
    /// Number.
    pub port: u32,
    /// Whether it is active.
    pub active: bool,
    /// `InfiniBand`, `Ethernet` or another.
    pub link_layer: String,
    /// Rate as the kernel words it, such as `400 Gb/sec (4X NDR)`.
    pub rate: String,
}

/// A network interface.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct NetworkInterface {
    /// Name.
    pub name: String,
    /// Whether it is up.
    pub up: bool,
    /// Megabits per second, if the driver says.
    pub mbit_per_s: Option<u64>,
}

/// Libraries that providers of this family load: verbs, libfabric, CUDA, GDRCopy.
pub const LIBRARIES: [&str; 4] =
    ["libibverbs.so.1", "libfabric.so.1", "libcuda.so.1", "libgdrapi.so.2"];

/// `linux/capability.h`.
const CAP_SYS_PTRACE: u32 = 19;
const CAP_IPC_LOCK: u32 = 14;

/// Reads the facts below `root` (`/`, but for tests). `library_path` is `LD_LIBRARY_PATH`.
#[must_use]
pub fn gather(root: &Path, library_path: Option<&str>) -> Facts {
    let machine = Machine { root };
    Facts {
        kernel: machine.text("proc/sys/kernel/osrelease"),
        cpu: machine.cpu(),
        numa: machine.numa(),
        memory: machine.memory(),
        limits: machine.limits(),
        ptrace_scope: machine.number("proc/sys/kernel/yama/ptrace_scope"),
        cap_sys_ptrace: machine.has_capability(CAP_SYS_PTRACE),
        cap_ipc_lock: machine.has_capability(CAP_IPC_LOCK) && machine.is_initial_user_namespace(),
        libraries: machine.libraries(library_path),
        gpus: machine.gpus(),
        nvidia_driver: machine
            .text("proc/driver/nvidia/version")
            .and_then(|text| driver_version(&text)),
        gpu_modules: machine.gpu_modules(),
        rdma: machine.rdma(),
        efa: machine.efa(),
        network: machine.network(),
    }
}

struct Machine<'a> {
    root: &'a Path,
}

impl Machine<'_> {
    fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = fs::read_to_string(self.path(path)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    fn number<N: std::str::FromStr>(&self, path: impl AsRef<Path>) -> Option<N> {
        self.text(path)?.parse().ok()
    }

    /// Names in a folder, sorted; none if it is not there.
    fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(path)) else {
            return Vec::new();
        };
        let mut names: Vec<_> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    fn cpu(&self) -> Cpu {
        let info = self.text("proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == "model name").then(|| value.trim().to_owned())
        });
        let online = self.text("sys/devices/system/cpu/online").and_then(|list| list_count(&list));
        Cpu { model, online }
    }

    fn numa(&self) -> Vec<NumaNode> {
        let base = Path::new("sys/devices/system/node");
        let mut nodes: Vec<_> = self
            .names(base)
            .iter()
            .filter_map(|name| {
                let node = name.strip_prefix("node")?.parse().ok()?;
                let info = self.text(base.join(name).join("meminfo")).unwrap_or_default();
                Some(NumaNode {
                    node,
                    cpus: self.text(base.join(name).join("cpulist")).unwrap_or_default(),
                    total_bytes: meminfo(&info, "MemTotal:"),
                    free_bytes: meminfo(&info, "MemFree:"),
                })
            })
            .collect();
        nodes.sort_unstable_by_key(|node| node.node);
        nodes
    }

    fn memory(&self) -> Memory {
        let info = self.text("proc/meminfo").unwrap_or_default();
        let base = Path::new("sys/kernel/mm/hugepages");
        let huge_pages = self.names(base).into_iter().filter_map(|name| {
            let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            Some(HugePages {
                page_bytes: kib.checked_mul(1024)?,
                total: self.number(base.join(&name).join("nr_hugepages"))?,
                free: self.number(base.join(&name).join("free_hugepages"))?,
            })
        });
        let shmem = self.text("sys/kernel/mm/transparent_hugepage/shmem_enabled");
        Memory {
            total_bytes: meminfo(&info, "MemTotal:"),
            available_bytes: meminfo(&info, "MemAvailable:"),
            huge_pages: huge_pages.collect(),
            shmem_huge: shmem.and_then(|text| chosen(&text)),
        }
    }

    fn limits(&self) -> Limits {
        let text = self.text("proc/self/limits").unwrap_or_default();
        let limit = |name: &str| {
            let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
            match rest.split_whitespace().next()? {
                "unlimited" => Some(Limit::Unlimited),
                number => number.parse().ok().map(Limit::At),
            }
        };
        Limits { locked: limit("Max locked memory"), open_files: limit("Max open files") }
    }

    fn has_capability(&self, number: u32) -> bool {
        let status = self.text("proc/self/status").unwrap_or_default();
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let bits = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
        bits.is_some_and(|bits| bits >> number & 1 == 1)
    }

    /// Whether users here are those of the machine: what the kernel asks of locked memory is a capability there (`capable`,
    /// capabilities(7)). Assumed where it is not said.
    fn is_initial_user_namespace(&self) -> bool {
        self.text("proc/self/uid_map").is_none_or(|map| {
            let words: Vec<_> = map.split_whitespace().collect();
            words == ["0", "0", "4294967295"]
        })
    }

    fn libraries(&self, library_path: Option<&str>) -> Vec<Library> {
        let folders = self.library_folders(library_path);
        let find =
            |name: &str| folders.iter().map(|dir| dir.join(name)).find(|path| self.loads(path));
        LIBRARIES.iter().map(|name| Library { name, path: find(name) }).collect()
    }

    /// Folders the loader searches, in its order: the environment's, the configuration's, its own.
    fn library_folders(&self, library_path: Option<&str>) -> Vec<PathBuf> {
        let mut folders: Vec<PathBuf> = library_path
            .unwrap_or_default()
            .split([':', ';'])
            .filter(|dir| dir.starts_with('/'))
            .map(PathBuf::from)
            .collect();
        let mut seen = BTreeSet::new();
        self.loader_conf(Path::new("/etc/ld.so.conf"), &mut folders, &mut seen);
        let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
        for base in ["/lib64", "/usr/lib64", "/lib", "/usr/lib"] {
            folders.push(Path::new(base).join(&triple));
            folders.push(PathBuf::from(base));
        }
        folders
    }

    /// Reads one configuration file of the loader, and those it includes, each once.
    fn loader_conf(&self, file: &Path, folders: &mut Vec<PathBuf>, seen: &mut BTreeSet<PathBuf>) {
        if !seen.insert(file.to_owned()) {
            return;
        }
        for line in self.text(file).unwrap_or_default().lines() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if let Some(pattern) =
                line.strip_prefix("include").filter(|rest| rest.starts_with([' ', '\t']))
            {
                for included in self.included(file, pattern.trim()) {
                    self.loader_conf(&included, folders, seen);
                }
            } else if line.starts_with('/') {
                folders.push(PathBuf::from(line));
            }
        }
    }

    /// Files that an `include` line names. A `*` is understood in the file name alone, which is all
    /// that distributions use.
    fn included(&self, from: &Path, pattern: &str) -> Vec<PathBuf> {
        let pattern = from.parent().unwrap_or(Path::new("/")).join(pattern);
        let (Some(folder), Some(name)) =
            (pattern.parent(), pattern.file_name().and_then(|n| n.to_str()))
        else {
            return Vec::new();
        };
        match name.split_once('*') {
            None => vec![pattern.clone()],
            Some((before, after)) => self
                .names(folder)
                .into_iter()
                .filter(|found| found.len() >= before.len() + after.len())
                .filter(|found| found.starts_with(before) && found.ends_with(after))
                .map(|found| folder.join(found))
                .collect(),
        }
    }

    /// Whether `path` is a shared object for this program's architecture, by its header.
    fn loads(&self, path: &Path) -> bool {
        let mut header = [0; 20];
        let read = fs::File::open(self.path(path))
            .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut header));
        read.is_ok() && elf_matches(&header)
    }

    /// PCI functions: address, class, vendor, device.
    fn pci(&self) -> Vec<(String, u32, u32, u32)> {
        let base = Path::new("sys/bus/pci/devices");
        let field = |name: &str, field: &str| {
            let text = self.text(base.join(name).join(field))?;
            u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
        };
        self.names(base)
            .into_iter()
            .filter_map(|name| {
                let (class, vendor) = (field(&name, "class")?, field(&name, "vendor")?);
                let device = field(&name, "device")?;
                Some((name, class, vendor, device))
            })
            .collect()
    }

    /// A device's NUMA node; the kernel's -1 ("none") is not a number of ours.
    fn numa_node(&self, device: &Path) -> Option<u32> {
        self.number(device.join("numa_node"))
    }

    fn gpus(&self) -> Vec<Gpu> {
        const DISPLAY: u32 = 0x0300;
        const COMPUTE: u32 = 0x0302;
        const ACCELERATOR: u32 = 0x1200;
        let gpus = self.pci().into_iter().filter_map(|(pci, class, vendor, _)| {
            let kind = class >> 8;
            let name = match vendor {
                0x10de => "NVIDIA",
                0x1002 => "AMD",
                _ => return None,
            };
            if ![DISPLAY, COMPUTE, ACCELERATOR].contains(&kind) {
                return None;
            }
            let numa_node = self.numa_node(&Path::new("sys/bus/pci/devices").join(&pci));
            Some(Gpu { pci, vendor: name.to_owned(), numa_node })
        });
        gpus.collect()
    }

    fn gpu_modules(&self) -> Vec<String> {
        let names = ["nvidia_peermem", "nv_peer_mem", "gdrdrv"];
        let loaded = |name: &&str| self.path(Path::new("sys/module").join(name)).is_dir();
        names.into_iter().filter(loaded).map(str::to_owned).collect()
    }

    fn rdma(&self) -> Vec<RdmaDevice> {
        let base = Path::new("sys/class/infiniband");
        let device = |name: String| {
            let folder = base.join(&name);
            let ports = self.names(folder.join("ports")).into_iter().filter_map(|port| {
                let folder = folder.join("ports").join(&port);
                let text = |field: &str| self.text(folder.join(field)).unwrap_or_default();
                Some(RdmaPort {
                    port: port.parse().ok()?,
                    active: text("state").ends_with("ACTIVE"),
                    link_layer: text("link_layer"),
                    rate: text("rate"),
                })
            });
            let ports = ports.collect();
            RdmaDevice { numa_node: self.numa_node(&folder.join("device")), ports, name }
        };
        self.names(base).into_iter().map(device).collect()
    }

    fn efa(&self) -> Vec<String> {
        let is_efa = |vendor: u32, device: u32| vendor == 0x1d0f && device & 0xfff0 == 0xefa0;
        let found =
            self.pci().into_iter().filter(|(_, _, vendor, device)| is_efa(*vendor, *device));
        found.map(|(pci, ..)| pci).collect()
    }

    fn network(&self) -> Vec<NetworkInterface> {
        let base = Path::new("sys/class/net");
        let real = |name: &String| self.path(base.join(name).join("device")).exists();
        let interface = |name: String| NetworkInterface {
            up: self.text(base.join(&name).join("operstate")).as_deref() == Some("up"),
            mbit_per_s: self.number(base.join(&name).join("speed")),
            name,
        };
        self.names(base).into_iter().filter(real).map(interface).collect()
    }
}

/// How many numbers a list such as `0-3,8` names; `None` if it is not one.
fn list_count(list: &str) -> Option<u32> {
    list.split(',').try_fold(0_u32, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

/// The value of `key` in a `meminfo` file, in bytes.
fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split_whitespace().any(|word| word == key))?;
    let kib: u64 = line.split_whitespace().skip_while(|word| *word != key).nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The word in brackets of a kernel choice such as `always within_size [never]`.
fn chosen(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

/// The version in the first line of `/proc/driver/nvidia/version`: its first word with two dots, or
/// one, that starts with a digit.
fn driver_version(text: &str) -> Option<String> {
    let line = text.lines().next()?;
    let is_version =
        |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// Whether an ELF header's first 20 bytes are of a 64-bit little-endian shared object for the
/// architecture this was built for.
fn elf_matches(header: &[u8; 20]) -> bool {
    let machine: u16 = match std::env::consts::ARCH {
        "x86_64" => 62,
        "aarch64" => 183,
        "riscv64" => 243,
        _ => return false,
    };
    let [0x7f, b'E', b'L', b'F', 2, 1, .., kind_low, kind_high, machine_low, machine_high] =
        *header
    else {
        return false;
    };
    const SHARED_OBJECT: u16 = 3;
    u16::from_le_bytes([kind_low, kind_high]) == SHARED_OBJECT
        && u16::from_le_bytes([machine_low, machine_high]) == machine
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    struct Tree(TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn file(&self, path: &str, contents: impl AsRef<[u8]>) -> &Self {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, contents).unwrap();
            self
        }

        fn pci(&self, name: &str, class: &str, vendor: &str, device: &str) -> &Self {
            let base = format!("sys/bus/pci/devices/{name}");
            self.file(&format!("{base}/class"), class)
                .file(&format!("{base}/vendor"), vendor)
                .file(&format!("{base}/device"), device)
        }

        fn facts(&self) -> Facts {
            gather(self.0.path(), None)
        }
    }

    fn elf(machine: u16) -> Vec<u8> {
        let mut header = vec![0x7f, b'E', b'L', b'F', 2, 1];
        header.resize(16, 0);
        header.extend(3_u16.to_le_bytes());
        header.extend(machine.to_le_bytes());
        header.resize(64, 0);
        header
    }

    fn our_machine() -> u16 {
        if cfg!(target_arch = "x86_64") { 62 } else { 183 }
    }

    #[test]
    fn an_empty_root_has_no_facts_and_no_panic() {
        let facts = Tree::new().facts();
        let nothing = Facts {
            libraries: LIBRARIES.map(|name| Library { name, path: None }).to_vec(),
            ..Facts::default()
        };
        assert_eq!(facts, nothing);
    }

    #[test]
    fn processors_memory_and_limits_are_read_in_bytes() {
        let tree = Tree::new();
        tree.file("proc/sys/kernel/osrelease", "6.8.0\n")
            .file("proc/cpuinfo", "processor : 0\nmodel name\t: EPYC 9454\n")
            .file("sys/devices/system/cpu/online", "0-3,8\n")
            .file("sys/devices/system/node/node1/cpulist", "4-7\n")
            .file("sys/devices/system/node/node0/cpulist", "0-3\n")
            .file("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:  2048 kB\nNode 0 MemFree: 4 kB\n")
            .file("proc/meminfo", "MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable:  100 kB\n")
            .file("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "5")
            .file("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "3")
            .file("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never\n")
            .file(
                "proc/self/limits",
                "Limit  Soft  Hard\nMax locked memory  65536  unlimited bytes\nMax open files unlimited 9 files\n",
            )
            .file("proc/sys/kernel/yama/ptrace_scope", "1\n");
        let facts = tree.facts();
        assert_eq!(facts.kernel.as_deref(), Some("6.8.0"));
        assert_eq!(facts.cpu, Cpu { model: Some("EPYC 9454".into()), online: Some(5) });
        let nodes: Vec<_> =
            facts.numa.iter().map(|node| (node.node, &*node.cpus, node.total_bytes)).collect();
        assert_eq!(nodes, [(0, "0-3", Some(2048 * 1024)), (1, "4-7", None)]);
        assert_eq!(facts.memory.available_bytes, Some(100 * 1024));
        assert_eq!(facts.memory.huge_pages, [HugePages { page_bytes: 2 << 20, total: 5, free: 3 }]);
        assert_eq!(facts.memory.shmem_huge.as_deref(), Some("advise"));
        assert_eq!(facts.limits.locked, Some(Limit::At(65536)));
        assert_eq!(facts.limits.open_files, Some(Limit::Unlimited));
        assert_eq!(facts.ptrace_scope, Some(1));
    }

    #[test]
    fn the_capability_is_read_from_those_in_effect() {
        for (status, expected) in [
            ("Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t000001ffffffffff\n", true),
            ("CapEff:\t0000000000080000\n", true),
            ("CapPrm:\t0000000000080000\nCapEff:\t0000000000000000\n", false),
            ("CapEff:\tfffffffffff7ffff\n", false),
            ("CapEff:\tnothing\n", false),
            ("Name:\tx\n", false),
        ] {
            let tree = Tree::new();
            assert_eq!(tree.file("proc/self/status", status).facts().cap_sys_ptrace, expected);
        }
        for (bits, expected) in [("4000", true), ("ffffffffffffbfff", false), ("80000", false)] {
            let (tree, status) = (Tree::new(), format!("CapEff:\t{bits}\n"));
            assert_eq!(tree.file("proc/self/status", &status).facts().cap_ipc_lock, expected);
        }
        // Of another user namespace it is not enough.
        for (map, expected) in [("         0          0 4294967295\n", true), ("0 1000 1\n", false)]
        {
            let (tree, status) = (Tree::new(), "CapEff:\t4000\n");
            let tree = tree.file("proc/self/status", status).file("proc/self/uid_map", map);
            assert_eq!(tree.facts().cap_ipc_lock, expected);
        }
    }

    #[test]
    fn libraries_are_found_by_the_loaders_rules_and_only_for_this_machine() {
        let tree = Tree::new();
        tree.file("etc/ld.so.conf", "include ld.so.conf.d/*.conf\ninclude /etc/ld.so.conf\n")
            .file("etc/ld.so.conf.d/efa.conf", "/opt/efa/lib # where the installer puts it\n")
            .file("etc/ld.so.conf.d/ignored.txt", "/opt/ignored\n")
            .file("opt/efa/lib/libfabric.so.1", elf(our_machine()))
            .file("opt/ignored/libcuda.so.1", elf(our_machine()))
            .file("usr/lib/libibverbs.so.1", elf(3))
            .file("usr/lib/libgdrapi.so.2", "not a library")
            .file("mine/libcuda.so.1", elf(our_machine()));
        let found = |facts: Facts| {
            facts.libraries.into_iter().map(|library| library.path).collect::<Vec<_>>()
        };
        let fabric = Some(PathBuf::from("/opt/efa/lib/libfabric.so.1"));
        assert_eq!(found(tree.facts()), [None, fabric.clone(), None, None]);
        let cuda = Some(PathBuf::from("/mine/libcuda.so.1"));
        assert_eq!(found(gather(tree.0.path(), Some("rel:/mine"))), [None, fabric, cuda, None]);
    }

    #[test]
    fn gpus_and_efas_are_told_by_their_pci_ids() {
        let tree = Tree::new();
        tree.pci("0000:18:00.0", "0x030200\n", "0x10de\n", "0x2335\n")
            .file("sys/bus/pci/devices/0000:18:00.0/numa_node", "1\n")
            .pci("0000:19:00.0", "0x068000\n", "0x10de\n", "0x22a3\n")
            .pci("0000:20:00.0", "0x038000\n", "0x1002\n", "0x74a1\n")
            .pci("0000:21:00.0", "0x120000\n", "0x1002\n", "0x74a1\n")
            .file("sys/bus/pci/devices/0000:21:00.0/numa_node", "-1\n")
            .pci("0000:30:00.0", "0x020000\n", "0x1d0f\n", "0xefa2\n")
            .pci("0000:31:00.0", "0x020000\n", "0x1d0f\n", "0xec20\n")
            .file(
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC 12\n",
            )
            .file("sys/module/gdrdrv/version", "2.4");
        let facts = tree.facts();
        let nvidia =
            Gpu { pci: "0000:18:00.0".into(), vendor: "NVIDIA".into(), numa_node: Some(1) };
        let amd = Gpu { pci: "0000:21:00.0".into(), vendor: "AMD".into(), numa_node: None };
        assert_eq!(facts.gpus, [nvidia, amd]);
        assert_eq!(facts.efa, ["0000:30:00.0"]);
        assert_eq!(facts.nvidia_driver.as_deref(), Some("570.86.15"));
        assert_eq!(facts.gpu_modules, ["gdrdrv"]);
    }

    #[test]
    fn rdma_ports_and_real_interfaces_are_listed() {
        let tree = Tree::new();
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        tree.file(&format!("{port}/state"), "4: ACTIVE\n")
            .file(&format!("{port}/rate"), "400 Gb/sec (4X NDR)\n")
            .file(&format!("{port}/link_layer"), "InfiniBand\n")
            .file("sys/class/infiniband/mlx5_0/device/numa_node", "0\n")
            .file("sys/class/net/eth0/device/vendor", "0x1d0f")
            .file("sys/class/net/eth0/operstate", "up\n")
            .file("sys/class/net/eth0/speed", "-1\n")
            .file("sys/class/net/lo/operstate", "unknown\n");
        let facts = tree.facts();
        let port = RdmaPort {
            port: 1,
            active: true,
            link_layer: "InfiniBand".into(),
            rate: "400 Gb/sec (4X NDR)".into(),
        };
        assert_eq!(
            facts.rdma,
            [RdmaDevice { name: "mlx5_0".into(), numa_node: Some(0), ports: vec![port] }]
        );
        assert_eq!(
            facts.network,
            [NetworkInterface { name: "eth0".into(), up: true, mbit_per_s: None }]
        );
    }

    #[test]
    fn this_machine_has_a_kernel_and_memory() {
        let facts = gather(Path::new("/"), None);
        assert!(facts.kernel.is_some() && facts.memory.total_bytes > Some(0));
        assert!(facts.cpu.online > Some(0) && facts.limits.open_files.is_some());
    }

    #[test]
    fn malformed_lists_have_no_count() {
        for bad in ["", "3-1", "a", "0-", "0-4294967295"] {
            assert_eq!(list_count(bad), None, "{bad}");
        }
        assert_eq!(list_count("7"), Some(1));
    }
}
