//! What is to be done beside the way of data, in its turn: hearing the devices and the door, and seeing to each session.
//!
//! How each is done, the files beside this one say: `nics`, `notes`, `paths`, `lines`, `endings`. When it is to be, the
//! core.

use immwire_core::datagram::Message;
use immwire_core::id::{NicIndex, PeerId, Time};
use immwire_core::life::Greet;
use immwire_core::port::PACKET_MAX;
use immwire_core::pulse::standstill;
use immwire_core::resolve::Asker;
use immwire_core::tenant::device_key;

use super::door::{Heard, Sent};
use super::handshake::Hearing;
use super::lane::Done;
use super::session::Session;
use super::{Nic, SAID_EVERY, Tiding, UPKEEP_EVERY, VerbsProvider, VerbsStats, tag_of};
use crate::provider::Sink;

/// Messages heard in one go.
const MESSAGES_MAX: usize = 64;

/// A NIC's bit.
pub(super) fn bit(nic: NicIndex) -> u8 {
    1_u8.unbounded_shl(nic.into())
}

/// The number of what is at this place in a table by NIC.
pub(super) fn nic_at(at: usize) -> NicIndex {
    NicIndex::try_from(at).unwrap_or(NicIndex::MAX)
}

impl VerbsProvider {
    /// Everything that is not on the way of data. Returns whether there was anything.
    #[cold]
    pub(super) fn upkeep<S: Sink>(&mut self, sink: &mut S) -> bool {
        self.urgent = false;
        let woken = std::mem::take(&mut self.woken);
        if woken {
            let mut word = [0; 8];
            // Empty is as good: they only wake.
            let _ = rustix::io::read(self.memory.regions.wake_fd(), &mut word);
            let _ = rustix::io::read(&self.timer, &mut word);
            self.resolver.disarm();
        }
        let due = self.now.since(self.tended) >= UPKEEP_EVERY;
        if due {
            self.tended = self.now;
        }
        let session = |index: &u16| self.sessions.get(usize::from(*index))?.as_deref();
        if due || woken || self.live.iter().filter_map(session).any(Session::is_leaving) {
            self.hear_devices(sink);
        }
        let heard = self.hear_doors(sink);
        self.say_stats();
        if self.resolver.take(self.now) {
            self.resume(sink);
        }
        self.repeat_calls(sink);
        self.tell_withdrawals();
        self.tell(sink);
        self.tend(sink);
        self.tell(sink);
        heard
    }

    /// Says, now and then, that there is more than before which was not to be believed, or was for nobody.
    fn say_stats(&mut self) {
        let (said, at) = self.said;
        if self.stats == said || self.now.since(at) < SAID_EVERY {
            return;
        }
        let VerbsStats { ignored, refused, strays } = self.stats;
        tracing::debug!(ignored, refused, strays, "messages that led to nothing, since the start");
        self.said = (self.stats, self.now);
    }

    /// Tells what has become of NICs and paths.
    pub(super) fn tell<S: Sink>(&mut self, sink: &mut S) {
        for tiding in std::mem::take(&mut self.tidings) {
            match tiding {
                Tiding::Broken(peer, path) if self.is_staying(peer) => sink.path_broken(peer, path),
                Tiding::Restored(peer, path) if self.is_staying(peer) => {
                    sink.path_restored(peer, path);
                }
                Tiding::Broken(..) | Tiding::Restored(..) => {}
                Tiding::Nic(nic, healthy) => sink.nic_changed(nic, healthy),
            }
        }
    }

    fn is_staying(&mut self, peer: PeerId) -> bool {
        let session = self.seat(peer).and_then(|index| self.session(index));
        session.is_some_and(|session| !session.is_leaving())
    }

    fn hear_doors<S: Sink>(&mut self, sink: &mut S) -> bool {
        let mut bytes = [0; PACKET_MAX];
        for round in 0..MESSAGES_MAX {
            match self.doors.read(&mut bytes) {
                None => return round > 0,
                Some(Heard::Message { len, from }) => {
                    let bytes = bytes.get(..len).unwrap_or(&[]);
                    if self.hear_packet(bytes, &from, sink) == Some(Hearing::Later) {
                        self.handshakes.put_off(self.now, bytes, from);
                    }
                }
                Some(Heard::Mended { nic }) => {
                    tracing::warn!(nic, "a door was in error, and is open again");
                    // It may be that an address by which it sent is not what it was.
                    self.resolver.forget_nic(nic);
                }
                Some(Heard::Broken { nic }) => {
                    tracing::error!(nic, "a device has failed: nobody new is heard there");
                    self.lose_nic(nic_at(nic));
                }
            }
        }
        self.urgent = true;
        true
    }

    /// Tells peers which regions they are not to write to any more.
    fn tell_withdrawals(&mut self) {
        let sessions = self.sessions.iter_mut().flatten();
        let says = sessions.map(|it| (it.token, &mut it.says.withdraw));
        self.memory.regions.look(|ledger| ledger.tell(says));
    }

    /// Does what is due, and ends what can end.
    pub(super) fn tend<S: Sink>(&mut self, sink: &mut S) {
        let mut at = 0;
        // Not an iterator: a session that ends leaves the list.
        while let Some(&index) = self.live.get(at) {
            self.release(index);
            self.connect_paths(index, sink);
            self.open_lines(index, sink);
            self.open_outlets(index);
            self.greet(index, sink);
            self.speak(index);
            self.probe(index, sink);
            if self.part_with(index) {
                self.finish(index, sink);
            } else {
                at += 1;
            }
        }
    }

