//! A number that goes up by one whenever a counter has counted so many writes.
//!
//! It is for words that kernels look at ([`GpuFlag::follow`]): whoever counts the last write stores the next number, then and
//! there. No thread waits, and none is woken.
//!
//! # What it refuses to know
//!
//! Where the number is stored, and who looks at it.
//!
//! # Invariants
//!
//! - Every `writes` that were consumed are one step; a step is stored after its writes were counted, and steps in their order.
//! - After [`Follower::stop`] nothing is stored any more, and what had arrived for the next step is there for the next wait.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};

use immwire_core::wake::Ticket;

use crate::counter::ImmCounter;
use crate::error::CountError;
use crate::flag::GpuFlag;
use crate::sync::lock;
use crate::wait::OnEnd;

enum State {
    /// For the next step's writes.
    Waiting { ticket: Ticket, steps: u64 },
    /// It does not go on; with the reason, if nobody asked for it.
    Over(Option<CountError>),
}

pub(crate) struct Follower {
    counter: Arc<ImmCounter>,
    writes: u64,
    store: Box<dyn Fn(u64) + Send + Sync>,
    /// Held while a step is taken: steps are in order, and `stop` comes between none.
    state: Mutex<State>,
}

impl Follower {
    /// Counts on from `steps`. What is there already is stored at once.
    pub(crate) fn start(
        counter: &Arc<ImmCounter>,
        writes: NonZeroU64,
        steps: u64,
        store: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<Arc<Self>, CountError> {
        let follower = Arc::new(Self {
            counter: Arc::clone(counter),
            writes: writes.get(),
            store: Box::new(store),
            state: Mutex::new(State::Over(None)),
        });
        let mut state = lock(&follower.state);
        follower.go_on(&mut state, steps);
        match &*state {
            State::Over(Some(why)) => Err(why.clone()),
            _ => {
                drop(state);
                Ok(follower)
            }
        }
    }

    /// Takes the steps that there are writes for, and waits for those of the next.
    fn go_on(self: &Arc<Self>, state: &mut State, mut steps: u64) {
        *state = loop {
            match self.counter.arm(self.writes) {
                Ok(None) => {}
                Ok(Some(ticket)) => match self.counter.leave(ticket, Arc::clone(self) as _) {
                    // Whoever ends it finds the state locked until it is this one.
                    None => break State::Waiting { ticket, steps },
                    Some(code) => match self.counter.settle(ticket, code, self.writes) {
                        Ok(()) => {}
                        Err(why) => break State::Over(Some(why)),
                    },
                },
                Err(why) => break State::Over(Some(why)),
            }
            steps = steps.wrapping_add(1);
            (self.store)(steps);
        };
    }

    /// Ends it, if it has not ended.
    pub(crate) fn stop(&self) {
        let mut state = lock(&self.state);
        if let State::Waiting { ticket, .. } = *state {
            *state = State::Over(None);
            // Who reached the count meanwhile waits for the lock: what that consumed is put back.
            drop(state);
            self.counter.abandon(ticket, self.writes);
        }
    }

    fn why(&self) -> Option<CountError> {
        match &*lock(&self.state) {
            State::Over(why) => why.clone(),
            State::Waiting { .. } => None,
        }
    }
}

impl OnEnd for Follower {
    fn ended(self: Arc<Self>, ticket: Ticket, code: u8) {
        let mut state = lock(&self.state);
        let State::Waiting { ticket: awaited, steps } = *state else { return };
        if awaited != ticket {
            return;
        }
        match self.counter.settle(ticket, code, self.writes) {
            Ok(()) => {
                let steps = steps.wrapping_add(1);
                (self.store)(steps);
                self.go_on(&mut state, steps);
            }
            Err(why) => *state = State::Over(Some(why)),
        }
    }
}

/// A flag that follows a counter, as [`GpuFlag::follow`] began it. Dropping it ends that; the flag stays as it is.
#[must_use = "it ends when it is dropped"]
pub struct Following {
    flag: Arc<GpuFlag>,
    follower: Arc<Follower>,
}

impl Following {
    /// The flag.
    #[must_use]
    pub const fn flag(&self) -> &Arc<GpuFlag> {
        &self.flag
    }

    /// Why the flag does not go on: [`CountError::EngineStopped`]. `None` while it does.
    #[must_use]
    pub fn why_over(&self) -> Option<CountError> {
        self.follower.why()
    }
}

impl fmt::Debug for Following {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Following")
            .field("flag", &self.flag)
            .field("writes", &self.follower.writes)
            .field("why_over", &self.why_over())
            .finish()
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.follower.stop();
    }
}

