//! Whole machines: what is decided for them, and that capturing their trees gives their tables.

use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

/// A machine: its table, and what each GPU is to have.
type Machine = (&'static str, &'static str, &'static [&'static str]);

macro_rules! fixture {
    ($name:literal) => {
        include_str!(concat!("fixtures/", $name, ".txt"))
    };
}

const MACHINES: &[Machine] = &[
    (
        "DGX H100",
        fixture!("dgx-h100"),
        &[
            "gpu0 0000:1b:00.0 mlx5_0 400 same PCIe switch 0",
            "gpu1 0000:43:00.0 mlx5_3 400 same PCIe switch 0",
            "gpu2 0000:52:00.0 mlx5_4 400 same PCIe switch 0",
            "gpu3 0000:61:00.0 mlx5_5 400 same PCIe switch 0",
            "gpu4 0000:9d:00.0 mlx5_6 400 same PCIe switch 1",
            "gpu5 0000:c3:00.0 mlx5_9 400 same PCIe switch 1",
            "gpu6 0000:d1:00.0 mlx5_10 400 same PCIe switch 1",
            "gpu7 0000:df:00.0 mlx5_11 400 same PCIe switch 1",
        ],
    ),
    (
        "p5.48xlarge",
        fixture!("p5-48xlarge"),
        &[
            "gpu0 0000:53:00.0 rdmap79s0,rdmap80s0,rdmap81s0,rdmap82s0 400 same PCIe switch 0",
            "gpu1 0000:64:00.0 rdmap96s0,rdmap97s0,rdmap98s0,rdmap99s0 400 same PCIe switch 0",
            "gpu2 0000:75:00.0 rdmap113s0,rdmap114s0,rdmap115s0,rdmap116s0 400 same PCIe switch 0",
            "gpu3 0000:86:00.0 rdmap130s0,rdmap131s0,rdmap132s0,rdmap133s0 400 same PCIe switch 0",
            "gpu4 0000:97:00.0 rdmap147s0,rdmap148s0,rdmap149s0,rdmap150s0 400 same PCIe switch 1",
            "gpu5 0000:a8:00.0 rdmap164s0,rdmap165s0,rdmap166s0,rdmap167s0 400 same PCIe switch 1",
            "gpu6 0000:b9:00.0 rdmap181s0,rdmap182s0,rdmap183s0,rdmap184s0 400 same PCIe switch 1",
            "gpu7 0000:ca:00.0 rdmap198s0,rdmap199s0,rdmap200s0,rdmap201s0 400 same PCIe switch 1",
        ],
    ),
    (
        "p5en.48xlarge",
        fixture!("p5en-48xlarge"),
        &[
            "gpu0 0000:59:00.0 rdmap85s0,rdmap86s0 400 same PCIe switch 0",
            "gpu1 0000:5a:00.0 rdmap87s0,rdmap88s0 400 same PCIe switch 0",
            "gpu2 0000:72:00.0 rdmap110s0,rdmap111s0 400 same PCIe switch 0",
            "gpu3 0000:73:00.0 rdmap112s0,rdmap113s0 400 same PCIe switch 0",
            "gpu4 0000:8b:00.0 rdmap135s0,rdmap136s0 400 same PCIe switch 1",
            "gpu5 0000:8c:00.0 rdmap137s0,rdmap138s0 400 same PCIe switch 1",
            "gpu6 0000:a4:00.0 rdmap160s0,rdmap161s0 400 same PCIe switch 1",
            "gpu7 0000:a5:00.0 rdmap162s0,rdmap163s0 400 same PCIe switch 1",
        ],
    ),
    (
        "p6e-gb200.36xlarge",
        fixture!("p6e-gb200"),
        &[
            "gpu0 0000:29:00.0 rdmap39s0,rdmap40s0 0 same PCIe switch 0",
            "gpu1 0000:3f:00.0 rdmap61s0,rdmap62s0 0 same PCIe switch 0",
            "gpu2 0000:9c:00.0 rdmap154s0,rdmap155s0 0 same PCIe switch 1",
            "gpu3 0000:b2:00.0 rdmap176s0,rdmap177s0 0 same PCIe switch 1",
        ],
    ),
    ("GH200", fixture!("gh200"), &["gpu0 0009:01:00.0 mlx5_0,mlx5_1,mlx5_2 600 same NUMA node 0"]),
    (
        "a virtual machine with one bus",
        fixture!("flat-vm"),
        &[
            "gpu0 0000:00:05.0 mlx5_0 400 same root complex -",
            "gpu1 0000:00:06.0 mlx5_1 400 same root complex -",
            "gpu2 0000:00:07.0 mlx5_2 400 same root complex -",
            "gpu3 0000:00:08.0 mlx5_3 400 same root complex -",
        ],
    ),
    (
        "a virtual machine with a domain for each device",
        fixture!("domains-vm"),
        &[
            "gpu0 0001:00:00.0 mlx5_ib0 400 same NUMA node 0",
            "gpu1 0002:00:00.0 mlx5_ib1 400 same NUMA node 0",
            "gpu2 0003:00:00.0 mlx5_ib2 400 same NUMA node 0",
            "gpu3 0004:00:00.0 mlx5_ib3 400 same NUMA node 0",
            "gpu4 0005:00:00.0 mlx5_ib4 400 same NUMA node 1",
            "gpu5 0006:00:00.0 mlx5_ib5 400 same NUMA node 1",
            "gpu6 0007:00:00.0 mlx5_ib6 400 same NUMA node 1",
            "gpu7 0008:00:00.0 mlx5_ib7 400 same NUMA node 1",
        ],
    ),
    ("no GPU", fixture!("no-gpu"), &["host - mlx5_0,mlx5_1 400 same machine -"]),
    (
        "no NUMA nodes",
        fixture!("numa-unknown"),
        &[
            "gpu0 0000:21:00.0 mlx5_1 100 same root complex -",
            "gpu1 0000:c1:00.0 mlx5_0 100 same root complex -",
        ],
    ),
    (
        "cards of two ports",
        fixture!("dual-port"),
        &[
            "gpu0 0000:21:00.0 mlx5_0,mlx5_1 100 same NUMA node 0",
            "gpu1 0000:31:00.0 mlx5_2,mlx5_3 100 same NUMA node 0",
        ],
    ),
    (
        "virtual functions",
        fixture!("virtual-functions"),
        &[
            "gpu0 0000:5b:00.0 mlx5_0,mlx5_2,mlx5_3,mlx5_4 400 same NUMA node 0",
            "gpu1 0000:6b:00.0 mlx5_1 400 same NUMA node 0",
        ],
    ),
];

