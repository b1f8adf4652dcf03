//! Which NICs belong to which GPU: on this machine, or on the one whose table it is given.

use super::grid;
use crate::args::PairingArgs;
use immwire::topology::{Misplaced, OverrideError, Owner, Pair, Table, Topology};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// What was decided, and from what.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Pairing {
    /// A row for each GPU; one for the host, if there is none.
    pub pairs: Vec<Row>,
    /// NICs that count, and are nobody's.
    pub unused: Vec<String>,
    /// The table of devices, as `immwire doctor --topology` takes it.
    pub table: String,
}

/// A GPU's NICs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// `gpu0`, `gpu1`, ... in the order of PCI addresses; or `host`.
    pub owner: String,
    /// PCI address of the GPU.
    pub pci: Option<String>,
    /// The NUMA node whose processors serve them best.
    pub numa_node: Option<u16>,
    /// Their names: of RDMA devices, or of network interfaces where there is none.
    pub nics: Vec<String>,
    /// Sum of their rates; `None` if it is unknown.
    pub mbit_per_s: Option<u64>,
    /// Why these.
    pub why: String,
}

impl From<&Pair<'_>> for Row {
    fn from(pair: &Pair<'_>) -> Self {
        let pci = match pair.owner {
            Owner::Gpu(_, gpu) => Some(gpu.address().to_owned()),
            Owner::Host => None,
        };
        Self {
            owner: pair.owner.to_string(),
            pci,
            numa_node: pair.numa,
            nics: pair.nics.iter().map(|nic| nic.name.to_owned()).collect(),
            mbit_per_s: Some(pair.mbit()).filter(|mbit| *mbit > 0),
            why: pair.reason.to_string(),
        }
    }
}

/// Decides for a table.
///
/// # Errors
///
/// Where the overrides say what cannot be.
pub fn pair(table: &Table, overrides: &str) -> Result<Pairing, Misplaced<OverrideError>> {
    let devices = table.devices();
    let topology = Topology::new(&devices, overrides)?;
    let pairs: Vec<_> = topology.pairs().collect();
    let nics = pairs.iter().flat_map(|pair| &pair.nics);
    let used: BTreeSet<_> = nics.filter_map(|nic| nic.device.nic_name()).collect();
    let names = topology.nics().filter_map(|nic| nic.nic_name());
    let unused = names.filter(|name| !used.contains(name)).map(str::to_owned).collect();
    let pairs = pairs.iter().map(Row::from).collect();
    Ok(Pairing { unused, table: table.text().to_owned(), pairs })
}

impl PairingArgs {
    /// What they say, for an engine.
    ///
    /// # Errors
    ///
    /// In words: the file cannot be read, or which line of it is no device.
    pub fn read(&self) -> Result<immwire::topology::Pairing, String> {
        let read = |path: &PathBuf| {
            let text =
                fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
            Table::from_text(text).map_err(|fault| format!("{}: {fault}", path.display()))
        };
        let table = self.topology.as_ref().map(read).transpose()?;
        Ok(immwire::topology::Pairing {
            table,
            overrides: self.pairing.clone().unwrap_or_default(),
        })
    }

    /// Decides for the table in that file, or this machine's.
    ///
    /// # Errors
    ///
    /// The same; and what of the pairs cannot be.
    pub fn pair(&self) -> Result<Pairing, String> {
        let told = self.read()?;
        let table = told.table.unwrap_or_else(|| Table::capture(Path::new("/")));
        pair(&table, &told.overrides).map_err(|fault| format!("--pairing: {fault}"))
    }
}

