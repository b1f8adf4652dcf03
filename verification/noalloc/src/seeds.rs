//! Functions that `check` must find out, one for each way to break the rule.

unsafe extern "C" {
    fn malloc(bytes: usize) -> *mut u8;
}

/// Can panic: the index may be out of bounds.
#[unsafe(no_mangle)]
extern "C" fn seed_index(table: &&[u64], i: usize) -> u64 {
    table[i]
}

/// Can panic: the option may be empty.
#[unsafe(no_mangle)]
extern "C" fn seed_unwrap(value: &Option<u64>) -> u64 {
    value.unwrap()
}

/// Can panic: the divisor may be 0.
#[unsafe(no_mangle)]
extern "C" fn seed_divide(a: u64, b: u64) -> u64 {
    a / b
}

/// Allocates past Rust's back.
#[unsafe(no_mangle)]
extern "C" fn seed_malloc(bytes: usize) -> *mut u8 {
    // SAFETY: `malloc` takes any size; this is never run.
    unsafe { malloc(bytes) }
}

/// Takes more stack than a hot path may.
#[unsafe(no_mangle)]
extern "C" fn seed_deep(value: u8) -> u8 {
    let mut bytes = [value; 16384];
    core::hint::black_box(&mut bytes)[0]
}

/// Calls itself, so that nobody can tell how much stack it takes.
#[unsafe(no_mangle)]
extern "C" fn seed_recursion(n: u64) -> u64 {
    if n < 2 {
        return n;
    }
    seed_recursion(n.wrapping_sub(1)) ^ seed_recursion(n.wrapping_sub(2)).rotate_left(1)
}

#[cfg(feature = "seed-alloc")]
mod alloc {
    extern crate alloc;

    /// Allocates.
    #[unsafe(no_mangle)]
    extern "C" fn seed_box(value: u64) -> *mut u64 {
        alloc::boxed::Box::into_raw(alloc::boxed::Box::new(value))
    }
}
