//! One engine's end of the fabric: takes what the engine posts, hands over what has come for it.
//!
//! All is decided in `net`, under the fabric's lock; here the lock is given up before anything is
//! reported, since the engine registers memory while it is told things.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use immwire_core::group::{WorkError, WorkRequest};
use immwire_core::id::{NicIndex, PeerId, Time};
use immwire_core::peer::DownReason;
use immwire_core::wire::{Hello, NetAddr, ProviderKind, Refusal};

use super::Core;
use super::memory::SimMemory;
use super::net::{Net, Note, Said};
use super::places::Places;
use crate::provider::{ConnectError, NicInfo, Path, Provider, Receipt, RemotePath, Sink, Unfenced};
use crate::sync::lock;

/// What is reported in one poll at most.
const NOTES_PER_POLL: usize = 16;

/// The provider of one engine on a [`super::Fabric`].
#[derive(Debug)]
pub struct SimProvider {
    core: Arc<Core>,
    engine: u32,
    nics: Vec<NicInfo>,
    address: NetAddr,
    memory: Arc<SimMemory>,
    /// Never readable: nobody sleeps on a stepped clock. The fabric's engines share it.
    fd: Arc<OwnedFd>,
}

impl SimProvider {
    pub(super) fn new(
        core: Arc<Core>,
        engine: u32,
        nics: Vec<NicInfo>,
        address: NetAddr,
        fd: Arc<OwnedFd>,
    ) -> Self {
        let id = address.engine();
        let memory = Arc::new(SimMemory::new(Arc::clone(&core), engine, id, nics.len()));
        Self { core, engine, nics, address, memory, fd }
    }

    fn with<R>(&self, run: impl FnOnce(&mut Net) -> R) -> R {
        run(&mut lock(&self.core.net))
    }

    fn tell<S: Sink>(&self, said: Said, sink: &mut S) {
        match said {
            Said::Done { nic, token, outcome } => sink.work_done(nic, token, outcome),
            Said::Undelivered { work } => sink.undelivered(&work),
            Said::Immediate { nic, peer, imm } => sink.immediate(nic, peer, imm),
            Said::Called { conn, hello } => {
                let answer = sink.incoming(&hello);
                self.with(|net| net.answer(self.engine, conn, answer));
            }
            Said::Connected { peer, hello } => sink.connected(peer, &hello),
            Said::Disconnected { peer, reason } => sink.disconnected(peer, reason),
            Said::Nic { nic, healthy } => sink.nic_changed(nic, healthy),
            Said::PathBroken { peer, path } => sink.path_broken(peer, path),
            Said::PathRestored { peer, path } => sink.path_restored(peer, path),
        }
    }
}

impl Provider for SimProvider {
    type Memory = SimMemory;

    fn nics(&self) -> &[NicInfo] {
        &self.nics
    }

    fn memory(&self) -> &Arc<SimMemory> {
        &self.memory
    }

    fn address(&self) -> NetAddr {
        self.address.clone()
    }

    fn post<S: Sink>(&mut self, nic: NicIndex, work: &[WorkRequest], sink: &mut S) -> usize {
        // Where pages lie is read from the engine's own lists, without any lock.
        self.with(|net| net.post(self.engine, nic, work, |work| Places::of(work, sink)))
    }

    /// Hands over a few of the things that have happened by the fabric's clock, whatever `now` is.
    fn poll<S: Sink>(&mut self, _now: Time, sink: &mut S) -> bool {
        let mut any = false;
        let mut budget = NOTES_PER_POLL;
        while let Some(said) = self.with(|net| net.next_said(self.engine, &mut budget)) {
            any = true;
            self.tell(said, sink);
        }
        any
    }

    fn connect(
        &mut self,
        _now: Time,
        peer: PeerId,
        address: &NetAddr,
        hello: &Hello,
    ) -> Result<(), ConnectError> {
        let kind = ProviderKind::Sim;
        if address.provider() != kind {
            let found = address.provider().name().to_owned();
            return Err(ConnectError::OtherProvider { found, expected: kind.name() });
        }
        if address.engine() == self.address.engine() {
            return Err(ConnectError::Myself);
        }
        self.with(|net| net.call(self.engine, peer, address, hello))
    }

    fn disconnect<S: Sink>(&mut self, peer: PeerId, sink: &mut S) {
        for said in self.with(|net| net.disconnect(self.engine, peer, WorkError::Flushed)) {
            self.tell(said, sink);
        }
    }

    fn abort<S: Sink>(&mut self, peer: PeerId, _sink: &mut S) {
        self.with(|net| net.abort(self.engine, peer));
    }

    fn fence<S: Sink>(
        &mut self,
        peer: PeerId,
        path: RemotePath,
        sink: &mut S,
    ) -> Result<Receipt, Unfenced> {
        let (said, receipt) = self.with(|net| net.fence(self.engine, peer, path))?;
        for said in said {
            self.tell(said, sink);
        }
        Ok(receipt)
    }

    fn settle<S: Sink>(
        &mut self,
        peer: PeerId,
        path: Path,
        receipt: &Receipt,
        sink: &mut S,
    ) -> Result<(), Unfenced> {
        let said = self.with(|net| net.settle(self.engine, peer, path, receipt))?;
        for said in said {
            self.tell(said, sink);
        }
        Ok(())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn arm(&mut self) -> bool {
        self.with(|net| net.is_idle(self.engine))
    }

    fn disarm(&mut self) {}
}

impl Drop for SimProvider {
    fn drop(&mut self) {
        self.with(|net| net.leave(self.engine));
    }
}

impl Note {
    /// The engine's answer to a call, as it travels.
    pub(super) fn answer(conn: u32, answer: Result<Hello, Refusal>) -> Self {
        match answer {
            Ok(hello) => Self::Answer { conn, hello: Box::new(hello) },
            Err(why) => Self::Refused { conn, why },
        }
    }

    pub(super) const fn lost(conn: u32, reason: DownReason) -> Self {
        Self::Lost { conn, reason }
    }
}
