//! Small tables enumerated, texts truncated and changed.

use std::format;
use std::string::{String, ToString};
use std::vec::Vec;

use super::*;

/// Places in a machine: the way to a device, and its NUMA node. Two complexes; on the first, a root port with a
/// switch that has one more below it; devices right on the complex; no bus at all.
const PLACES: [(&str, Option<u16>); 10] = [
    ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0", Some(0)),
    ("pci0000:00/0000:00:01.0/0000:01:00.0", Some(0)),
    ("pci0000:00/0000:00:02.0", Some(0)),
    ("pci0000:00", Some(0)),
    ("pci0000:00", Some(1)),
    ("pci0000:00", None),
    ("pci0000:80/0000:80:01.0", Some(0)),
    ("pci0000:80/0000:80:01.0", None),
    ("pci0000:80", Some(1)),
    ("virtual", None),
];

fn gpu_at(place: usize, path: &str) -> Device<'_> {
    Device { path, vendor: 0x10de, class: 0x03_02_00, numa: PLACES[place].1, ..Device::default() }
}

fn nic_at<'a>(place: usize, path: &'a str, name: &'a str) -> Device<'a> {
    Device { path, class: 0x02_07_00, numa: PLACES[place].1, rdma: Some(name), ..Device::default() }
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Calls for each table of so many GPUs and NICs in all places, with the places of both.
fn each_table(gpus: usize, nics: usize, mut call: impl FnMut(&[Device<'_>], &[usize], &[usize])) {
    // Addresses are the same in all tables: one for each device of each place.
    let address =
        |place: usize, device: usize| format!("{}/0000:f0:{device:02x}.0", PLACES[place].0);
    let paths: Vec<Vec<String>> = (0..PLACES.len())
        .map(|place| (0..8).map(|device| address(place, device)).collect())
        .collect();
    for table in 0..PLACES.len().pow(u32::try_from(gpus + nics).unwrap()) {
        let place = |device: u32| table / PLACES.len().pow(device) % PLACES.len();
        let places: Vec<usize> = (0..).map(place).take(gpus + nics).collect();
        let device = |(index, &place): (usize, &usize)| {
            let path = &paths[place][index];
            if index < gpus {
                gpu_at(place, path)
            } else {
                nic_at(place, path, NAMES[index - gpus])
            }
        };
        let devices: Vec<_> = places.iter().enumerate().map(device).collect();
        call(&devices, &places[..gpus], &places[gpus..]);
    }
}

fn pairs<'a>(devices: &'a [Device<'a>], told: &'a str) -> Vec<Pair<'a>> {
    Topology::new(devices, told).unwrap().pairs().collect()
}

fn names<'a>(pair: &Pair<'a>) -> Vec<&'a str> {
    pair.nics.iter().map(|nic| nic.name).collect()
}

/// Written down again, from the places alone: how near two of them are; the least is the nearest.
fn distance(gpu: usize, nic: usize) -> usize {
    let ((a, node_a), (b, node_b)) = (PLACES[gpu], PLACES[nic]);
    let steps = |way: &str| way.split('/').map(str::to_string).collect::<Vec<_>>();
    let common = steps(a).iter().zip(&steps(b)).take_while(|(a, b)| a == b).count();
    let differ = node_a.is_some() && node_b.is_some() && node_a != node_b;
    match common {
        _ if a == "virtual" => 100,
        2.. => 10 - common,
        1 if !differ => 20,
        _ if node_a.is_some() && node_a == node_b => 30,
        _ => 100,
    }
}

#[test]
fn every_gpu_has_a_nic_and_none_that_is_farther_than_another() {
    for (gpus, nics) in [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)] {
        each_table(gpus, nics, |devices, gpu_places, nic_places| {
            let pairs = pairs(devices, "");
            assert_eq!(pairs.len(), gpus);
            for (pair, &gpu) in pairs.iter().zip(gpu_places) {
                assert!(!pair.nics.is_empty(), "{devices:?}");
                let nearest = nic_places.iter().map(|&nic| distance(gpu, nic)).min();
                for name in names(pair) {
                    let index = NAMES.iter().position(|known| *known == name).unwrap();
                    assert_eq!(Some(distance(gpu, nic_places[index])), nearest, "{pairs:?}");
                }
                let same = |closeness: &Closeness| match nearest.unwrap() {
                    0..20 => matches!(closeness, Closeness::Switch { .. }),
                    20 => *closeness == Closeness::Complex,
                    30 => *closeness == Closeness::Numa,
                    _ => *closeness == Closeness::Machine,
                };
                assert!(matches!(&pair.reason, Reason::Nearest(near) if same(near)), "{pairs:?}");
            }
        });
    }
}

