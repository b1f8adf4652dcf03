//! What the peer of a session says, and what it is told: over whichever line is whole (`immwire_core::courier`).
//!
//! # Invariants
//!
//! - What makes no sense ends the session.
//! - That nothing is written to a region any more is said when nothing is in flight there.

use immwire_core::courier::Letter;
use immwire_core::id::NicIndex;
use immwire_core::life::{Notice, Says};
use immwire_core::note::{Note, Passage};
use immwire_core::peer::DownReason;
use immwire_core::tenant::Tenant;

use super::lane::Done;
use super::session::{Outlet, Session};
use super::{NOTES, VerbsProvider, tag_of};

impl VerbsProvider {
    /// A letter of a session's has come over the line of this NIC; `None` if what has come is none.
    pub(super) fn hear_letter(&mut self, index: u16, nic: NicIndex, letter: Option<Letter>) {
        self.urgent = true;
        let now = self.now;
        let Some(session) = self.session(index) else { return };
        session.life.hear();
        session.pulse.hear(nic);
        let line = session.lines.get_mut(usize::from(nic));
        if line.is_some_and(|line| line.state.hear()) {
            session.courier.open_line(nic);
        }
        match letter.map(|letter| session.courier.hear(&letter)) {
            Some(Ok(Some(note))) => self.hear_note(index, note),
            Some(Ok(None)) => {}
            Some(Err(_)) | None => {
                session.life.leave(now, Notice::Told, Some(DownReason::Protocol));
                self.stats.ignored += 1;
            }
        }
    }

    /// What a peer says in its session. What makes no sense ends it.
    fn hear_note(&mut self, index: u16, note: Note) {
        let now = self.now;
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let Some(session) = session else { return };
        let understood = match note {
            Note::Ready => Some(()),
            Note::Bye => {
                session.life.leave(now, Notice::Told, Some(DownReason::Disconnected));
                Some(())
            }
            Note::Taken { nic, count } => {
                let allowance = session.allowances.get_mut(usize::from(nic));
                allowance.and_then(|allowance| allowance.report(count).ok())
            }
            Note::Withdraw(tenant) => {
                session.withdrawn.withdraw(tenant);
                let yet_to_hear = session.says.withdrawn.len();
                session.releasing.add(tenant, yet_to_hear).then_some(())
            }
            Note::Withdrawn(tenant) => {
                let token = session.token;
                self.memory.regions.with_ledger(|ledger| ledger.withdrawn(token, tenant));
                Some(())
            }
            Note::Connect(passage, theirs) => self.asked(index, passage, theirs),
            Note::Connected(passage, theirs) => self.answered(index, passage, theirs),
            Note::Declined(passage) => self.declined(index, passage),
            Note::Link(Passage { from, to, epoch }, queue) => {
                let line = session.lines.get_mut(usize::from(from)).filter(|_| from == to);
                line.is_some_and(|line| line.state.asked(epoch, queue)).then_some(())
            }
            Note::Linked(Passage { from, epoch, .. }, queue) => {
                let line = session.lines.get_mut(usize::from(from));
                line.is_some_and(|line| line.state.answered(epoch, queue)).then_some(())
            }
            Note::Back { nic } => {
                if let Some(port) = session.ports.get(usize::from(nic)) {
                    self.resolver.forget_port(port);
                }
                session.hurry(now, None, Some(nic));
                Some(())
            }
        };
        // Whoever never takes the answers asks in vain.
        let is_flooded = self.session(index).is_some_and(|session| session.says.is_flooded());
        if understood.is_none() || is_flooded {
            self.stats.ignored += 1;
            if let Some(session) = self.session(index) {
                session.life.leave(now, Notice::Told, Some(DownReason::Protocol));
            }
        }
    }

    /// Confirms withdrawals to whose regions nothing is in flight any more.
    pub(super) fn release(&mut self, index: u16) {
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let Some(Session { releasing, says, outlets, .. }) = session else { return };
        let lanes = &mut self.lanes;
        releasing.release(&mut says.withdrawn, |tenant| {
            outlets.iter().flat_map(Outlet::lanes).any(|lane| {
                let flights = lanes.get(lane).map(|lane| lane.flights.iter());
                flights.into_iter().flatten().any(|work| {
                    let other = Tenant::of(work.dst_key).filter(|_| work.len > 0);
                    other.is_some_and(|it| tenant.covers(it))
                })
            })
        });
    }

    /// Says what is to be said, and posts letters, as far as there is room.
    pub(super) fn speak(&mut self, index: u16) {
        let Some(session) = self.session(index) else { return };
        match session.life.says() {
            Says::Nothing => return,
            Says::Bye => {
                if !std::mem::replace(&mut session.says.bye, true) {
                    session.courier.say_last(Note::Bye);
                }
            }
            Says::All => session.say_all(),
        }
        while let Some(broken) = self.post_letters(index) {
            self.break_line(index, broken);
        }
    }

    /// Posts letters; a line on which one could not be posted.
    fn post_letters(&mut self, index: u16) -> Option<NicIndex> {
        let session = self.sessions.get_mut(usize::from(index))?.as_deref_mut()?;
        let id = Done::Note { session: index, token: tag_of(session.token) }.encode();
        while let Some((nic, letter)) = session.courier.next() {
            let line = session.lines.get_mut(usize::from(nic))?;
            // While its port is down it waits, if there is no other.
            if line.state.posted() >= NOTES || !self.ports.get(usize::from(nic))?.is_usable() {
                return None;
            }
            let (bytes, len) = letter.encode();
            let bytes = bytes.get(..len)?;
            if line.pair.as_ref()?.send_inline(id, bytes).is_err() {
                return (!session.is_leaving()).then_some(nic);
            }
            line.state.post();
            session.courier.post();
        }
        None
    }
}
