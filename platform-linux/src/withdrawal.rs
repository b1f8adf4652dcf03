//! The regions of one engine, and the taking back of what peers were allowed to do with them: for providers that
//! cannot see who is writing.
//!
//! Knows no device and no message. What a provider holds of its devices for a region is closed by being dropped; that
//! peers are told, and what they say, is the provider's to carry.
//!
//! # Taking back
//!
//! Each peer is told to stop, and says that it has (`Withdraw`, `Withdrawn`). A session that ended while its peer may
//! still have been writing leaves a *ghost*, until the provider has cut that off. [`Ledger`] is what the engine and the
//! threads that withdraw regions share.
//!
//! # Invariants
//!
//! - [`Regions::revoke`] returns `Ok` only when no session is left that has not said that it writes there no more, and
//!   no ghost, unless closing keeps ghosts out.
//! - What is held is dropped after that, outside the locks, and before the memory is given up.
//! - A session hears of each region that is being withdrawn, or finds it among those that are gone.
//! - A peer that takes a region of its own back is told once that we write there no more, when nothing is in flight there
//!   ([`Releasing`]).
//!
//! The tests below run all orders of what can happen.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

use immwire_core::id::PeerId;
use immwire_core::tenant::{LAST_SERIAL, SLOTS, Tenant};
use immwire_cuda::SharedMemory;
use rustix::event::EventfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::provider::{RegisterError, Registered, RevokeError};
use crate::sync::{Condvar, Mutex, MutexGuard, lock, sleep_locked};

/// Memory that we mapped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range; unmapped once, by its owner.
unsafe impl Send for Mapping {}

impl Mapping {
    pub(crate) fn new(len: usize) -> Result<Self, RegisterError> {
        if len == 0 {
            return Err(RegisterError::Empty);
        }
        let failed = |source| RegisterError::Os { call: "mmap", bytes: len, source };
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, flags) };
        let base = NonNull::new(base.map_err(|error| failed(error.into()))?.cast());
        let base = base.ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        Ok(Self { base, len })
    }

    pub(crate) const fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody uses it: what devices had of it was closed before.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Memory that we made for a region.
#[derive(Debug)]
pub(crate) enum Owned {
    Mapped { _mapping: Mapping },
    Gpu { _memory: SharedMemory },
}

/// The registration that a region is.
pub(crate) fn tenant_of(region: &Registered) -> Option<Tenant> {
    Tenant::new(u16::try_from(region.id).ok()?, region.desc.generation)
}

/// What is in a slot.
#[derive(Debug)]
pub(crate) struct Region<R> {
    /// What devices have of it, until it is closed.
    held: Option<R>,
    remote: bool,
    /// Goes last.
    owned: Option<Owned>,
}

impl<R> Region<R> {
    /// Whether its memory is a GPU's, and of our making.
    pub(crate) const fn owns_gpu_memory(&self) -> bool {
        matches!(self.owned, Some(Owned::Gpu { .. }))
    }
}

#[derive(Debug)]
struct Slot<R> {
    serial: u32,
    region: Option<Region<R>>,
}

/// The regions by slot; and what a provider guards by the same lock.
#[derive(Debug)]
pub(crate) struct Slots<R, C> {
    slots: Vec<Slot<R>>,
    free: Vec<u16>,
    pub(crate) common: C,
}

impl<R, C> Slots<R, C> {
    /// A slot, and the serial number of its next tenant.
    pub(crate) fn claim(&mut self) -> Result<Tenant, RegisterError> {
        let full = RegisterError::TableFull { capacity: SLOTS };
        if let Some(slot) = self.free.pop() {
            let serial = self.slots.get(usize::from(slot)).map_or(0, |slot| slot.serial);
            return Tenant::new(slot, serial).ok_or(full);
        }
        let slot = u16::try_from(self.slots.len()).ok();
        let tenant = slot.and_then(|slot| Tenant::new(slot, 1)).ok_or(full)?;
        self.slots.push(Slot { serial: 1, region: None });
        Ok(tenant)
    }