#[test]
fn gpus_in_one_place_share_equally() {
    for nics in 1..=3 {
        each_table(1, nics, |devices, gpu, _| {
            let path = format!("{}/0000:f0:1f.0", PLACES[gpu[0]].0);
            let mut devices = devices.to_vec();
            devices.insert(1, gpu_at(gpu[0], &path));
            let pairs = pairs(&devices, "");
            let (first, second) = (names(&pairs[0]), names(&pairs[1]));
            assert_eq!(first.len(), second.len(), "{pairs:?}");
            // What one alone would have is dealt out, but for an odd one.
            let alone = names(&Topology::new(&devices[1..], "").unwrap().pairs().next().unwrap());
            if alone.len() == 1 {
                assert_eq!((&first, &second), (&alone, &alone));
            } else {
                let dealt: Vec<_> = first.iter().chain(&second).copied().collect();
                assert_eq!(dealt, alone[..alone.len() / 2 * 2], "{pairs:?}");
            }
        });
    }
}

#[test]
fn two_gpus_have_two_nics_each_whether_their_places_differ_or_not() {
    // One switch; two switches; one complex with two nodes; two nodes, by way of the processors.
    let cases = [
        ([1, 1], [1, 1, 1, 1]),
        ([2, 6], [2, 2, 6, 6]),
        ([3, 4], [3, 3, 4, 4]),
        ([6, 8], [2, 2, 4, 4]),
    ];
    for (gpus, nics) in cases {
        let path =
            |device: usize, place: usize| format!("{}/0000:f0:{device:02x}.0", PLACES[place].0);
        let paths: Vec<_> =
            (0..).zip(gpus.into_iter().chain(nics)).map(|(d, place)| path(d, place)).collect();
        let (gpu_paths, nic_paths) = paths.split_at(2);
        let mut devices: Vec<_> =
            gpus.iter().zip(gpu_paths).map(|(&place, path)| gpu_at(place, path)).collect();
        let named = nic_paths.iter().zip(NAMES);
        devices
            .extend(nics.iter().zip(named).map(|(&place, (path, name))| nic_at(place, path, name)));
        let all = pairs(&devices, "");
        assert_eq!([names(&all[0]), names(&all[1])], [["a", "b"], ["c", "d"]], "{gpus:?}");
    }
}

#[test]
fn what_is_nearer_to_another_is_left_to_it() {
    // A switch with a GPU and a NIC; one more GPU and NIC on the same node elsewhere, far from each other.
    let devices = [
        gpu_at(1, "pci0000:00/0000:00:01.0/0000:01:00.0/0000:f0:00.0"),
        gpu_at(6, "pci0000:80/0000:80:01.0/0000:f0:01.0"),
        nic_at(1, "pci0000:00/0000:00:01.0/0000:01:00.0/0000:f0:02.0", "a"),
        nic_at(2, "pci0000:00/0000:00:02.0/0000:f0:03.0", "b"),
    ];
    let all = pairs(&devices, "");
    assert_eq!([names(&all[0]), names(&all[1])], [["a"], ["b"]]);
    // Without the other NIC it has to do.
    let all = pairs(&devices[..3], "");
    assert_eq!([names(&all[0]), names(&all[1])], [["a"], ["a"]]);
}

#[test]
fn more_gpus_than_cards_share_them_by_neighbours() {
    for (gpus, nics) in [(2, 1), (4, 2), (3, 2), (8, 2), (8, 3), (5, 4)] {
        let paths: Vec<_> =
            (0..16).map(|device| format!("pci0000:00/0000:00:{device:02x}.0")).collect();
        let gpu = |path| gpu_at(5, path);
        let mut devices: Vec<_> = paths[..gpus].iter().map(|path| gpu(path)).collect();
        devices.extend(
            paths[gpus..].iter().zip(&NAMES[..nics]).map(|(path, name)| nic_at(5, path, name)),
        );
        let all = pairs(&devices, "");
        let uses = |name: &str| all.iter().filter(|pair| names(pair) == [name]).count();
        let uses: Vec<_> = NAMES[..nics].iter().map(|name| uses(name)).collect();
        assert_eq!(uses.iter().sum::<usize>(), gpus, "{all:?}");
        assert!(uses.iter().all(|&n| n == gpus / nics || n == gpus.div_ceil(nics)), "{uses:?}");
        let order: Vec<_> = all.iter().flat_map(names).collect();
        assert!(order.is_sorted(), "{order:?}");
    }
}

