//! The provider of two: one for peers on this host, one for all others.
//!
//! A host's engines write to each other through shared memory, and between their GPUs over NVLink; to other hosts
//! they write over NICs. [`Span`] is one engine's provider for both, so that one transfer, one barrier and one counter
//! take in all of them. Which side leads to a peer is decided by the core ([`immwire_core::span`]), once, when the two
//! connect; this file passes on what each side says, with NICs as all of the engine numbers them.
//!
//! | part | what |
//! |---|---|
//! | `host` | what is the same for engines of one host |
//! | `memory` | regions that both sides know |
//!
//! # Invariants
//!
//! - A peer is one side's from its call on until it is disconnected. An engine that is known on one side is refused on the
//!   other.
//! - Each side is told of its own NICs and peers alone.
//! - A GPU's memory that the far side's NICs do not reach is registered with the near side alone: what is written from there
//!   to a far peer, or the other way round, is refused by the core, since it has no key.

mod host;
mod memory;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use immwire_core::group::{Token, WorkError, WorkRequest};
use immwire_core::id::{EngineId, MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::nic::NicState;
use immwire_core::peer::DownReason;
use immwire_core::plan::{Piece, RunLayout};
use immwire_core::span::{self, Host, Side, SpanError};
use immwire_core::wire::{Hello, NetAddr, ProviderKind, Refusal};
use rustix::event::epoll;
use rustix::io::Errno;

pub(crate) use self::host::find as find_host;
pub use self::memory::SpanMemory;
use crate::provider::{
    ConnectError, NicInfo, Path, Provider, Receipt, RemotePath, Sink, Unfenced, nic_states,
};

/// Pieces handed on at once.
const BATCH: usize = 32;
/// How long the far side is polled each time after something was given to it or heard of it,
const STIRRED_FOR: Duration = Duration::from_micros(50);
/// and how often then: software takes longer to look at a network than peers on this host take to answer.
const FAR_EVERY: Duration = Duration::from_micros(5);

/// Why there is no provider.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum SpanBuildError {
    /// The two sides make no engine.
    #[error("{0}")]
    Sides(#[source] SpanError),
    /// The kernel said no.
    #[error("{call}: {source}")]
    Os {
        /// What it was asked for.
        call: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

/// A peer of one side's.
#[derive(Debug, Clone, Copy)]
struct Tenant {
    peer: PeerId,
    engine: EngineId,
    side: Side,
}

/// Whose peers are whose.
#[derive(Debug, Default)]
struct Sides {
    /// By index of the peer.
    of: Vec<Option<Tenant>>,
    /// To be disconnected on that side: what it said on connecting makes no sense.
    stray: Vec<(PeerId, Side)>,
}

impl Sides {
    fn get(&self, peer: PeerId) -> Option<Side> {
        let tenant = self.of.get(usize::from(peer.index)).copied().flatten();
        tenant.filter(|tenant| tenant.peer == peer).map(|tenant| tenant.side)
    }

    /// Whether an engine is known on the other side than this. It is on one host as long as it lives.
    fn is_elsewhere(&self, engine: EngineId, side: Side) -> bool {
        self.of.iter().flatten().any(|tenant| tenant.engine == engine && tenant.side != side)
    }

    fn set(&mut self, tenant: Tenant) {
        let at = usize::from(tenant.peer.index);
        if self.of.len() <= at {
            self.of.resize(at + 1, None);
        }
        if let Some(of) = self.of.get_mut(at) {
            *of = Some(tenant);
        }
    }

    fn forget(&mut self, peer: PeerId) {
        let of = self.of.get_mut(usize::from(peer.index));
        if let Some(of) = of.filter(|of| of.is_some_and(|tenant| tenant.peer == peer)) {
            *of = None;
        }
    }
}

/// The provider. See the [module](self).
#[derive(Debug)]
pub struct Span<N: Provider, F: Provider> {
    near: N,
    far: F,
    kind: ProviderKind,
    nics: Vec<NicInfo>,
    address: NetAddr,
    memory: Arc<SpanMemory<N::Memory, F::Memory>>,
    sides: Sides,
    far_pace: Pace,
    /// Readable when one side's is.
    epoll: OwnedFd,
}

/// When the far side is polled.
#[derive(Debug)]
struct Pace {
    /// Something was given to it since it was polled.
    given: bool,
    /// Until then each time.
    stirred_until: Instant,
    /// Not before.
    next: Instant,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Self { given: false, stirred_until: now + STIRRED_FOR, next: now }
    }

    fn is_due(&self, now: Instant) -> bool {
        self.given || now >= self.next
    }

    /// It was polled, and something was heard or not.
    fn polled(&mut self, now: Instant, any: bool) {
        if std::mem::take(&mut self.given) || any {
            self.stirred_until = now + STIRRED_FOR;
        }
        self.next = if now < self.stirred_until { now } else { now + FAR_EVERY };
    }
}

impl<N: Provider, F: Provider> Span<N, F> {
    /// Joins two providers of the same engine. `host` is what its peers on this host have in common with it, and no
    /// others.
    ///
    /// # Errors
    ///
    /// [`SpanBuildError`].
    pub fn new(near: N, far: F, host: &Host) -> Result<Self, SpanBuildError> {
        let address = span::join(&near.address(), host, &far.address());
        let address = address.map_err(SpanBuildError::Sides)?;
        let failed = |call| move |errno: Errno| SpanBuildError::Os { call, source: errno.into() };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("epoll_create"))?;
        for fd in [near.fd(), far.fd()] {
            let data = epoll::EventData::new_u64(0);
            let added = epoll::add(&epoll, fd, data, epoll::EventFlags::IN);
            added.map_err(failed("epoll_ctl"))?;
        }
        Ok(Self {
            kind: address.provider(),
            nics: near.nics().iter().chain(far.nics()).cloned().collect(),
            memory: Arc::new(SpanMemory::new(
                Arc::clone(near.memory()),
                Arc::clone(far.memory()),
                address.clone(),
            )),
            sides: Sides::default(),
            far_pace: Pace::new(Instant::now()),
            address,
            near,
            far,
            epoll,
        })
    }

    /// Does something on one side, which reports to `sink` through us.
    fn on<S: Sink, T>(
        &mut self,
        side: Side,
        sink: &mut S,
        near: impl FnOnce(&mut N, &mut Through<'_, S>) -> T,
        far: impl FnOnce(&mut F, &mut Through<'_, S>) -> T,
    ) -> T {
        let mut through = Through { sink, side, kind: self.kind, sides: &mut self.sides };
        match side {
            Side::Near => near(&mut self.near, &mut through),
            Side::Far => {
                self.far_pace.given = true;
                far(&mut self.far, &mut through)
            }
        }
    }

    /// Drops what came to be on the wrong side.
    #[cold]
    fn drop_strays<S: Sink>(&mut self, sink: &mut S) {
        while let Some((peer, side)) = self.sides.stray.pop() {
            self.on(
                side,
                sink,
                |near, to| near.disconnect(peer, to),
                |far, to| far.disconnect(peer, to),
            );
        }
    }
}

impl<N: Provider, F: Provider> Provider for Span<N, F> {
    type Memory = SpanMemory<N::Memory, F::Memory>;

    fn nics(&self) -> &[NicInfo] {
        &self.nics
    }

    fn memory(&self) -> &Arc<Self::Memory> {
        &self.memory
    }

    fn address(&self) -> NetAddr {
        self.address.clone()
    }

    fn unreached(&self) -> [u8; MAX_NICS] {
        span::unreached()
    }

    fn nics_at(&self, address: &NetAddr) -> heapless::Vec<NicState, MAX_NICS> {
        match span::side(&self.address, address) {
            Some(side) => span::states(address, side),
            None => nic_states(address),
        }
    }

    fn reads_gpus(&self, peer: PeerId) -> bool {
        match self.sides.get(peer) {
            Some(Side::Near) => self.near.reads_gpus(peer),
            Some(Side::Far) => self.far.reads_gpus(peer),
            None => false,
        }
    }

    /// Over memory only: what goes by NICs is in flight when the call returns.
    const AT_ONCE_BYTES: u64 = N::AT_ONCE_BYTES;

    #[inline(always)]
    fn write_at_once(&mut self, nic: NicIndex, piece: &Piece) -> bool {
        // Its one NIC has the same number on either end, for it and for us.
        Side::Near.narrow(nic).is_some_and(|nic| self.near.write_at_once(nic, piece))
    }

    fn post<S: Sink>(&mut self, nic: NicIndex, work: &[WorkRequest], sink: &mut S) -> usize {
        let side = span::side_of(nic);
        let mut through = Through { sink, side, kind: self.kind, sides: &mut self.sides };
        let Some(nic) = side.narrow(nic) else { return 0 };
        if side == Side::Near {
            // Its one NIC has the same number on either end, for it and for us.
            return self.near.post(nic, work, &mut through);
        }
        self.far_pace.given = true;
        let mut accepted = 0;
        while let Some(next) = work.get(accepted..).and_then(<[_]>::first) {
            let narrowed = |work: &WorkRequest| {
                let remote_nic = side.narrow(work.remote_nic)?;
                Some(WorkRequest { nic, remote_nic, ..*work })
            };
            let rest = work.iter().skip(accepted).take(BATCH);
            let batch: heapless::Vec<WorkRequest, BATCH> = rest.map_while(narrowed).collect();
            if batch.is_empty() {
                // No path leads there: the core does not plan it.
                through.work_done(nic, next.token, Err(WorkError::RemoteAccess));
                accepted += 1;
                continue;
            }
            let taken = self.far.post(nic, &batch, &mut through);
            accepted += taken;
            if taken < batch.len() {
                break;
            }
        }
        accepted
    }

    fn poll<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool {
        let mut through =
            Through { sink, side: Side::Near, kind: self.kind, sides: &mut self.sides };
        let mut any = self.near.poll(now, &mut through);
        let time = Instant::now();
        if self.far_pace.is_due(time) {
            through.side = Side::Far;
            let far = self.far.poll(now, &mut through);
            self.far_pace.polled(time, far);
            any |= far;
        }
        if !self.sides.stray.is_empty() {
            self.drop_strays(sink);
        }
        any
    }

    fn connect(
        &mut self,
        now: Time,
        peer: PeerId,
        address: &NetAddr,
        hello: &Hello,
    ) -> Result<(), ConnectError> {
        let found = || address.provider().name().to_owned();
        let other = || ConnectError::OtherProvider { found: found(), expected: self.kind.name() };
        let side = span::side(&self.address, address).ok_or_else(other)?;
        let malformed = ConnectError::Malformed { what: "it has not the parts of its kind" };
        let narrowed = span::narrow(address, side).zip(span::narrow_hello(hello, side));
        let (address, hello) = narrowed.ok_or(malformed)?;
        match side {
            Side::Near => self.near.connect(now, peer, &address, &hello)?,
            Side::Far => {
                self.far_pace.given = true;
                self.far.connect(now, peer, &address, &hello)?;
            }
        }
        self.sides.set(Tenant { peer, engine: address.engine(), side });
        Ok(())
    }

    fn quiesce(&mut self) {
        self.near.quiesce();
        self.far.quiesce();
    }

    fn disconnect<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        if let Some(side) = self.sides.get(peer) {
            self.on(
                side,
                sink,
                |near, to| near.disconnect(peer, to),
                |far, to| far.disconnect(peer, to),
            );
            self.sides.forget(peer);
        }
    }

    fn abort<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        if let Some(side) = self.sides.get(peer) {
            self.on(side, sink, |near, to| near.abort(peer, to), |far, to| far.abort(peer, to));
        }
    }

    fn fence<S: Sink>(
        &mut self,
        peer: PeerId,
        path: RemotePath,
        sink: &mut S,
    ) -> Result<Receipt, Unfenced> {
        let side = self.sides.get(peer).ok_or(Unfenced::Unknown)?;
        let ends = side.narrow(path.from).zip(side.narrow(path.to));
        let (from, to) = ends.ok_or(Unfenced::Unknown)?;
        let path = RemotePath { from, to };
        self.on(
            side,
            sink,
            |near, to| near.fence(peer, path, to),
            |far, to| far.fence(peer, path, to),
        )
    }

    fn settle<S: Sink>(
        &mut self,
        peer: PeerId,
        path: Path,
        receipt: &Receipt,
        sink: &mut S,
    ) -> Result<(), Unfenced> {
        let side = self.sides.get(peer).ok_or(Unfenced::Unknown)?;
        let ends = side.narrow(path.nic).zip(side.narrow(path.remote_nic));
        let (nic, remote_nic) = ends.ok_or(Unfenced::Unknown)?;
        let path = Path { nic, remote_nic };
        self.on(
            side,
            sink,
            |near, to| near.settle(peer, path, receipt, to),
            |far, to| far.settle(peer, path, receipt, to),
        )
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn arm(&mut self) -> bool {
        if !self.near.arm() {
            return false;
        }
        let armed = self.far.arm();
        if !armed {
            self.near.disarm();
            self.far_pace.given = true;
        }
        armed
    }

    fn disarm(&mut self) {
        self.far_pace.given = true;
        self.near.disarm();
        self.far.disarm();
    }
}

/// What one side reports, as all of the engine numbers it.
struct Through<'a, S> {
    sink: &'a mut S,
    side: Side,
    kind: ProviderKind,
    sides: &'a mut Sides,
}

impl<S: Sink> Through<'_, S> {
    const fn path(&self, path: Path) -> Path {
        let Path { nic, remote_nic } = path;
        Path { nic: self.side.widen(nic), remote_nic: self.side.widen(remote_nic) }
    }

    const fn work(&self, work: &WorkRequest) -> WorkRequest {
        let (nic, remote_nic) = (self.side.widen(work.nic), self.side.widen(work.remote_nic));
        WorkRequest { nic, remote_nic, ..*work }
    }
}

