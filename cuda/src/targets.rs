//! Which GPUs there is code for in the images of kernels. Known to the build, and to the tests of what is asked of GPUs.
//!
//! A driver loads the code of a GPU's own generation, the latest that is not later than the GPU's; or else compiles the latest text that is not
//! later (CUDA C++ Programming Guide, "Application Compatibility"). Code with the features of one architecture alone (`a`) runs on that only.

use std::fmt;

/// Code for one architecture, or text for all from one on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// `sm_`: this one, and later ones of its generation.
    Code(u32),
    /// `sm_` with an `a`: this one alone, with what only it has.
    Alone(u32),
    /// `compute_`: compiled by the driver.
    Text(u32),
}

use Target::{Alone, Code, Text};

/// Each image by its name, and what it has code for: Ampere and Hopper, text for later ones; and the first that makes e4m3, where that is done.
pub(crate) const IMAGES: [(&str, &[Target]); 2] = [
    ("copy", &[Code(80), Alone(90), Text(90)]),
    ("moe", &[Code(80), Code(89), Alone(90), Text(90)]),
];

/// As `nvcc -gencode` has it.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Code(of) => write!(f, "arch=compute_{of},code=sm_{of}"),
            Alone(of) => write!(f, "arch=compute_{of}a,code=sm_{of}a"),
            Text(of) => write!(f, "arch=compute_{of},code=compute_{of}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::QUANTISES_FROM;

    /// What a driver loads of an image: as which architecture the kernels were compiled.
    fn loaded(targets: &[Target], (major, minor): (u32, u32)) -> Option<u32> {
        let gpu = 10 * major + minor;
        let code = targets.iter().filter_map(|target| match *target {
            Code(of) if of / 10 == major && of <= gpu => Some(of),
            Alone(of) if of == gpu => Some(of),
            _ => None,
        });
        let text = targets.iter().filter_map(|target| match *target {
            Text(of) if of <= gpu => Some(of),
            _ => None,
        });
        code.max().or(text.max())
    }

    const GPUS: [(u32, u32); 10] =
        [(7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)];

    #[test]
    fn every_gpu_that_is_served_has_code_for_what_is_asked_of_it() {
        for (name, targets) in IMAGES {
            for gpu in GPUS {
                let loaded = loaded(targets, gpu);
                assert_eq!(loaded.is_some(), gpu >= (8, 0), "{name} on {gpu:?}");
                // The kernels have these only where they were compiled for as much.
                let quantises = name != "moe" || gpu < QUANTISES_FROM || loaded >= Some(89);
                let has_bulk_copies = gpu < (9, 0) || loaded >= Some(90);
                assert!(quantises && has_bulk_copies, "{name} on {gpu:?}: {loaded:?}");
            }
        }
    }

    #[test]
    fn a_target_is_what_nvcc_takes() {
        let said = [Code(89), Alone(90), Text(90)].map(|target| target.to_string());
        let expected = ["89,code=sm_89", "90a,code=sm_90a", "90,code=compute_90"];
        assert_eq!(said, expected.map(|rest| format!("arch=compute_{rest}")));
    }
}