    /// There is a region in the slot that was claimed. One of which no device has anything is closed.
    pub(crate) fn put(
        &mut self,
        tenant: Tenant,
        held: Option<R>,
        remote: bool,
        owned: Option<Owned>,
    ) {
        if let Some(slot) = self.slot(tenant) {
            slot.region = Some(Region { held, remote, owned });
        }
    }

    /// Gives a slot back; one whose numbers are used up is not used again.
    pub(crate) fn unclaim(&mut self, tenant: Tenant) -> Option<Region<R>> {
        let slot = self.slot(tenant)?;
        let region = slot.region.take();
        slot.serial += 1;
        if slot.serial <= LAST_SERIAL {
            self.free.push(tenant.slot());
        }
        region
    }

    /// What is held for each region that is not closed, and whether peers may write there.
    pub(crate) fn held(&mut self) -> impl Iterator<Item = (&mut R, bool)> {
        let regions = self.slots.iter_mut().filter_map(|slot| slot.region.as_mut());
        regions.filter_map(|region| Some((region.held.as_mut()?, region.remote)))
    }

    fn slot(&mut self, tenant: Tenant) -> Option<&mut Slot<R>> {
        let slot = self.slots.get_mut(usize::from(tenant.slot()));
        slot.filter(|slot| slot.serial == tenant.serial())
    }

    /// Closes a region: what was held is the caller's to drop, outside the locks.
    fn close(&mut self, tenant: Tenant) -> Option<R> {
        self.slot(tenant)?.region.as_mut()?.held.take()
    }

    /// Whether peers may write to a region that is not closed.
    fn is_exposed(&mut self, tenant: Tenant) -> bool {
        let region = self.slot(tenant).and_then(|slot| slot.region.as_ref());
        region.is_some_and(|region| region.remote && region.held.is_some())
    }

    /// What is closed: of each slot the last, which goes for all before it. O(slots).
    fn gone(&self) -> Vec<Tenant> {
        let last = |(at, slot): (usize, &Slot<R>)| {
            let closed = slot.region.as_ref().is_some_and(|region| region.held.is_none());
            // One that is registered, or is about to be, is not; the one before it was.
            let serial = if closed { slot.serial } else { slot.serial.saturating_sub(1) };
            Tenant::new(u16::try_from(at).ok()?, serial)
        };
        self.slots.iter().enumerate().filter_map(last).collect()
    }
}

/// How far the taking back of one region is.
#[derive(Debug)]
struct Withdrawal {
    tenant: Tenant,
    /// Sessions that have not said that they are through with it, by token.
    waiting: Vec<(u64, PeerId)>,
    /// The engine has told them.
    told: bool,
}

/// What the engine and those who withdraw regions share. Sessions have tokens, each its own for good.
#[derive(Debug)]
pub(crate) struct Ledger {
    sessions: Vec<(u64, PeerId)>,
    /// Sessions that ended while their peers may still have been writing. None where closing fences.
    ghosts: Vec<(u64, PeerId)>,
    withdrawals: Vec<Withdrawal>,
    /// What could be written through is closed for good.
    stopped: bool,
    /// What is closed keeps everybody out, ghosts too.
    closing_fences: bool,
}

impl Ledger {
    /// A region is being withdrawn, by whoever asks for it first.
    fn withdraw(&mut self, tenant: Tenant) {
        if !self.withdrawals.iter().any(|it| it.tenant == tenant) {
            let waiting = self.sessions.clone();
            self.withdrawals.push(Withdrawal { tenant, waiting, told: false });
        }
    }

    /// It is not any more.
    fn forget(&mut self, tenant: Tenant) {
        self.withdrawals.retain(|it| it.tenant != tenant);
    }

    /// Who may still be writing to a region that is being withdrawn, if it is.
    fn writer(&self, tenant: Tenant) -> Option<PeerId> {
        let withdrawal = self.withdrawals.iter().find(|it| it.tenant == tenant)?;
        let mut writers = withdrawal.waiting.iter().chain(&self.ghosts);
        writers.next().map(|&(_, peer)| peer).filter(|_| !self.stopped)
    }

    /// Whether a withdrawal waits for a ghost.
    pub(crate) fn is_haunted(&self) -> bool {
        !self.ghosts.is_empty() && self.withdrawals.iter().any(|it| it.waiting.is_empty())
    }

