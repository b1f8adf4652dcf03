//! Kernels by their names, and launches of any.

use crate::random::Random;
use crate::reach::Reach;
use crate::world::World;
use crate::{copy, exchange, standby};
use std::ffi::c_void;
use std::ptr;

/// Which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    Copy(copy::Kernel),
    Exchange(exchange::Kernel),
    Standby,
}

impl Kernel {
    pub(crate) fn named(name: &[u8]) -> Option<Self> {
        if name == b"immwire_standby" {
            return Some(Self::Standby);
        }
        copy::Kernel::named(name)
            .map(Self::Copy)
            .or_else(|| exchange::named(name).map(Self::Exchange))
    }
}

/// The size of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

/// One launch.
#[derive(Debug)]
pub(crate) enum Launch {
    Copy(copy::Launch),
    Exchange(Box<exchange::Launch>),
    Standby(standby::Launch),
}

impl Launch {
    /// What a program launches.
    ///
    /// # Safety
    ///
    /// `parameters` is a list of one address, that of the structure that the kernel takes.
    pub(crate) unsafe fn read(
        kernel: Kernel,
        size: Size,
        parameters: *const *const c_void,
    ) -> Self {
        // SAFETY: our caller's promise.
        let only = unsafe { *parameters };
        match kernel {
            Kernel::Copy(kernel) => {
                // SAFETY: our caller's promise: kernels that copy take no other.
                let args = unsafe { ptr::read_unaligned(only.cast()) };
                Self::Copy(copy::Launch { kernel, args })
            }
            Kernel::Exchange(kernel) => {
                // SAFETY: our caller's promise: these kernels take no other.
                let args = unsafe { ptr::read_unaligned(only.cast()) };
                Self::Exchange(Box::new(exchange::Launch { kernel, size, args }))
            }
            Kernel::Standby => {
                // SAFETY: our caller's promise: this kernel takes no other.
                let args = unsafe { ptr::read_unaligned(only.cast()) };
                Self::Standby(standby::Launch { args })
            }
        }
    }

    /// Everything that can be told from the numbers alone is as the header says; else a violation.
    pub(crate) fn check(&self, size: Size, most_shared_bytes: u32) {
        match self {
            Self::Copy(launch) => launch.check(size, most_shared_bytes),
            Self::Exchange(launch) => launch.check(most_shared_bytes),
            Self::Standby(launch) => launch.check(size),
        }
    }

    /// Claims all memory that is known now.
    pub(crate) fn claim(&self, world: &World, reach: &mut Reach) {
        match self {
            Self::Copy(launch) => launch.claim(world, reach),
            Self::Exchange(launch) => launch.claim(world, reach),
            Self::Standby(launch) => launch.claim(world, reach),
        }
    }

    /// Does it.
    pub(crate) fn run(&self, reach: &mut Reach, random: &mut Random) {
        match self {
            Self::Copy(launch) => launch.run(reach, random),
            Self::Exchange(launch) => launch.run(reach, random),
            Self::Standby(launch) => launch.run(reach, random),
        }
    }
}
