//! Queue pairs for notes: cut, and made anew, at both ends. What is next is `immwire_core::line`'s to say.
//!
//! # Invariants
//!
//! - A line is made anew when all that was posted on it before has completed: so no queue overruns by it.
//! - Without a line the session is over.

use immwire_core::id::NicIndex;
use immwire_core::life::Notice;
use immwire_core::line;
use immwire_core::note::Passage;
use immwire_core::peer::DownReason;
use immwire_core::port::Queue;
use immwire_core::resolve::Reach;

use super::device::QueuePair;
use super::endings::must;
use super::lane::{Done, Owner, Role};
use super::upkeep::{bit, nic_at};
use super::{Nic, VerbsProvider, tag_of};
use crate::provider::Sink;

impl VerbsProvider {
    /// The line of this NIC does not work: it is cut. Notes go over another; without one the session is over.
    pub(super) fn break_line(&mut self, index: u16, nic: NicIndex) {
        let now = self.now;
        self.urgent = true;
        let Some(session) = self.session(index).filter(|session| !session.is_leaving()) else {
            return;
        };
        let Some(line) = session.lines.get_mut(usize::from(nic)) else { return };
        if line.state.fail(now) {
            line.pair.iter().for_each(|pair| must(pair.cut()));
        }
        if !session.courier.is_open(nic) {
            return;
        }
        tracing::warn!(peer = %session.peer, nic, "a line broke");
        // What stands still on paths of this NIC is broken, too, and it may be that the line is whole again in a moment, for this end alone: the
        // other may hear nothing that we say. So that is seen now.
        session.pulse.doubt(now);
        if !session.courier.break_line(nic) {
            session.life.leave(now, Notice::Untold, Some(DownReason::Disconnected));
        }
    }

    /// Something has got through on the line of this NIC.
    pub(super) fn prove_line(&mut self, index: u16, nic: NicIndex) {
        let now = self.now;
        let usable = self.ports.get(usize::from(nic)).is_some_and(Nic::is_usable);
        let Some(session) = self.session(index).filter(|session| !session.is_leaving()) else {
            return;
        };
        session.pulse.hear(nic);
        if usable {
            session.courier.doubt(bit(nic), false);
        }
        let line = session.lines.get_mut(usize::from(nic));
        if line.is_some_and(|line| line.state.prove(now)) {
            tracing::info!(peer = %session.peer, nic, "a line is back");
            session.courier.open_line(nic);
        }
    }

    /// Has lines made anew that have rested, or that the peer asks for.
    pub(super) fn open_lines<S: Sink>(&mut self, index: u16, sink: &mut S) {
        let lines = self.session(index).map_or(0, |session| session.lines.len());
        for at in 0..lines {
            while self.mend_line(index, nic_at(at), sink) {}
        }
    }

    /// Does what is next for a line; whether there may be more.
    fn mend_line<S: Sink>(&mut self, index: u16, nic: NicIndex, sink: &mut S) -> bool {
        let (now, at) = (self.now, usize::from(nic));
        let usable = self.ports.get(at).is_some_and(Nic::is_usable);
        let session = self.session(index).filter(|it| it.life.is_open());
        let line = session.and_then(|session| session.lines.get(at));
        let waits = line.is_some_and(|line| line.state.needs_address())
            && self.reach(index, nic, nic) == Reach::Waits;
        let Some(session) = self.session(index).filter(|it| it.life.is_open()) else {
            return false;
        };
        let is_whole = session.courier.is_open(nic);
        let Some(line) = session.lines.get_mut(at) else { return false };
        match line.state.next(now, usable, is_whole, !waits) {
            line::Step::Nothing => false,
            line::Step::Open { epoch } => {
                let made = self.line_pair(index, at, None, sink);
                match self.session(index).zip(made.ok()) {
                    Some((session, queue)) => {
                        session.says.link.push((Passage { from: nic, to: nic, epoch }, queue));
                    }
                    None => self.break_line(index, nic),
                }
                false
            }
            line::Step::Try(theirs) => {
                if self.try_line(index, nic, theirs).is_none() {
                    self.break_line(index, nic);
                }
                false
            }
            line::Step::Cut => {
                self.break_line(index, nic);
                true
            }
            line::Step::Answer { epoch, theirs } => {
                let made =
                    theirs.ok_or(()).and_then(|it| self.line_pair(index, at, Some(it), sink));
                if made.is_err() {
                    self.break_line(index, nic);
                }
                if let Some(session) = self.session(index) {
                    let passage = Passage { from: nic, to: nic, epoch };
                    session.says.linked.push((passage, made.unwrap_or_default()));
                }
                false
            }
        }
    }

    fn set_owner(&mut self, at: usize, pair: &QueuePair, owner: Option<Owner>) {
        if let Some(port) = self.ports.get_mut(at) {
            port.owners.set(pair.number(), owner);
        }
    }

    /// Makes our end of a line anew, connected if the other is given.
    fn line_pair<S: Sink>(
        &mut self,
        index: u16,
        at: usize,
        theirs: Option<Queue>,
        sink: &mut S,
    ) -> Result<Queue, ()> {
        let line = self.session(index).and_then(|session| session.lines.get_mut(at));
        let line = line.ok_or(())?;
        let (state, is_drained) = (line.state, line.is_drained);
        if let Some(old) = line.pair.take() {
            must(old.cut());
            let role = Role::OldLine { is_drained };
            self.set_owner(at, &old, Some(Owner { session: index, role }));
            self.drain(at, &[old.number()], sink);
            self.set_owner(at, &old, None);
            // The port may have gone down meanwhile: then so has this attempt.
            let is_usable = self.ports.get(at).is_some_and(Nic::is_usable);
            let line = self.session(index).and_then(|session| session.lines.get(at));
            line.filter(|line| line.state == state && is_usable).ok_or(())?;
        }
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let (session, port) = session.zip(self.ports.get_mut(at)).ok_or(())?;
        let line = session.lines.get_mut(at).ok_or(())?;
        let there = session.ports.get(at).ok_or(())?;
        let pair = port.line(index).and_then(|pair| {
            if let Some(theirs) = theirs {
                self.resolver.connect(self.now, (at, &pair), (there, theirs))?;
            }
            Ok(pair)
        });
        let pair = pair.map_err(|error| {
            tracing::warn!(peer = %session.peer, at, %error, "a line could not be opened");
        })?;
        port.owners.set(pair.number(), Some(Owner { session: index, role: Role::Line }));
        // One that is not connected has taken nothing, and no device says so of it.
        line.is_drained = theirs.is_none();
        let queue = pair.queue();
        line.pair = Some(pair);
        Ok(queue)
    }

    /// The other end of a line receives: a word is sent over ours. `None` if that cannot be.
    fn try_line(&mut self, index: u16, nic: NicIndex, theirs: Queue) -> Option<()> {
        let at = usize::from(nic);
        let session = self.sessions.get_mut(usize::from(index))?.as_deref_mut()?;
        let there = session.ports.get(at)?;
        let id = Done::Note { session: index, token: tag_of(session.token) }.encode();
        let (word, len) = session.courier.word().encode();
        let line = session.lines.get_mut(at)?;
        let pair = line.pair.as_ref().filter(|_| theirs.is_some())?;
        line.is_drained = false;
        self.resolver.connect(self.now, (at, pair), (there, theirs)).ok()?;
        pair.send_inline(id, word.get(..len)?).ok()?;
        line.state.post();
        Some(())
    }
}