/// Owner, address, NICs, Gbit/s, reason and NUMA node.
fn words(pair: &Pair<'_>) -> String {
    let address = match pair.owner {
        Owner::Gpu(_, gpu) => gpu.address(),
        Owner::Host => "-",
    };
    let names: Vec<_> = pair.nics.iter().map(|nic| nic.name).collect();
    let node = pair.numa.map_or("-".to_owned(), |node| node.to_string());
    let (owner, names, gbit) = (pair.owner, names.join(","), pair.mbit() / 1000);
    format!("{owner} {address} {names} {gbit} {} {node}", pair.reason)
}

#[test]
fn gpus_and_nics_of_known_machines_are_paired_as_they_are_built() {
    for (machine, text, expected) in MACHINES {
        let table = Table::from_text(*text).unwrap();
        let devices = table.devices();
        let pairs: Vec<_> =
            Topology::new(&devices, "").unwrap().pairs().map(|p| words(&p)).collect();
        assert_eq!(pairs, *expected, "{machine}");
        assert!(text.starts_with("# "), "{machine}: where it comes from");
    }
}

/// Makes the folders, files and links that such a machine has below `/sys`.
struct Tree(TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        for folder in ["bus/pci/devices", "class/net", "class/infiniband"] {
            fs::create_dir_all(tree.path(folder)).unwrap();
        }
        tree
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join("sys").join(path)
    }

    fn file(&self, path: &str, contents: &str) -> &Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
        self
    }

    /// A link below `/sys` to a folder there, which may not be there yet.
    fn link(&self, from: &str, to: &str) -> &Self {
        fs::create_dir_all(self.path(to)).unwrap();
        if self.path(from).symlink_metadata().is_err() {
            let up = "../".repeat(from.matches('/').count());
            symlink(format!("{up}{to}"), self.path(from)).unwrap();
        }
        self
    }

    fn device(&self, device: &Device<'_>) {
        let on_bus = device.path.starts_with("pci");
        let folder = if on_bus {
            let folder = format!("devices/{}", device.path);
            let numa = device.numa.map_or("-1".to_owned(), |node| node.to_string());
            self.link(&format!("bus/pci/devices/{}", device.address()), &folder)
                .file(&format!("{folder}/vendor"), &format!("0x{:04x}\n", device.vendor))
                .file(&format!("{folder}/class"), &format!("0x{:06x}\n", device.class))
                .file(&format!("{folder}/numa_node"), &format!("{numa}\n"));
            if let Some(of) = device.of {
                let beside = folder.rsplit_once('/').unwrap().0;
                self.link(&format!("{folder}/physfn"), &format!("{beside}/{of}"));
            }
            folder
        } else {
            "devices/virtual".to_owned()
        };
        if let Some(name) = device.rdma {
            let port = format!("{folder}/infiniband/{name}/ports/1");
            let (gigabits, rest) = (device.mbit / 1000, device.mbit % 1000);
            let tenths = if rest == 0 { String::new() } else { format!(".{}", rest / 100) };
            self.link(&format!("class/infiniband/{name}"), &format!("{folder}/infiniband/{name}"))
                .file(
                    &format!("{port}/state"),
                    if device.down { "1: DOWN\n" } else { "4: ACTIVE\n" },
                );
            if device.mbit > 0 {
                self.file(
                    &format!("{port}/rate"),
                    &format!("{gigabits}{tenths} Gb/sec (4X NDR)\n"),
                );
            }
        }
        if let Some(name) = device.net {
            let folder = format!("{folder}/net/{name}");
            let speed = if device.mbit == 0 { "-1".to_owned() } else { device.mbit.to_string() };
            self.link(&format!("class/net/{name}"), &folder)
                .file(&format!("{folder}/operstate"), if device.down { "down\n" } else { "up\n" })
                .file(&format!("{folder}/speed"), &format!("{speed}\n"));
        }
    }

    fn captured(&self) -> Table {
        Table::capture(self.0.path())
    }
}

