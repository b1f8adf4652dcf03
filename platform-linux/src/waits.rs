//! Futures of what an engine is waited for beside transfers and counts: a peer that comes up, and room for another transfer.
//!
//! They hold what handles and driver share, and not the engine: one that stops resolves them.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use immwire_core::id::PeerId;
use immwire_core::peer::PeerState;

use crate::error::PeerError;
use crate::shared::Shared;

/// Whether a peer in this state is up, or why it will not be; [`None`] while it may be.
pub(crate) fn is_up(peer: PeerId, state: Option<PeerState>) -> Option<Result<(), PeerError>> {
    match state {
        Some(PeerState::Up | PeerState::Suspect) => Some(Ok(())),
        Some(PeerState::Down(reason)) => Some(Err(PeerError::Down { peer, reason })),
        Some(PeerState::Connecting) => None,
        None => Some(Err(PeerError::Unknown { peer })),
    }
}

/// Resolves when a peer is up, or will not be. Made by [`TransferEngine::peer_up`](crate::TransferEngine::peer_up).
#[must_use = "futures do nothing unless polled"]
pub struct PeerUp {
    shared: Arc<Shared>,
    peer: PeerId,
    /// Of the waker that was left.
    id: Option<u64>,
}

impl PeerUp {
    pub(crate) const fn new(shared: Arc<Shared>, peer: PeerId) -> Self {
        Self { shared, peer, id: None }
    }
}

impl Future for PeerUp {
    type Output = Result<(), PeerError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { shared, peer, id } = &mut *self;
        let up = shared.peers.watch(*peer, |state| is_up(*peer, state), id, context.waker());
        up.map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for PeerUp {
    fn drop(&mut self) {
        self.shared.peers.forget(self.id);
    }
}

impl fmt::Debug for PeerUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerUp").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Resolves when another transfer can be submitted, or the engine has stopped. Made by
/// [`TransferEngine::capacity`](crate::TransferEngine::capacity).
#[must_use = "futures do nothing unless polled"]
pub struct Capacity {
    shared: Arc<Shared>,
    /// Of the waker that was left.
    id: Option<u64>,
}

impl Capacity {
    pub(crate) const fn new(shared: Arc<Shared>) -> Self {
        Self { shared, id: None }
    }
}

impl Future for Capacity {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Self { shared, id } = &mut *self;
        if shared.cells.watch_room(id, context.waker()) { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Capacity {
    fn drop(&mut self) {
        self.shared.cells.forget_room(self.id);
    }
}

impl fmt::Debug for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capacity").finish_non_exhaustive()
    }
}