    /// The ghosts there are, by the tokens of their sessions.
    pub(crate) fn ghosts(&self) -> Vec<u64> {
        self.ghosts.iter().map(|&(token, _)| token).collect()
    }

    /// Nothing of these ghosts' is under way any more. Whether they were any.
    pub(crate) fn lay(&mut self, tokens: &[u64]) -> bool {
        let before = self.ghosts.len();
        self.ghosts.retain(|(token, _)| !tokens.contains(token));
        self.ghosts.len() < before
    }

    /// A session has begun: it hears of what is being withdrawn, too.
    pub(crate) fn open(&mut self, token: u64, peer: PeerId) {
        self.sessions.push((token, peer));
        for withdrawal in &mut self.withdrawals {
            withdrawal.waiting.push((token, peer));
            withdrawal.told = false;
        }
    }

    /// A session has ended; quietly, if its peer has nothing under way.
    pub(crate) fn close(&mut self, token: u64, quiet: bool) {
        let ended = self.sessions.extract_if(.., |(other, _)| *other == token);
        let haunts = !quiet && !self.closing_fences;
        self.ghosts.extend(ended.filter(|_| haunts));
        for withdrawal in &mut self.withdrawals {
            withdrawal.waiting.retain(|&(other, _)| other != token);
        }
    }

    /// The session's peer writes to the region no more.
    pub(crate) fn withdrawn(&mut self, token: u64, tenant: Tenant) {
        for withdrawal in self.withdrawals.iter_mut().filter(|it| it.tenant == tenant) {
            withdrawal.waiting.retain(|&(other, _)| other != token);
        }
    }

    /// Adds what nobody was told of yet to what is to be said in each session, by token.
    pub(crate) fn tell<'a>(&mut self, sessions: impl Iterator<Item = (u64, &'a mut Vec<Tenant>)>) {
        if self.withdrawals.iter().all(|it| it.told) {
            return;
        }
        for (token, says) in sessions {
            for withdrawal in self.withdrawals.iter().filter(|it| !it.told) {
                let waits = withdrawal.waiting.iter().any(|&(other, _)| other == token);
                if waits && !says.contains(&withdrawal.tenant) {
                    says.push(withdrawal.tenant);
                }
            }
        }
        self.withdrawals.iter_mut().for_each(|it| it.told = true);
    }

    /// Nobody can write any more, ever.
    pub(crate) const fn stop(&mut self) {
        self.stopped = true;
    }
}

/// What one peer takes back of its regions, until nothing of ours is in flight there and it is told so.
#[derive(Debug, Default)]
pub(crate) struct Releasing(Vec<Tenant>);