#[test]
fn the_tree_of_each_machine_is_captured_as_its_table() {
    // The largest have nothing that the others do not have, but ten times the files.
    for (machine, text, _) in MACHINES.iter().filter(|(_, text, _)| text.lines().count() < 30) {
        let table = Table::from_text(*text).unwrap();
        let tree = Tree::new();
        // Bridges, disks and sounds are not of interest.
        tree.file("devices/pci0000:fe/0000:fe:00.0/class", "0x060400\n")
            .link("bus/pci/devices/0000:fe:00.0", "devices/pci0000:fe/0000:fe:00.0");
        table.devices().iter().for_each(|device| tree.device(device));
        let captured = tree.captured();
        assert_eq!(captured.devices(), table.devices(), "{machine}");
        assert_eq!(Table::from_text(captured.text()), Ok(captured.clone()));
    }
}

#[test]
fn devices_on_no_bus_on_other_buses_and_of_virtio_are_found() {
    let tree = Tree::new();
    let virtio = "devices/pci0000:00/0000:00:03.0";
    let vmbus = "devices/LNXSYSTM:00/VMBUS:00/47505500-0001/pci0001:00/0001:00:00.0";
    tree.link("bus/pci/devices/0000:00:03.0", virtio)
        .file(&format!("{virtio}/class"), "0x020000\n")
        .file(&format!("{virtio}/vendor"), "0x1af4\n")
        .file(&format!("{virtio}/virtio2/net/eth0/operstate"), "unknown\n")
        .link("class/net/eth0", &format!("{virtio}/virtio2/net/eth0"))
        .link("class/net/lo", "devices/virtual/net/lo")
        .link("bus/pci/devices/0001:00:00.0", vmbus)
        .file(&format!("{vmbus}/class"), "0x030200\n")
        .file(&format!("{vmbus}/vendor"), "0x10de\n")
        .link("class/infiniband/rxe0", "devices/virtual/infiniband/rxe0")
        .file("devices/virtual/infiniband/rxe0/ports/1/state", "4: ACTIVE\n")
        .file("devices/virtual/infiniband/rxe0/ports/1/rate", "2.5 Gb/sec (1X SDR)\n");
    let captured = tree.captured();
    let lines: Vec<_> = captured.text().lines().skip(1).collect();
    assert_eq!(
        lines,
        [
            "pci0000:00/0000:00:03.0 vendor=1af4 class=020000 net=eth0",
            "pci0001:00/0001:00:00.0 vendor=10de class=030200",
            "virtual/rxe0 rdma=rxe0 mbit=2500",
        ]
    );
}

#[test]
fn the_best_port_with_a_link_is_what_counts() {
    let tree = Tree::new();
    let ports = "devices/pci0000:00/0000:00:03.0/infiniband/mlx4_0/ports";
    tree.link("class/infiniband/mlx4_0", "devices/pci0000:00/0000:00:03.0/infiniband/mlx4_0")
        .file(&format!("{ports}/1/state"), "1: DOWN\n")
        .file(&format!("{ports}/1/rate"), "40 Gb/sec (4X QDR)\n")
        .file(&format!("{ports}/2/state"), "4: ACTIVE\n")
        .file(&format!("{ports}/2/rate"), "10 Gb/sec (4X SDR)\n");
    assert_eq!(tree.captured().devices()[0].mbit, 10_000);
    tree.file(&format!("{ports}/2/state"), "2: INIT\n");
    let captured = tree.captured();
    let device = captured.devices()[0];
    assert_eq!((device.mbit, device.down), (40_000, true));
}

#[test]
fn an_empty_machine_has_an_empty_table_and_this_one_has_one() {
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(Table::capture(empty.path()).devices(), []);
    let here = Table::capture(Path::new("/"));
    assert_eq!(here.text().lines().count(), here.devices().len() + 1, "{}", here.text());
}

#[test]
fn what_the_kernel_words_otherwise_is_unknown() {
    for (text, mbit) in [
        ("400 Gb/sec (4X NDR)", Some(400_000)),
        ("2.5 Gb/sec (1X SDR)", Some(2_500)),
        ("-1 Gb/sec", None),
        ("", None),
        ("5000000 Gb/sec", None),
        ("2. Gb/sec", None),
    ] {
        assert_eq!(rate_mbit(text), mbit, "{text}");
    }
    for (step, address) in [
        ("0000:18:00.0", true),
        ("10000:e1:00.0", true),
        ("pci0000:18", false),
        ("0000:18:00", false),
        ("0000:18:00.0.0", false),
        ("000:18:00.0", false),
    ] {
        assert_eq!(is_address(step), address, "{step}");
    }
}