impl Pairing {
    /// The rows in words, no line wider than `width` columns where words allow.
    #[must_use]
    pub fn text(&self, width: u16) -> String {
        let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "unknown".into());
        let row = |row: &Row| {
            let owner = match &row.pci {
                Some(pci) => format!("{} {pci}", row.owner),
                None => row.owner.clone(),
            };
            let nics = if row.nics.is_empty() { "none".into() } else { row.nics.join(", ") };
            let gbit = or_unknown(row.mbit_per_s.map(|mbit| (mbit / 1000).to_string()));
            [
                owner,
                nics,
                gbit,
                or_unknown(row.numa_node.map(|node| node.to_string())),
                row.why.clone(),
            ]
        };
        let header = ["memory of", "NICs", "Gbit/s", "NUMA node", "why these"];
        let mut text = grid(width, self.pairs.iter().map(row), Some(header));
        if !self.unused.is_empty() {
            text = format!("{text}\nnot used: {}", self.unused.join(", "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0 rdma=mlx5_0 numa=0 mbit=400000
pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1b:00.0 vendor=10de class=030200 numa=0
pci0000:26/0000:26:01.0/0000:29:00.0 rdma=mlx5_1 numa=0 mbit=200000
pci0000:9a/0000:9a:01.0/0000:9d:00.0 vendor=10de class=030200
";

    #[test]
    fn each_gpu_has_a_row_with_its_nics_and_the_reason() {
        let pairing = pair(&Table::from_text(TABLE).unwrap(), "").unwrap();
        let row = |index: usize| {
            let Row { owner, pci, numa_node, nics, mbit_per_s, why } = pairing.pairs[index].clone();
            (owner, pci.unwrap(), numa_node, nics.join(","), mbit_per_s, why)
        };
        let first = ("gpu0", "0000:1b:00.0", Some(0), "mlx5_0", Some(400_000), "same PCIe switch");
        let second = ("gpu1", "0000:9d:00.0", Some(0), "mlx5_1", Some(200_000), "same machine");
        for (index, (owner, pci, node, nics, mbit, why)) in [first, second].into_iter().enumerate()
        {
            let expected = (owner.into(), pci.into(), node, nics.into(), mbit, why.into());
            assert_eq!(row(index), expected);
        }
        let text = pairing.text(100);
        for needle in ["gpu1 0000:9d:00.0", "mlx5_0", "400", "same PCIe switch"] {
            assert!(text.contains(needle), "{needle} in\n{text}");
        }
        assert!(!text.contains("not used"), "{text}");
    }

    #[test]
    fn what_nobody_has_is_named_and_what_is_unknown_is_not_a_number() {
        let one = TABLE.lines().take(3).collect::<Vec<_>>().join("\n");
        let pairing = pair(&Table::from_text(one).unwrap(), "").unwrap();
        assert_eq!(pairing.unused, ["mlx5_1"]);
        assert!(pairing.text(100).ends_with("not used: mlx5_1"));
        let empty = pair(&Table::from_text("# nothing").unwrap(), "").unwrap();
        assert_eq!((empty.pairs.len(), empty.pairs[0].mbit_per_s), (1, None));
        let text = empty.text(100);
        assert!(text.contains("no NIC with a link") && text.contains("unknown"), "{text}");
    }

    #[test]
    fn a_file_is_taken_or_refused_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let told = |pairing: Option<&str>| {
            let pairing = pairing.map(str::to_owned);
            PairingArgs { pairing, topology: Some(path.clone()) }.pair()
        };
        assert!(told(None).unwrap_err().contains("table: No such file"));
        fs::write(&path, format!("{TABLE}virtual/rxe0 up\n")).unwrap();
        assert!(told(None).unwrap_err().contains("table: line 5, column 14: not a field"));
        let captured = pair(&Table::from_text(TABLE).unwrap(), "").unwrap();
        fs::write(&path, &captured.table).unwrap();
        assert_eq!(told(None), Ok(captured));
        let rows = told(Some("gpu1=mlx5_0")).unwrap().pairs;
        assert_eq!(
            (rows[1].nics.as_slice(), rows[1].why.as_str()),
            (&["mlx5_0".into()][..], "as told")
        );
        let ports = told(Some("gpu0=mlx5_0:2 gpu1=mlx5_1:1")).unwrap();
        assert_eq!((ports.pairs[0].nics.join(","), ports.unused), ("mlx5_0:2".into(), vec![]));
        let refused = told(Some("gpu1=mlx5_9")).unwrap_err();
        assert!(refused.contains("--pairing: line 1, column 6: no such NIC"), "{refused}");
    }
}