#[test]
fn the_ports_of_a_card_go_together_and_count_once() {
    let port = |path, name, mbit| Device { mbit, ..nic_at(3, path, name) };
    let devices = [
        gpu_at(3, "pci0000:00/0000:00:01.0"),
        gpu_at(3, "pci0000:00/0000:00:02.0"),
        port("pci0000:00/0000:00:03.0", "a", 100_000),
        port("pci0000:00/0000:00:03.1", "b", 100_000),
        port("pci0000:00/0000:00:04.0", "c", 100_000),
    ];
    let all = pairs(&devices, "");
    assert_eq!((names(&all[0]), names(&all[1])), (Vec::from(["a", "b"]), Vec::from(["c"])));
    assert_eq!((all[0].mbit(), all[1].mbit()), (100_000, 100_000));
    assert_eq!(all[0].nics[0].mbit, 50_000);
    // Virtual functions of it, though their addresses are of another device and another bus.
    let of = |device, of| Device { of: Some(of), ..device };
    let virtual_too = [
        devices[0],
        devices[1],
        devices[2],
        of(port("pci0000:00/0000:00:04.2", "b", 100_000), "0000:00:03.0"),
        of(port("pci0000:00/0000:01:00.1", "c", 100_000), "0000:00:03.1"),
        of(port("pci0000:00/0000:00:04.3", "d", 100_000), "0000:00:04.0"),
    ];
    let all = pairs(&virtual_too, "");
    assert_eq!((names(&all[0]), names(&all[1])), (Vec::from(["a", "b", "c"]), Vec::from(["d"])));
    assert_eq!(all[0].mbit(), 99_999);
    // Told one port of it, that has the card for itself.
    let told = pairs(&devices, "gpu1=b");
    assert_eq!((names(&told[1]), told[1].mbit()), (Vec::from(["b"]), 100_000));
    // Fewer cards than GPUs: both ports for both GPUs.
    let all = pairs(&devices[..4], "");
    assert_eq!([names(&all[0]), names(&all[1])], [["a", "b"], ["a", "b"]]);
}

#[test]
fn slow_nics_and_those_without_a_link_or_rdma_do_not_count() {
    let nic = |path, name, mbit| Device { mbit, ..nic_at(3, path, name) };
    let gpu = gpu_at(3, "pci0000:00/0000:00:01.0/0000:01:00.0");
    let near = "pci0000:00/0000:00:01.0/0000:01:00.1";
    let (far, farther) = ("pci0000:00/0000:00:03.0", "pci0000:00/0000:00:04.0");
    let chosen = |devices: &[Device<'_>]| {
        names(&pairs(devices, "")[0]).iter().map(|name| (*name).to_string()).collect::<Vec<_>>()
    };
    // For something else, though it is nearest.
    assert_eq!(chosen(&[gpu, nic(near, "a", 25_000), nic(far, "b", 400_000)]), ["b"]);
    assert_eq!(chosen(&[gpu, nic(near, "a", 100_000), nic(far, "b", 400_000)]), ["a"]);
    // Of one place the fast ones; what is unknown counts.
    let (fast, slow) = (nic(far, "b", 400_000), nic(farther, "c", 100_000));
    assert_eq!(chosen(&[gpu, fast, slow]), ["b"]);
    assert_eq!(chosen(&[gpu, fast, nic(farther, "c", 200_000)]), ["b", "c"]);
    assert_eq!(chosen(&[gpu, fast, nic(farther, "c", 0)]), ["b", "c"]);
    // No link; no RDMA.
    let down = Device { down: true, ..nic(near, "a", 400_000) };
    assert_eq!(chosen(&[gpu, down, fast]), ["b"]);
    let ethernet = Device { rdma: None, net: Some("eth0"), ..nic(near, "", 400_000) };
    assert_eq!(chosen(&[gpu, ethernet, fast]), ["b"]);
    assert_eq!(chosen(&[gpu, ethernet]), ["eth0"]);
    assert_eq!(chosen(&[gpu, ethernet, down]), [""; 0]);
    assert_eq!(pairs(&[gpu, down], "")[0].reason, Reason::NoNic);
    assert_eq!(pairs(&[], "")[0].reason, Reason::NoNic);
}