impl GpuFlag {
    /// Has the number in this flag go up by one whenever `writes` have arrived at `counter`, and consumes them: early ones count.
    /// Whoever counts the last of them stores it, so a running kernel that waits for the number, or a stream that waits for
    /// the word to be that large, goes on with no thread in between.
    ///
    /// The counter takes no other wait meanwhile ([`CountError::Busy`]), and nobody else should store to the flag. Whoever polls
    /// an engine must go on polling it.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::num::NonZeroU64;
    /// use std::sync::Arc;
    /// let engine = immwire::TransferEngine::builder().gpus([0]).build()?;
    /// let layers = Arc::new(engine.counter()?);
    /// let flag = Arc::new(engine.alloc_gpu_flag(0)?);
    /// // A layer is 64 writes. Kernels wait until the word at `flag.address()` is 1, 2, 3...
    /// let following = flag.follow(&layers, NonZeroU64::new(64).ok_or("no writes")?)?;
    /// # drop(following);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`CountError::Busy`], [`CountError::EngineStopped`].
    pub fn follow(
        self: &Arc<Self>,
        counter: &Arc<ImmCounter>,
        writes: NonZeroU64,
    ) -> Result<Following, CountError> {
        let flag = Arc::clone(self);
        let follower = Follower::start(counter, writes, self.value(), move |n| flag.set(n))?;
        Ok(Following { flag: Arc::clone(self), follower })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::counting::CODE_REACHED;
    use crate::{End, PeerId, TransferEngine};

    const LONG: Duration = Duration::from_secs(20);

    fn writes(number: u64) -> NonZeroU64 {
        NonZeroU64::new(number).unwrap()
    }

    /// Two engines that are connected: who writes, to whom, and whose counter it is.
    fn pair() -> (TransferEngine, PeerId, TransferEngine, Arc<ImmCounter>) {
        let engines = [(); 2].map(|()| TransferEngine::builder().build().unwrap());
        let [from, to] = engines;
        let counter = Arc::new(to.counter().unwrap());
        let peer = from.add_peer(to.address()).unwrap();
        (from, peer, to, counter)
    }

    fn send(from: &TransferEngine, peer: PeerId, to: &ImmCounter, count: u32) {
        for _ in 0..count {
            let sent = from.submit_imm(peer, to.tag(), 1).unwrap();
            assert!(matches!(sent.wait(LONG), Ok(End::Done)));
        }
    }

    fn until(there: impl Fn() -> bool) {
        let begun = Instant::now();
        while !there() {
            assert!(begun.elapsed() < LONG);
            std::thread::yield_now();
        }
    }

    /// Where steps are stored, each the one after that before.
    fn steps() -> (Arc<AtomicU64>, impl Fn(u64) + Send + Sync + 'static) {
        let last = Arc::new(AtomicU64::new(0));
        let stored = Arc::clone(&last);
        (last, move |n| assert_eq!(stored.swap(n, Ordering::AcqRel) + 1, n))
    }

    #[test]
    fn steps_are_stored_when_their_writes_are_there() {
        let (from, peer, to, counter) = pair();
        // Early ones count: two steps of three, and one write.
        send(&from, peer, &counter, 7);
        until(|| counter.available() == 7);
        let (last, store) = steps();
        let follower = Follower::start(&counter, writes(3), 0, store).unwrap();
        assert_eq!(last.load(Ordering::Acquire), 2);
        assert!(matches!(counter.wait(1, LONG), Err(CountError::Busy)));
        let (_, another) = steps();
        assert!(matches!(Follower::start(&counter, writes(1), 0, another), Err(CountError::Busy)));
        for step in 3..200 {
            send(&from, peer, &counter, 1);
            std::thread::yield_now();
            assert_eq!(last.load(Ordering::Acquire), step - 1);
            send(&from, peer, &counter, 2);
            until(|| last.load(Ordering::Acquire) == step);
        }
        // What is left over is there for the next.
        send(&from, peer, &counter, 1);
        follower.stop();
        follower.stop();
        assert!(follower.why().is_none());
        counter.wait(2, LONG).unwrap();
        drop(to);
    }

    /// Whenever it is stopped, each write is a step's, or is left.
    #[test]
    fn no_write_is_lost_or_used_twice_when_it_is_stopped() {
        let (from, peer, _to, counter) = pair();
        for round in 0..300_u32 {
            let (last, store) = steps();
            let follower = Follower::start(&counter, writes(2), 0, store).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| send(&from, peer, &counter, 9));
                (0..round * 7).for_each(|_| std::hint::spin_loop());
                follower.stop();
            });
            let stopped_at = last.load(Ordering::Acquire);
            let left = 9 - 2 * stopped_at;
            counter.wait(left, LONG).unwrap();
            assert_eq!((counter.available(), last.load(Ordering::Acquire)), (0, stopped_at));
        }
    }

    /// Who reached the count has taken the follower out of its place, and comes to telling it only after it was stopped.
    #[test]
    fn who_is_slow_to_tell_is_not_heard_after_the_stop() {
        let (from, peer, _to, counter) = pair();
        let (last, store) = steps();
        let follower = Follower::start(&counter, writes(1), 0, store).unwrap();
        let State::Waiting { ticket, .. } = *lock(&follower.state) else { panic!("it is over") };
        follower.stop();
        Arc::clone(&follower).ended(ticket, CODE_REACHED);
        assert_eq!(last.load(Ordering::Acquire), 0);
        send(&from, peer, &counter, 1);
        counter.wait(1, LONG).unwrap();
    }

    #[test]
    fn the_engines_end_ends_it() {
        let (_from, _, to, counter) = pair();
        let (_last, store) = steps();
        let follower = Follower::start(&counter, writes(1), 0, store).unwrap();
        assert!(follower.why().is_none());
        drop(to);
        until(|| follower.why().is_some());
        assert!(matches!(follower.why(), Some(CountError::EngineStopped)));
        let (_, another) = steps();
        assert!(matches!(
            Follower::start(&counter, writes(1), 0, another),
            Err(CountError::EngineStopped)
        ));
    }
}
