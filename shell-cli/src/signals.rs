//! Ctrl-C: the first is noted, so that whoever waits can stop in order; the second ends the program.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;

/// The exit code of a program that was interrupted, as shells have it.
pub const INTERRUPTED: u8 = 130;

fn noted() -> &'static Arc<AtomicBool> {
    static NOTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    NOTED.get_or_init(Arc::default)
}

/// Starts to listen for interrupt and termination; and turns the signal of a file that may not grow
/// into the error that the write returns. Call once.
///
/// # Errors
///
/// The system's, if it does not take the handlers.
pub fn listen() -> std::io::Result<()> {
    for signal in [SIGINT, SIGTERM] {
        // Before the flag is set by the next line's handler: so it takes two signals.
        flag::register_conditional_shutdown(signal, INTERRUPTED.into(), Arc::clone(noted()))?;
        flag::register(signal, Arc::clone(noted()))?;
    }
    flag::register(SIGXFSZ, Arc::default())?;
    Ok(())
}

/// Whether the program was asked to stop.
#[must_use]
pub fn interrupted() -> bool {
    noted().load(Ordering::Relaxed)
}