    /// Repeats our answer to whoever has called, until it is heard.
    fn greet<S: Sink>(&mut self, index: u16, sink: &mut S) {
        let now = self.now;
        let Some(session) =
            self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut)
        else {
            return;
        };
        match session.life.greet(now, session.says.accept) {
            Greet::Nothing => {}
            Greet::Say => {
                let (nonce, proof) = (session.nonce, session.accept_proof);
                let message = Message::Accept { nonce, proof, claim: &session.accept };
                // If there is no room, it is repeated.
                let to = (session.through, &session.door, Asker::Heard);
                let sent = self.doors.send(&mut self.resolver, to, &message, now);
                session.says.accept = sent == Sent::Waits;
            }
            Greet::Overdue => {
                for at in 0..self.ports.len() {
                    self.poll_nic(at, self.last_rounds, sink);
                }
                if let Some(session) = self.session(index) {
                    session.life.miss(now);
                }
            }
        }
    }

    /// Sees whether a peer's devices answer, if nothing else has shown it since the last time; and whether what is under way
    /// goes on.
    pub(super) fn probe<S: Sink>(&mut self, index: u16, sink: &mut S) {
        let (now, patience) = (self.now, self.patience);
        let open = self.session(index).filter(|session| session.life.is_open());
        if open.is_none_or(|session| now < session.pulse.due()) {
            return;
        }
        // What has completed does not lie there unread, as after a pause it may: it would be taken for stuck.
        for at in 0..self.ports.len() {
            self.poll_nic(at, self.last_rounds, sink);
        }
        let session = self.sessions.get_mut(usize::from(index)).and_then(Option::as_deref_mut);
        let Some(session) = session.filter(|session| session.life.is_open()) else { return };
        let Some(silent) = session.pulse.look(now) else { return };
        let id = Done::Note { session: index, token: tag_of(session.token) }.encode();
        let (to, keys) = (session.mailbox.base, session.mailbox.keys);
        let mut broken = 0;
        for ((nic, line), port) in (0..).zip(&mut session.lines).zip(&self.ports) {
            let open = silent & bit(nic) != 0
                && session.courier.is_open(nic)
                && port.is_usable()
                && line.state.posted() == 0;
            if let Some(pair) = line.pair.as_ref().filter(|_| open) {
                let key = keys.get(nic).map_or(0, device_key);
                if pair.probe(id, to, key).is_ok() {
                    line.state.post();
                } else {
                    broken |= bit(nic);
                }
            }
            // What a lost device was given may never be read.
            let waits = line.state.posted() > 0 && !port.health.is_lost();
            let stuck = line.watch.look(now, line.completed, waits, patience);
            if stuck <= now {
                tracing::warn!(peer = %session.peer, nic, "nothing gets through on a line");
                broken |= bit(nic);
            } else {
                session.pulse.expect(stuck);
            }
        }
        for nic in (0..8).filter(|&nic| broken & bit(nic) != 0) {
            self.break_line(index, nic);
        }
        self.break_stuck(index);
    }

    /// Breaks paths that stand still for too long.
    fn break_stuck(&mut self, index: u16) {
        let now = self.now;
        let outlets = self.session(index).map_or(0, |session| session.outlets.len());
        for at in 0..outlets {
            let Some(session) = self.session(index).filter(|it| it.life.is_open()) else { return };
            let theirs = session.ports.len().max(1);
            let (nic, remote) = (at / theirs, at % theirs);
            let whole =
                |it: usize| session.lines.get(it).map(|_| session.courier.is_open(nic_at(it)));
            let lines = [whole(nic), whole(remote)];
            let Some(outlet) = session.outlets.get(at).copied() else { return };
            let Some(port) = self.ports.get(nic).filter(|port| !port.health.is_lost()) else {
                continue;
            };
            let limit = standstill(self.patience, lines, port.is_usable());
            let lanes = outlet.lanes();
            let looked = lanes.filter_map(|id| Some(self.lanes.get(id)?.look(now, limit)));
            let stuck = looked.min().unwrap_or(Time::NEVER);
            if stuck > now {
                // Never, if nothing is under way.
                if let Some(session) = self.session(index) {
                    session.pulse.expect(stuck);
                }
            } else if !outlet.way.is_broken() {
                tracing::warn!(index, nic, remote, "nothing gets through on a path");
                self.break_path(index, nic_at(nic), nic_at(remote));
            }
        }
    }

    /// When something is to be done for an open session, at the earliest, even if nothing happens.
    pub(super) fn open_deadline(&self, session: &Session) -> Time {
        let theirs = session.ports.len().max(1);
        let usable = |nic: usize| self.ports.get(nic).is_some_and(Nic::is_usable);
        let outlets = session.outlets.iter().enumerate();
        let outlets = outlets.filter(|(at, _)| usable(at / theirs)).map(|(_, it)| it.way.due());
        let lines = session.lines.iter().enumerate();
        let lines = lines.map(|(at, line)| line.state.due(usable(at)));
        outlets.chain(lines).fold(session.pulse.due(), Time::min)
    }
}
