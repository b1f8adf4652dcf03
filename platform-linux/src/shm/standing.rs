//! Short pieces that a GPU's warps copy which stand by: which piece is at which seat, and what becomes of those that no warp has copied.
//!
//! # What it refuses to know
//!
//! When warps are worth having, and what is asked for at a seat by which words (the core's `standby`); how pieces are copied otherwise
//! ([`super::gpu`]).
//!
//! # Invariants
//!
//! - A piece is copied under its [`Claim`], which ends when a warp has said that it is done, or when it has been copied otherwise.
//! - What is asked for at a seat lies in memory that stays, as with any other copy: its source by the engine's rule, its target by the claim.
//! - Every piece that was taken is handed back once, by [`Standing::poll`] or [`Standing::fail`].
//! - Nothing here allocates. To ask and to look takes no call of the driver.

use std::time::{Duration, Instant};

use immwire_core::group::WorkRequest;
use immwire_core::id::Time;
use immwire_core::standby::{
    ASKED_WORDS, Ended, Errand, IDLE, SEAT_WORDS, SEATS, SHIFT, STATUS, Seat, Standby,
};
use immwire_cuda::args;

use super::gpu::Claim;

const _: () = {
    assert!(SEATS == args::STANDBY_SEATS as usize);
    assert!(SEAT_WORDS * size_of::<u64>() == args::SEAT_BYTES as usize);
    assert!(STATUS == args::SEAT_STATUS as usize && ASKED_WORDS <= STATUS);
};

/// A piece, where its bytes are and go, as the GPU has addresses, and the right to write there.
#[derive(Debug)]
pub(super) struct Short {
    pub(super) work: WorkRequest,
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) claim: Claim,
}

/// One GPU's seats, and what is asked for at them.
#[derive(Debug)]
pub(super) struct Standing {
    /// Dropped first: it waits for the warps.
    warps: immwire_cuda::Standby,
    asker: Standby,
    asked: [Option<Short>; SEATS],
    /// What its asker's times are from.
    began: Instant,
    /// The driver would not launch them once: it is not asked again.
    is_refused: bool,
}

/// The words of all seats.
fn seats(warps: &immwire_cuda::Standby) -> Option<[Seat<'_>; SEATS]> {
    let mut all = [None; SEATS];
    for (at, seat) in all.iter_mut().enumerate() {
        *seat = warps.seat(at).and_then(Seat::new);
    }
    let [Some(a), Some(b), Some(c), Some(d)] = all else { return None };
    Some([a, b, c, d])
}

impl Standing {
    pub(super) fn new(warps: immwire_cuda::Standby) -> Self {
        let (asker, asked) = (Standby::new(), [const { None }; SEATS]);
        Self { warps, asker, asked, began: Instant::now(), is_refused: false }
    }

    /// Has a warp copy a piece, if one is up that has nothing to do; else it is handed back.
    #[inline]
    pub(super) fn take(&mut self, short: Short) -> Result<(), Short> {
        let Ok(len) = u32::try_from(short.work.len) else { return Err(short) };
        let errand = Errand { src: short.src, dst: short.dst, len };
        let at = seats(&self.warps).and_then(|seats| self.asker.ask(errand, &seats));
        match at.and_then(|at| self.asked.get_mut(at)) {
            Some(seat) => {
                *seat = Some(short);
                Ok(())
            }
            None => Err(short),
        }
    }

    /// A short piece goes another way: warps are sent for, if short pieces come often.
    pub(super) fn send(&mut self) {
        if self.is_refused {
            return;
        }
        // Not that of the engine's last look, which may be long ago.
        let now = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let now = Time::from_nanos(now);
        let seats = seats(&self.warps);
        let Some(launch) = seats.and_then(|seats| self.asker.send(now, &seats)) else { return };
        // SAFETY: for `Standby::launch`, of what is asked for from now on until a warp says that it is done or that it has gone:
        // - the source lies in a region of ours, which stays registered until the piece is reported (`Provider::post`); the target in a
        //   region of the peer's, whose bounds were checked, and which its owner does not take back as long as it is claimed;
        // - that nobody writes sources or uses targets meanwhile, and that they do not overlap, is the callers' of the engine to see to, as
        //   with a NIC; if they do not, the bytes are a mixture;
        // - seats are written by the core's asker alone, which leaves the status to the warp.
        if let Err(why) = unsafe { self.warps.launch(launch, IDLE, SHIFT) } {
            tracing::warn!(%why, "a GPU's driver does not launch warps for short copies");
            self.is_refused = true;
        }
    }

    /// The next piece that has ended: whether it was copied, or has to be otherwise.
    #[inline]
    pub(super) fn poll(&mut self) -> Option<(Short, Ended)> {
        for (at, asked) in self.asked.iter_mut().enumerate() {
            if asked.is_none() {
                continue;
            }
            let Some(seat) = self.warps.seat(at).and_then(Seat::new) else { continue };
            if let Some(ended) = self.asker.look(at, seat) {
                return asked.take().zip(Some(ended));
            }
        }
        None
    }

    /// Whether anything is asked for.
    pub(super) fn is_busy(&self) -> bool {
        self.asked.iter().any(Option::is_some)
    }

    /// What the driver says of the stream that warps come in.
    pub(super) fn failure(&self) -> Option<immwire_cuda::Error> {
        self.warps.stream().is_done().err()
    }

    /// Hands back what is asked for: the GPU has failed, and nothing of it runs any more.
    pub(super) fn fail(&mut self) -> impl Iterator<Item = Short> + '_ {
        self.asked.iter_mut().filter_map(Option::take)
    }

    /// Waits for the warps to go. If they do not, what they may still write to stays claimed.
    pub(super) fn settle(&mut self, limit: Duration) {
        if !self.warps.settle(limit) {
            self.asked.iter_mut().filter_map(Option::take).for_each(std::mem::forget);
        }
    }
}
