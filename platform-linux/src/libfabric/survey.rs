//! What a machine's libfabric offers, and why the rest of it does not fit: for people, not for engines.
//!
//! Loads the library and asks it for its devices; opens none. Decides nothing: what fits is what the
//! provider itself would find (`fabric::list`), and a reason is looked for only where that is nothing.

use std::ffi::CStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;

use libfabric_sys as sys;
use libfabric_sys::Library;

use super::LibfabricError;
use super::fabric::{self, API, PREFERENCE};

/// What a libfabric offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survey {
    /// The file it was loaded from.
    pub path: PathBuf,
    /// Its version.
    pub version: String,
    /// Those that an engine can use first, best first; then the others that it lists.
    pub providers: Vec<Surveyed>,
}

/// One of libfabric's providers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surveyed {
    /// `tcp`, `efa`, ...
    pub name: String,
    /// What engines can be on, in the order in which they take them. Empty if `unfit` says why.
    pub devices: Vec<SurveyedDevice>,
    /// Why there is none.
    pub unfit: Option<Unfit>,
}

/// A device that fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SurveyedDevice {
    /// `eth0`, `rdmap0s31-rdm`, ...: libfabric's domain.
    pub domain: String,
    /// libfabric's fabric: an IP network, `efa-direct`, ...
    pub fabric: String,
}

/// Why a provider has no device for an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unfit {
    /// It lists none.
    NoDevice,
    /// It has no endpoints for reliable datagrams.
    NoReliableDatagrams,
    /// It has no remote writes.
    NoWrites,
    /// Too little data goes with a write to say whose it is.
    NarrowData {
        /// Bytes of it.
        bytes: usize,
    },
    /// Provider `efa` has the fabric of that name alone.
    OlderFabric,
    /// It might do, but nobody has tried: engines do not use it.
    Untried,
    /// It demands what engines do not do.
    Demands,
    /// libfabric failed when asked.
    Failed(String),
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => f.write_str("no device"),
            Self::NoReliableDatagrams => f.write_str("no reliable datagrams (FI_EP_RDM)"),
            Self::NoWrites => f.write_str("no remote writes (FI_RMA)"),
            Self::NarrowData { bytes } => {
                write!(f, "{bytes} bytes of data go with a write, 8 are needed to say whose it is")
            }
            Self::OlderFabric => f.write_str(
                "only fabric `efa`, which engines do not use; `efa-direct` takes libfabric 2.1 or later, and a \
                 device with unsolicited write receives",
            ),
            Self::Untried => f.write_str("not one that engines know how to use"),
            Self::Demands => f.write_str("demands modes that engines do not have"),
            Self::Failed(why) => write!(f, "libfabric failed: {why}"),
        }
    }
}

/// Loads libfabric (`library`, or the one that an engine would find), and asks it for its devices. Opens
/// none; up to half a second.
///
/// # Errors
///
/// [`LibfabricError`]: there is no libfabric, or it lists nothing because it fails.
pub fn survey(library: Option<&Path>) -> Result<Survey, LibfabricError> {
    let library = match library {
        Some(path) => Library::load_from(path)?,
        None => Library::load()?,
    };
    let listed = listed(library)?;
    let mut providers = Vec::new();
    for name in PREFERENCE {
        let mut devices = Vec::new();
        let mut failed = None;
        match fabric::list(library, name, false) {
            Ok(found) => devices.extend(found.into_iter().map(|device| SurveyedDevice {
                domain: device.facts.domain,
                fabric: device.facts.fabric,
            })),
            Err(error) => failed = Some(Unfit::Failed(error.to_string())),
        }
        let unfit = devices.is_empty().then(|| {
            let entry = listed.iter().find(|entry| entry.name == name);
            let older = name == "efa" && fabric::has_older_efa_only(library);
            failed
                .or(older.then_some(Unfit::OlderFabric))
                .unwrap_or_else(|| entry.map_or(Unfit::NoDevice, Listed::unfit))
        });
        providers.push(Surveyed { name: name.to_owned(), devices, unfit });
    }
    let others = listed.into_iter().filter(|entry| !PREFERENCE.contains(&entry.name.as_str()));
    providers.extend(others.map(|entry| {
        let unfit = match entry.unfit() {
            Unfit::Demands => Unfit::Untried,
            other => other,
        };
        Surveyed { name: entry.name, devices: Vec::new(), unfit: Some(unfit) }
    }));
    let (path, version) = (library.path().to_owned(), library.version().to_string());
    Ok(Survey { path, version, providers })
}

/// What a provider says of itself, asked without hints: the best of its entries.
struct Listed {
    name: String,
    datagrams: bool,
    writes: bool,
    data_bytes: usize,
}

impl Listed {
    const fn unfit(&self) -> Unfit {
        match self {
            Self { datagrams: false, .. } => Unfit::NoReliableDatagrams,
            Self { writes: false, .. } => Unfit::NoWrites,
            Self { data_bytes: bytes @ ..8, .. } => Unfit::NarrowData { bytes: *bytes },
            _ => Unfit::Demands,
        }
    }
}

fn listed(library: &'static Library) -> Result<Vec<Listed>, LibfabricError> {
    let mut raw = ptr::null_mut();
    let version = library.version().min(API).code();
    // SAFETY: no node, no service, no hints; `raw` is written on success.
    let code = unsafe {
        let none = ptr::null();
        library.getinfo(version, none, none, 0, ptr::null(), &raw mut raw)
    };
    if code == -sys::FI_ENODATA {
        return Ok(Vec::new());
    }
    fabric::check(library, "fi_getinfo", code)?;
    let mut all: Vec<Listed> = Vec::new();
    let mut next = raw;
    // SAFETY: a list of `fi_info`, whose attributes the library allocated, or left null; names are null or
    // C strings. It is freed after the last look.
    unsafe {
        while let Some(entry) = next.as_ref() {
            next = entry.next;
            let (Some(fabric), Some(ep), Some(domain)) =
                (entry.fabric_attr.as_ref(), entry.ep_attr.as_ref(), entry.domain_attr.as_ref())
            else {
                continue;
            };
            if fabric.prov_name.is_null() {
                continue;
            }
            let name = CStr::from_ptr(fabric.prov_name).to_string_lossy().into_owned();
            let datagrams = ep.type_ == sys::FI_EP_RDM;
            let writes = datagrams && entry.caps & sys::FI_RMA != 0;
            let data_bytes = if writes { domain.cq_data_size } else { 0 };
            match all.iter_mut().find(|it| it.name == name) {
                Some(known) => {
                    known.datagrams |= datagrams;
                    known.writes |= writes;
                    known.data_bytes = known.data_bytes.max(data_bytes);
                }
                None => all.push(Listed { name, datagrams, writes, data_bytes }),
            }
        }
        if !raw.is_null() {
            library.freeinfo(raw);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_thing_that_is_missing_is_the_reason() {
        let listed = |datagrams, writes, data_bytes| {
            Listed { name: String::new(), datagrams, writes, data_bytes }.unfit()
        };
        assert_eq!(listed(false, false, 0), Unfit::NoReliableDatagrams);
        assert_eq!(listed(true, false, 0), Unfit::NoWrites);
        assert_eq!(listed(true, true, 4), Unfit::NarrowData { bytes: 4 });
        assert_eq!(listed(true, true, 8), Unfit::Demands);
    }

    #[test]
    fn a_file_that_is_no_library_is_an_error_that_says_so() {
        let error = survey(Some(Path::new("/dev/null"))).unwrap_err();
        assert!(error.to_string().contains("/dev/null"), "{error}");
    }
}