#[test]
fn a_gpu_has_at_most_as_many_as_a_group() {
    let paths: Vec<_> =
        (0..12).map(|device| format!("pci0000:00/0000:00:{device:02x}.0")).collect();
    let names: Vec<_> = (0..12).map(|device| format!("n{device}")).collect();
    let devices: Vec<_> =
        paths.iter().zip(&names).map(|(path, name)| nic_at(5, path, name)).collect();
    let host = &pairs(&devices, "")[0];
    assert_eq!((host.owner, host.nics.len(), host.nics[7].name), (Owner::Host, MAX_NICS, "n7"));
}

#[test]
fn processors_are_the_gpus_or_else_those_its_nics_agree_on() {
    let numa = |gpu: usize, nics: &[usize]| {
        let paths: Vec<_> =
            (0..4).map(|device| format!("pci000{device}:00/000{device}:00:00.0")).collect();
        let mut devices: Vec<_> = nics
            .iter()
            .zip(paths.iter().zip(NAMES))
            .map(|(&place, (path, name))| nic_at(place, path, name))
            .collect();
        devices.push(gpu_at(gpu, &paths[3]));
        pairs(&devices, "")[0].numa
    };
    assert_eq!(numa(4, &[0]), Some(1));
    assert_eq!(numa(5, &[0, 3]), Some(0));
    assert_eq!(numa(5, &[0, 4]), None);
    assert_eq!(numa(5, &[0, 5]), None);
}

#[test]
fn an_override_wins_for_whom_it_names_and_changes_nobody_else() {
    each_table(2, 2, |devices, _, _| {
        let before = pairs(devices, "");
        for list in ["a", "b", "a,b", "b,a"] {
            let told = format!("# by hand\n; gpu1={list} # not the nearest");
            let after = pairs(devices, &told);
            assert_eq!(after[0], before[0]);
            assert_eq!(names(&after[1]).join(","), list);
            assert_eq!(after[1].reason, Reason::Told);
        }
    });
    // By address; the host by name; devices that do not count by themselves.
    let devices = [
        gpu_at(0, "pci0000:00/0000:00:01.0"),
        Device { down: true, ..nic_at(0, "pci0000:00/0000:00:02.0", "a") },
        Device { net: Some("eth0"), ..Device { path: "virtual/eth0", ..Device::default() } },
    ];
    assert_eq!(names(&pairs(&devices, "0000:00:01.0=a,eth0")[0]), ["a", "eth0"]);
    assert_eq!(names(&pairs(&devices[1..], "host=a")[0]), ["a"]);
}

#[test]
fn an_override_that_cannot_be_is_refused_with_its_place() {
    let paths: Vec<_> =
        (1..11).map(|device| format!("pci0000:00/0000:00:{device:02x}.0")).collect();
    let nics = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
    let mut devices: Vec<_> =
        paths[1..].iter().zip(nics).map(|(path, name)| nic_at(5, path, name)).collect();
    devices.push(gpu_at(5, &paths[0]));
    use OverrideError::*;
    for (text, line, column, what) in [
        ("gpu0", 1, 1, NotAPair),
        (" gpu1=a", 1, 2, UnknownOwner),
        ("gpu0=b\n\n host=a", 3, 2, UnknownOwner),
        ("gpu0=", 1, 6, UnknownNic),
        ("gpu0=a,", 1, 8, UnknownNic),
        ("gpu0=a,bc", 1, 8, UnknownNic),
        ("gpu0=a, b", 1, 8, UnknownNic),
        ("gpu0=a,b,a", 1, 10, RepeatedNic),
        ("gpu0=a;gpu0=b", 1, 8, Repeated),
        ("gpu0=a\n0000:00:01.0=b", 2, 1, Repeated),
        ("gpu0=a,b,c,d,e,f,g,h,i", 1, 22, TooManyNics),
    ] {
        let refused = Topology::new(&devices, text).err();
        assert_eq!(refused, Some(Misplaced { line, column, what }), "{text}");
        assert!(what.to_string().len() > 10);
    }
    assert!(Topology::new(&devices, "gpu0=a,b,c,d,e,f,g,h").is_ok());
}