impl<S: Sink> Sink for Through<'_, S> {
    #[inline]
    fn work_done(&mut self, nic: NicIndex, token: Token, outcome: Result<(), WorkError>) {
        self.sink.work_done(self.side.widen(nic), token, outcome);
    }

    #[inline]
    fn immediate(&mut self, nic: NicIndex, peer: PeerId, imm: u32) {
        self.sink.immediate(self.side.widen(nic), peer, imm);
    }

    fn incoming(&mut self, hello: &Hello) -> Result<(PeerId, Hello), Refusal> {
        let whole = span::widen_hello(self.kind, hello, self.side).ok_or(Refusal::Malformed)?;
        let (engine, side) = (hello.engine(), self.side);
        if self.sides.is_elsewhere(engine, side) {
            return Err(Refusal::Malformed);
        }
        let (peer, answer) = self.sink.incoming(&whole)?;
        self.sides.set(Tenant { peer, engine, side });
        // Our own hello has both sides.
        let answer = span::narrow_hello(&answer, self.side).ok_or(Refusal::Malformed)?;
        Ok((peer, answer))
    }

    fn connected(&mut self, peer: PeerId, hello: &Hello) {
        match span::widen_hello(self.kind, hello, self.side) {
            Some(whole) => self.sink.connected(peer, &whole),
            None => {
                self.sides.stray.push((peer, self.side));
                self.disconnected(peer, DownReason::Protocol);
            }
        }
    }

    fn disconnected(&mut self, peer: PeerId, reason: DownReason) {
        self.sides.forget(peer);
        self.sink.disconnected(peer, reason);
    }

    fn nic_changed(&mut self, nic: NicIndex, healthy: bool) {
        self.sink.nic_changed(self.side.widen(nic), healthy);
    }

    fn path_broken(&mut self, peer: PeerId, path: Path) {
        self.sink.path_broken(peer, self.path(path));
    }

    fn path_restored(&mut self, peer: PeerId, path: Path) {
        self.sink.path_restored(peer, self.path(path));
    }

    fn undelivered(&mut self, work: &WorkRequest) {
        self.sink.undelivered(&self.work(work));
    }

    #[inline]
    fn page_run(&self, work: &WorkRequest, src: &mut [u32], dst: &mut [u32]) -> Option<RunLayout> {
        self.sink.page_run(&self.work(work), src, dst)
    }

    #[inline]
    fn has_more(&self, nic: NicIndex) -> bool {
        self.sink.has_more(self.side.widen(nic))
    }
}
