//! The benchmarks: what the engine reaches, beside what the machine reaches without it.
//!
//! | module | what |
//! |---|---|
//! | [`command`] | from arguments to rows on the screen |
//! | [`plan`] | which rows are measured |
//! | [`run`] | measuring one row |
//! | [`serve`] | the peer's side |
//! | [`say`] | what the two say to each other |
//! | [`moe`] | dispatch and combine among ranks of this host |
//! | [`moe_gpu`] | the same among GPUs |
//! | [`pattern`] | bytes that tell when and where they belong |
//! | [`mapping`] | the transfers' memory, for the baseline |
//! | [`process`] | peer processes |
//! | [`driver_copy`] | the driver's own copies between GPUs, for the baseline |
//! | [`raw`] | libfabric and libibverbs without an engine, for the baseline |

pub mod command;
pub mod driver_copy;
pub mod mapping;
pub mod moe;
pub mod moe_gpu;
pub mod pattern;
pub mod plan;
pub mod process;
pub mod raw;
pub mod run;
pub mod say;
pub mod serve;