const LINE: &str = "pci0000:44/0000:44:00.0/0000:55:00.0 vendor=1d0f class=020000 of=0000:54:00.0 numa=1 \
                    rdma=rdmap85s0 net=eth1 mbit=200000 down";

#[test]
fn an_override_may_name_one_port_of_a_device() {
    let paths = ["pci0000:00/0000:00:01.0", "pci0000:00/0000:00:02.0", "pci0000:00/0000:00:03.0"];
    let gpu = gpu_at(2, paths[0]);
    let (a, b) = (nic_at(2, paths[1], "a"), nic_at(2, paths[2], "b:2"));
    let net = Device { rdma: None, net: Some("eth0"), mbit: 10, ..nic_at(2, "virtual/eth0", "") };
    let devices = [gpu, Device { mbit: 200, ..a }, Device { mbit: 100, ..b }, net];
    // Ports of one device share its slot; a name that is one as a whole is that device's.
    for (told, expected) in [
        ("gpu0=a:2", &[("a:2", "a", 200)][..]),
        ("gpu0=a", &[("a", "a", 200)]),
        ("gpu0=a:2,a:1", &[("a:2", "a", 100), ("a:1", "a", 100)]),
        ("gpu0=b:2", &[("b:2", "b:2", 100)]),
        ("gpu0=b:2:1,a", &[("b:2:1", "b:2", 100), ("a", "a", 200)]),
    ] {
        let pairs = pairs(&devices, told);
        let found: Vec<_> = pairs[0]
            .nics
            .iter()
            .map(|nic| (nic.name, nic.device.rdma.unwrap(), nic.mbit))
            .collect();
        assert_eq!(found, expected, "{told}");
        let names = Topology::new(&devices, told).unwrap().names_for(&["0000:00:01.0"]);
        assert!(names.iter().zip(expected).all(|(name, (other, ..))| name == other), "{told}");
    }
    for (told, what) in [
        ("gpu0=a:0", OverrideError::UnknownNic),
        ("gpu0=b:1", OverrideError::UnknownNic),
        ("gpu0=a:256", OverrideError::UnknownNic),
        ("gpu0=eth0:1", OverrideError::UnknownNic),
        ("gpu0=a:2,a:2", OverrideError::RepeatedNic),
    ] {
        assert_eq!(Topology::new(&devices, told).unwrap_err().what, what, "{told}");
    }
}

#[test]
fn several_gpus_have_the_nics_of_each_in_turn() {
    let mut sets = 0;
    for (gpus, nics) in [(1, 3), (2, 2), (3, 1)] {
        each_table(gpus, nics, |devices, _, _| {
            let topology = Topology::new(devices, "").unwrap();
            let pairs: Vec<_> = topology.pairs().collect();
            let own: Vec<_> = pairs.iter().map(names).collect();
            let address = |pair: &Pair<'_>| match pair.owner {
                Owner::Gpu(_, device) => Some(device.address().to_ascii_uppercase()),
                Owner::Host => None,
            };
            let addresses: Vec<_> = pairs.iter().filter_map(address).collect();
            let orders: [&[usize]; 5] =
                [&[0], &[gpus - 1, 0], &[0, gpus - 1], &[0, 1, 2], &[2, 1, 0]];
            for order in orders.iter().filter(|order| order.iter().all(|gpu| *gpu < gpus)) {
                // By columns of the lists, what has been there left out.
                let mut expected = Vec::new();
                for rank in 0..MAX_NICS {
                    let column = order.iter().filter_map(|gpu| own[*gpu].get(rank).copied());
                    for name in column.collect::<Vec<_>>() {
                        if !expected.contains(&name) {
                            expected.push(name);
                        }
                    }
                }
                expected.truncate(MAX_NICS);
                let addresses: Vec<_> = order.iter().map(|gpu| &*addresses[*gpu]).collect();
                assert_eq!(&*topology.names_for(&addresses), expected, "{order:?} {devices:?}");
                // One that is not in the table changes nothing.
                let more = [&["0000:ff:00.0"], &*addresses].concat();
                assert_eq!(&*topology.names_for(&more), expected);
                sets += 1;
            }
            assert!(topology.names_for(&[]).is_empty());
        });
    }
    assert!(sets > 1000, "{sets}");
    // Five NICs each for two GPUs are more than an engine has.
    let paths: Vec<_> = (0..10)
        .map(|n| format!("pci0000:0{0}/0000:0{0}:01.0/0000:0{0}:{n:02x}.0", n / 5))
        .collect();
    let nics = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
    let mut devices: Vec<_> =
        paths.iter().zip(nics).map(|(path, name)| nic_at(0, path, name)).collect();
    devices.push(gpu_at(0, "pci0000:00/0000:00:01.0/0000:00:1f.0"));
    devices.push(gpu_at(0, "pci0000:01/0000:01:01.0/0000:01:1f.0"));
    let topology = Topology::new(&devices, "").unwrap();
    let chosen = topology.names_for(&["0000:01:1f.0", "0000:00:1f.0"]);
    assert_eq!(chosen, ["f", "a", "g", "b", "h", "c", "i", "d"]);
}