impl Releasing {
    /// The peer takes a region back, for the first time or again. Returns whether that makes sense: nobody has more regions
    /// than [`SLOTS`], those included of which it is `yet_to_hear`.
    #[must_use]
    pub(crate) fn add(&mut self, tenant: Tenant, yet_to_hear: usize) -> bool {
        if self.0.contains(&tenant) {
            return true;
        }
        let fits = self.0.len().saturating_add(yet_to_hear) < SLOTS;
        if fits {
            self.0.push(tenant);
        }
        fits
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds those that nothing is in flight to, as `is_busy` has it, to what is to be said, and forgets them.
    pub(crate) fn release(
        &mut self,
        says: &mut Vec<Tenant>,
        mut is_busy: impl FnMut(Tenant) -> bool,
    ) {
        says.extend(self.0.extract_if(.., |tenant| !is_busy(*tenant)));
    }
}

/// The regions of one engine, for each of which a provider holds an `R`; and what else it guards by their lock.
#[derive(Debug)]
pub(crate) struct Regions<R, C = ()> {
    /// Taken after the ledger, if both are.
    table: Mutex<Slots<R, C>>,
    ledger: Mutex<Ledger>,
    changed: Condvar,
    wake: OwnedFd,
}

impl<R, C: Default> Regions<R, C> {
    /// `closing_fences`: what is dropped keeps everybody out, also those of sessions that have ended.
    pub(crate) fn new(closing_fences: bool) -> io::Result<Self> {
        let (sessions, ghosts, withdrawals) = (Vec::new(), Vec::new(), Vec::new());
        let ledger = Ledger { sessions, ghosts, withdrawals, stopped: false, closing_fences };
        Ok(Self {
            table: Mutex::new(Slots { slots: Vec::new(), free: Vec::new(), common: C::default() }),
            ledger: Mutex::new(ledger),
            changed: Condvar::new(),
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, Slots<R, C>> {
        lock(&self.table)
    }

    /// Becomes readable when the ledger has something for the engine.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Looks into the ledger, or notes there what lets nobody take a region back.
    pub(crate) fn look<T>(&self, f: impl FnOnce(&mut Ledger) -> T) -> T {
        f(&mut lock(&self.ledger))
    }

    /// Writes to the ledger; whoever waits for it looks again.
    pub(crate) fn with_ledger<T>(&self, f: impl FnOnce(&mut Ledger) -> T) -> T {
        let result = f(&mut lock(&self.ledger));
        self.changed.notify_all();
        result
    }

    /// A session begins: from now on it is told what is withdrawn. Returns what was.
    pub(crate) fn open(&self, token: u64, peer: PeerId) -> Vec<Tenant> {
        self.look(|ledger| ledger.open(token, peer));
        self.table().gone()
    }

    /// Takes a region back, as [`Memory::revoke`](crate::provider::Memory::revoke). The engine must be polled meanwhile,
    /// by its thread or its caller, unless there is no peer.
    pub(crate) fn revoke(&self, tenant: Tenant, patience: Duration) -> Result<(), RevokeError> {
        let is_exposed = self.table().is_exposed(tenant);
        let held = if is_exposed {
            self.wait_for_writers(tenant, patience)?
        } else {
            self.table().close(tenant)
        };
        // Outside the locks: a device takes its time.
        drop(held);
        Ok(())
    }

    /// Forgets a region that was taken back. What we mapped or allocated for it goes with what is returned, outside the locks.
    #[must_use]
    pub(crate) fn release(&self, tenant: Tenant) -> Option<Region<R>> {
        let held = self.table().close(tenant);
        // Outside the locks, and before the memory goes.
        drop(held);
        let region = self.table().unclaim(tenant);
        lock(&self.ledger).forget(tenant);
        region
    }

    /// Waits until no peer writes there; from then on the region is closed, but for what was held, which is returned
    /// to be dropped.
    fn wait_for_writers(
        &self,
        tenant: Tenant,
        patience: Duration,
    ) -> Result<Option<R>, RevokeError> {
        let deadline = Instant::now().checked_add(patience);
        let mut ledger = lock(&self.ledger);
        ledger.withdraw(tenant);
        loop {
            let Some(peer) = ledger.writer(tenant) else {
                // Under the lock: a session that begins later finds it among those that are gone.
                ledger.forget(tenant);
                return Ok(self.table().close(tenant));
            };
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(RevokeError { peer });
            }
            // Looked at again now and then: whoever polls the engine may need the wake-up more than once.
            let left = left.unwrap_or(Duration::MAX).min(Duration::from_millis(10));
            ledger = sleep_locked(&self.changed, ledger, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};
    use std::sync::{Arc, Weak};

    use super::*;

    /// Sessions and regions by number.
    #[derive(Debug, Clone, Copy)]
    enum Event {
        Open(usize),
        /// It ends, quietly or not.
        Close(usize, bool),
        Lay(usize),
        /// It says that it writes to the region no more. Nobody is believed who was not asked.
        Withdrawn(usize, usize),
        Tell,
        Stop,
        Claim,
        /// Peers may write there, or not.
        Put(usize, bool),
        Revoke(usize),
        Release(usize),
    }

    #[derive(Debug, Clone, PartialEq)]
    enum Session {
        Fresh,
        /// Regions that its peer writes to no more, and those that it was told of.
        Open {
            quit: Vec<Tenant>,
            told: Vec<Tenant>,
        },
        Ghost,
        Over,
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Life {
        Claimed,
        Own,
        Exposed,
        Withdrawing,
        Closed,
        Released,
    }

    /// What is tested, and beside it what is true.
    struct World {
        tested: Regions<()>,
        closing_fences: bool,
        stopped: bool,
        sessions: Vec<Session>,
        regions: Vec<(Tenant, Life)>,
        path: Vec<Event>,
    }

    impl Drop for World {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("closing fences: {}, {:?}", self.closing_fences, self.path);
            }
        }
    }

    const fn token_of(session: usize) -> u64 {
        session as u64 + 10
    }

    fn peer_of(session: usize) -> PeerId {
        PeerId { index: u16::try_from(session).unwrap(), generation: 1 }
    }

    impl World {
        /// What can happen now, if so many regions are made in all.
        fn events(&self, regions: usize) -> Vec<Event> {
            let mut events = vec![Event::Tell];
            let numbers = 0..self.regions.len();
            for (at, session) in self.sessions.iter().enumerate() {
                match session {
                    Session::Fresh if !self.stopped => events.push(Event::Open(at)),
                    Session::Open { .. } => {
                        events.extend([true, false].map(|quiet| Event::Close(at, quiet)));
                        events.extend(numbers.clone().map(|it| Event::Withdrawn(at, it)));
                    }
                    Session::Ghost => events.push(Event::Lay(at)),
                    Session::Fresh | Session::Over => {}
                }
            }
            for (at, (_, life)) in self.regions.iter().enumerate() {
                match life {
                    // Its registration may fail.
                    Life::Claimed => {
                        events.extend([true, false].map(|remote| Event::Put(at, remote)));
                        events.push(Event::Release(at));
                    }
                    Life::Own | Life::Exposed | Life::Withdrawing => events.push(Event::Revoke(at)),
                    Life::Closed => events.extend([Event::Revoke(at), Event::Release(at)]),
                    Life::Released => {}
                }
            }
            events.extend((!self.stopped).then_some(Event::Stop));
            events.extend((numbers.len() < regions).then_some(Event::Claim));
            events
        }

        fn withdrawing(&self) -> impl Iterator<Item = Tenant> {
            let all = self.regions.iter().filter(|(_, life)| *life == Life::Withdrawing);
            all.map(|(tenant, _)| *tenant)
        }

        /// Whether a session's peer, which is there, may write to a region.
        fn writes(&self, session: usize, tenant: Tenant) -> bool {
            matches!(&self.sessions[session], Session::Open { quit, .. } if !quit.contains(&tenant))
        }

        fn is_ghost(&self, session: usize) -> bool {
            self.sessions[session] == Session::Ghost && !self.closing_fences
        }

        /// Lets it happen, and looks whether what comes of it is true.
        fn happen(&mut self, event: Event) {
            self.path.push(event);
            let numbers = 0..self.sessions.len();
            match event {
                Event::Open(at) => {
                    let quit = self.tested.open(token_of(at), peer_of(at));
                    self.sessions[at] = Session::Open { quit, told: Vec::new() };
                }
                Event::Close(at, quiet) => {
                    self.tested.with_ledger(|ledger| ledger.close(token_of(at), quiet));
                    self.sessions[at] = if quiet { Session::Over } else { Session::Ghost };
                }
                Event::Lay(at) => {
                    let lay = || self.tested.with_ledger(|ledger| ledger.lay(&[token_of(at)]));
                    assert_eq!([lay(), lay()], [!self.closing_fences, false]);
                    self.sessions[at] = Session::Over;
                }
                Event::Withdrawn(at, region) => {
                    let (tenant, life) = self.regions[region];
                    self.tested.with_ledger(|ledger| ledger.withdrawn(token_of(at), tenant));
                    let counts = life == Life::Withdrawing && self.writes(at, tenant);
                    if let Session::Open { quit, .. } = &mut self.sessions[at] {
                        quit.extend(counts.then_some(tenant));
                    }
                }
                Event::Tell => {
                    let sessions = self.sessions.iter_mut().enumerate();
                    let says = sessions.filter_map(|(at, session)| match session {
                        Session::Open { told, .. } => Some((token_of(at), told)),
                        _ => None,
                    });
                    self.tested.with_ledger(|ledger| ledger.tell(says));
                    for tenant in self.withdrawing() {
                        let told = |at: usize| match &self.sessions[at] {
                            Session::Open { told, .. } => told.contains(&tenant),
                            _ => false,
                        };
                        assert!(numbers.clone().all(|at| !self.writes(at, tenant) || told(at)));
                    }
                }
                Event::Stop => {
                    self.tested.with_ledger(Ledger::stop);
                    self.stopped = true;
                }
                Event::Claim => {
                    let tenant = self.tested.table().claim().unwrap();
                    assert!(self.regions.iter().all(|(other, _)| *other != tenant));
                    self.regions.push((tenant, Life::Claimed));
                }
                Event::Put(at, remote) => {
                    let (tenant, life) = &mut self.regions[at];
                    self.tested.table().put(*tenant, Some(()), remote, None);
                    *life = if remote { Life::Exposed } else { Life::Own };
                }
                Event::Revoke(at) => {
                    let (tenant, life) = self.regions[at];
                    let exposed = matches!(life, Life::Exposed | Life::Withdrawing);
                    let may = |it: usize| self.writes(it, tenant) || self.is_ghost(it);
                    let writers = numbers.filter(|&it| exposed && !self.stopped && may(it));
                    let writers: Vec<_> = writers.map(peer_of).collect();
                    let named = self.tested.revoke(tenant, Duration::ZERO).err();
                    assert_eq!(named.is_some(), !writers.is_empty());
                    assert!(named.is_none_or(|error| writers.contains(&error.peer)));
                    // The engine is woken if it is to do something.
                    let woken = rustix::io::read(self.tested.wake_fd(), &mut [0; 8]);
                    assert_eq!(woken.is_ok(), named.is_some());
                    let now = if named.is_some() { Life::Withdrawing } else { Life::Closed };
                    self.regions[at].1 = now;
                }
                Event::Release(at) => {
                    drop(self.tested.release(self.regions[at].0));
                    self.regions[at].1 = Life::Released;
                }
            }
        }

        /// What is to hold at any time.
        fn check(&self) {
            let gone = self.tested.table().gone();
            for (tenant, life) in &self.regions {
                let mut last = gone.iter().filter(|last| last.slot() == tenant.slot());
                let is_gone = last.any(|last| last.serial() >= tenant.serial());
                assert_eq!(is_gone, matches!(life, Life::Closed | Life::Released));
            }
            let numbers = 0..self.sessions.len();
            let free = |tenant| !numbers.clone().any(|at| self.writes(at, tenant));
            let haunted = numbers.clone().any(|at| self.is_ghost(at));
            let haunted = haunted && self.withdrawing().any(free);
            assert_eq!(self.tested.with_ledger(|ledger| ledger.is_haunted()), haunted);
        }
    }

    /// Sees all states that so many sessions and regions can be in, each after the shortest way there.
    fn explore(sessions: usize, regions: usize, closing_fences: bool) -> usize {
        let (mut seen, mut paths) = (HashSet::new(), VecDeque::from([Vec::new()]));
        while let Some(path) = paths.pop_front() {
            let mut world = World {
                tested: Regions::new(closing_fences).unwrap(),
                closing_fences,
                stopped: false,
                sessions: vec![Session::Fresh; sessions],
                regions: Vec::new(),
                path: Vec::new(),
            };
            path.iter().for_each(|&event| world.happen(event));
            world.check();
            let World { tested, sessions, regions: made, .. } = &world;
            let state = format!("{:?}", (&*lock(&tested.ledger), &*tested.table(), sessions, made));
            if seen.insert(state) {
                let next = world.events(regions).into_iter();
                paths.extend(next.map(|event| [&path[..], &[event]].concat()));
            }
        }
        seen.len()
    }

    #[test]
    fn a_region_is_given_back_when_nobody_writes_there_and_not_before() {
        let mut states = 0;
        for (sessions, regions) in [(0, 3), (1, 2), (2, 1)] {
            states += explore(sessions, regions, true) + explore(sessions, regions, false);
        }
        states += explore(2, 2, false);
        assert!(states > 29_000, "{states}");
    }

    /// What a provider holds; sees when it is closed that nobody has the locks.
    struct Held(Weak<Regions<Self>>, Arc<Mutex<u32>>);

    impl Drop for Held {
        fn drop(&mut self) {
            let regions = self.0.upgrade().unwrap();
            assert!(regions.table.try_lock().is_ok() && regions.ledger.try_lock().is_ok());
            *lock(&self.1) += 1;
        }
    }

    #[test]
    fn what_is_held_is_closed_once_and_outside_the_locks() {
        let regions = Arc::new(Regions::new(false).unwrap());
        for (remote, revoked) in [(true, true), (false, true), (true, false), (false, false)] {
            let closed = Arc::default();
            let tenant = regions.table().claim().unwrap();
            let held = Held(Arc::downgrade(&regions), Arc::clone(&closed));
            regions.table().put(
                tenant,
                Some(held),
                remote,
                Some(Owned::Mapped { _mapping: Mapping::new(1).unwrap() }),
            );
            if revoked {
                regions.revoke(tenant, Duration::ZERO).unwrap();
                assert_eq!(*lock(&closed), 1);
            }
            drop(regions.release(tenant));
            assert_eq!(*lock(&closed), 1);
        }
    }

    /// Three regions, taken back in any order, some twice, while something is in flight to any of them: what is free is told
    /// once, and what is busy stays.
    #[test]
    fn what_is_taken_back_is_told_when_nothing_is_in_flight_there() {
        let tenant = |slot: usize| Tenant::new(u16::try_from(slot).unwrap(), 1).unwrap();
        for word in 0..(4_usize.pow(4) << 3) {
            let (busy, added) = (word & 0b111, word >> 3);
            let (mut releasing, mut says, mut expected) =
                (Releasing::default(), Vec::new(), Vec::new());
            for step in 0..4 {
                let slot = added / 4_usize.pow(step) % 4;
                if slot < 3 {
                    assert!(releasing.add(tenant(slot), says.len()));
                    if !expected.contains(&tenant(slot)) {
                        expected.push(tenant(slot));
                    }
                }
            }
            let is_busy = |it: Tenant| busy & 1 << it.slot() != 0;
            releasing.release(&mut says, is_busy);
            let (waiting, free): (Vec<_>, Vec<_>) =
                expected.into_iter().partition(|it| is_busy(*it));
            assert_eq!((&says, releasing.is_empty()), (&free, waiting.is_empty()));
            releasing.release(&mut says, |_| false);
            assert_eq!(says, [free, waiting].concat());
            assert!(releasing.is_empty());
        }
    }

    /// A peer that takes no answers, and goes on taking back what it never had.
    #[test]
    fn nobody_takes_back_more_than_there_can_be() {
        let (mut releasing, mut says) = (Releasing::default(), Vec::new());
        let all = (1..=3).flat_map(|serial| (0..SLOTS).map(move |slot| (slot, serial)));
        let tenants = all.map(|(slot, serial)| Tenant::new(slot.try_into().unwrap(), serial));
        let mut taken = 0;
        for tenant in tenants {
            taken += usize::from(releasing.add(tenant.unwrap(), says.len()));
            // Some are busy for a while.
            releasing.release(&mut says, |tenant| tenant.slot() % 512 == 0);
        }
        assert_eq!((taken, says.len() < SLOTS), (SLOTS, true));
        releasing.release(&mut says, |_| false);
        assert_eq!(says.len(), SLOTS);
    }

    #[test]
    fn slots_run_out_and_so_do_their_numbers() {
        let regions = Regions::<()>::new(false).unwrap();
        let mut table = regions.table();
        let all: Vec<_> = (0..SLOTS).map(|_| table.claim().unwrap()).collect();
        assert!(matches!(table.claim(), Err(RegisterError::TableFull { capacity: SLOTS })));
        table.unclaim(all[7]);
        assert_eq!(table.claim().unwrap(), Tenant::new(7, 2).unwrap());
        // Whoever has gone gives nothing back.
        assert!(table.unclaim(all[7]).is_none() && table.free.is_empty());
        table.slots[7].serial = LAST_SERIAL;
        let last = Tenant::new(7, LAST_SERIAL).unwrap();
        table.unclaim(last);
        assert!(table.claim().is_err());
        assert_eq!(table.gone(), [last]);
    }
}
