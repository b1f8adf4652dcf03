//! Hot paths of the core, each behind a C function `hp_*`, so that the linker can say what they reach.
//!
//! Never run: `check` links them with nothing at all. Every shim takes what it works on by reference, so
//! that the compiler knows nothing of its state, and writes what comes out through a reference, so that
//! nothing is optimised away. What is proved of a shim therefore holds for **any** state of the group,
//! the table, or the bytes, not only for those that can be reached.
//!
//! Generic code is proved as it is instantiated here: page lists and targets are slices, storage is lent.
//!
//! The functions `seed_*` break the rule on purpose; `check` requires that each is found out.
#![no_std]

mod group;
mod seeds;
mod small;

unsafe extern "C" {
    /// Defined nowhere: what can panic cannot be linked.
    safe fn a_panic_is_reachable() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    a_panic_is_reachable()
}