#[test]
fn a_line_is_read_and_written() {
    let device = Device::parse(LINE).unwrap().unwrap();
    let expected = Device {
        path: "pci0000:44/0000:44:00.0/0000:55:00.0",
        vendor: 0x1d0f,
        class: 0x02_00_00,
        of: Some("0000:54:00.0"),
        numa: Some(1),
        rdma: Some("rdmap85s0"),
        net: Some("eth1"),
        mbit: 200_000,
        down: true,
    };
    assert_eq!((device, device.address()), (expected, "0000:55:00.0"));
    assert_eq!(device.to_string(), LINE);
    let least = Device { path: "virtual/rxe0", rdma: Some("rxe0"), ..Device::default() };
    assert_eq!(Device::parse(&least.to_string()), Ok(Some(least)));
    for empty in ["", "  \t", "# only this", "  # pci0000:00/0000:00:00.0"] {
        assert_eq!(Device::parse(empty), Ok(None));
    }
}

#[test]
fn a_line_that_is_none_is_refused_with_its_place() {
    use TableError::*;
    for (line, column, what) in [
        ("pci0000:44", 1, NotAPath),
        (" /0000:44:00.0", 2, NotAPath),
        ("pci0000:44//x", 1, NotAPath),
        ("rdma=a/b", 1, NotAPath),
        ("virtual/a  colour=blue", 12, UnknownField),
        ("virtual/a up", 11, UnknownField),
        ("virtual/a down=1", 11, BadValue),
        ("virtual/a rdma", 11, BadValue),
        ("virtual/a rdma=", 11, BadValue),
        ("virtual/a numa=-1", 11, BadValue),
        ("virtual/a vendor=10000", 11, BadValue),
        ("virtual/a class=0x030200", 11, BadValue),
        ("virtual/a mbit=4294967296", 11, BadValue),
        ("virtual/a numa=1 net=b numa=1", 24, Repeated),
        ("virtual/a down down", 16, Repeated),
    ] {
        assert_eq!(Device::parse(line), Err(Misplaced { line: 1, column, what }), "{line}");
        let text = format!("# head\n{LINE}\n{line}\n{LINE}\n");
        let read: Vec<_> = table(&text).collect();
        assert_eq!(read[1..], [Err(Misplaced { line: 3, column, what })], "{line}");
        assert!(read[1].unwrap_err().to_string().starts_with("line 3, column "));
    }
}

#[test]
fn truncated_and_changed_texts_are_read_or_refused() {
    let gpu = "pci0000:44/0000:44:00.0/0000:59:00.0 vendor=10de class=030200";
    let told = "gpu0=rdmap85s0 ; # \u{2003}x";
    let all = |lines: &str, told: &str| {
        let devices: Vec<_> = table(lines).map_while(Result::ok).collect();
        if let Ok(topology) = Topology::new(&devices, told) {
            assert!(topology.pairs().all(|pair| pair.nics.len() <= MAX_NICS));
        }
    };
    let text = format!("{LINE}\n{gpu}\n");
    for byte in ['\0', '\n', ' ', '#', '=', '/', '.', ',', ';', '-', '9', 'g', 'é'] {
        for at in 0..=text.len() {
            all(&text[..at], told);
            let (mut inserted, mut changed) = (text.clone(), text.clone());
            inserted.insert(at, byte);
            all(&inserted, told);
            if at < text.len() {
                changed.replace_range(at..=at, &byte.to_string());
                all(&changed, told);
            }
        }
        for at in (0..=told.len()).filter(|at| told.is_char_boundary(*at)) {
            all(&text, &told[..at]);
            let mut inserted = told.to_string();
            inserted.insert(at, byte);
            all(&text, &inserted);
        }
    }
}
