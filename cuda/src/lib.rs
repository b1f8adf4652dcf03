//! GPU memory for immwire: kernels that copy pages to wherever the GPU can reach, and say when they are there; and kernels
//! that exchange tokens among experts.
//!
//! [`Copier::submit`] copies pages, or one range, between any two of: memory of this GPU, of a peer that it has access
//! to, and pinned host memory; one launch for the whole request, on the caller's [`Stream`], in the primary context that
//! the CUDA runtime and PyTorch use too. Then, if asked to, it releases a word: whoever acquires it sees every byte.
//!
//! | module | what | needs a GPU |
//! |---|---|---|
//! | [`args`] | the structure that the kernels take, as in `kernels/immwire_cuda.h` | no |
//! | [`geometry`] | which kernel, how many SMs, which pieces | no |
//! | [`oracle`] | the same copies in host memory, the plain way | no |
//! | [`Device`], [`Stream`], [`Event`], [`DeviceMemory`], [`PinnedMemory`] | what of CUDA is used, with owners | yes |
//! | [`Copier`] | launches | yes |
//! | [`Standby`] | warps that are asked for short copies without a launch | yes |
//! | [`moe`] | tokens to the GPUs of their experts, and results back: dispatch and combine | yes |
//! | [`DmaBuf`], [`Direct`], [`owner_of`] | memory that NICs reach | yes |
//! | [`look_up`], [`hand_over`], [`Opened`], [`SharedMemory`], [`Pinned`] | memory that several processes use | yes |
//! | [`Allocations`], [`Joining`] | the same of ranges over several allocations ([`Found`]) | yes |
//!
//! # Without CUDA
//!
//! Nothing of CUDA is linked: the driver is loaded when the first [`Device`] is opened, and [`Error::NoDriver`] says that
//! there is none. The kernels are compiled into the crate where an nvcc is found or named (`IMMWIRE_NVCC`; `build.rs`);
//! built without, [`kernels_built_in`] is false and [`Copier::new`] answers [`Error::KernelsAbsent`].
//!
//! The compiled kernels are not kept with the sources: nobody could tell by reading whether they belong to them, and the
//! compiler is had in ten seconds without any privilege (`cuda/toolchain`).
//!
//! # What this crate does not do
//!
//! It knows no peers and no counters, speaks to no other process, and does not check the addresses of a copy:
//! that a request lies within memory that lives until it has ended is the contract of the `unsafe` [`Copier::submit`].

pub mod args;
mod copier;
mod device;
mod direct;
mod driver;
mod error;
mod extent;
pub mod geometry;
mod memory;
mod module;
pub mod moe;
pub mod oracle;
mod pins;
mod share;
mod standby;
mod stuck;
#[cfg(test)]
mod targets;

pub use copier::{Copier, PagedCopy, Pages, Release, Submitted, kernels_built_in};
pub use device::{Device, Event, Stream};
pub use direct::{Direct, DmaBuf, Seen, Visibility, owner_of, prepare, whole_pages};
pub use error::{CudaCode, Error};
pub use extent::{ALLOCATIONS_MAX, Found};
pub use memory::{DeviceMemory, PinnedMemory};
pub use share::{
    Allocations, Handover, IPC_HANDLE_BYTES, Joining, NotOpened, NotPinned, Opened, Pinned,
    Received, SharedMemory, Shuttle, Uuid, gpu_of, hand_over, look_up,
};
pub use standby::Standby;
