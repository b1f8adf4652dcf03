//! What devices tell by themselves, and NICs that are lost, go down, or are back.
//!
//! # Invariants
//!
//! - A NIC that is lost stays so. Of each change the engine is told once.
//! - What a NIC has received before it was lost counts: the queue pairs that peers write by are cut, so that it acknowledges nothing more, and it is read
//!   before anything is given up for that, and on, as long as its completion queue lets itself be read.
//! - What is in flight over a port that is down is given up only if there is another way (`immwire_core::way`). Nothing more is posted
//!   there then, which is seen to where something would be: whatever waits for room may have been meant for the port before it went down.

use std::sync::Arc;
use std::time::Instant;

use immwire_core::id::NicIndex;
use immwire_core::life::Notice;
use immwire_core::peer::DownReason;
use immwire_core::way::is_led;
use rustix::event::epoll;

use super::device::Event;
use super::lane::{Owner, Role};
use super::paths::leads;
use super::upkeep::{bit, nic_at};
use super::{Nic, Tiding, VerbsProvider};
use crate::provider::Sink;

impl VerbsProvider {
    /// Looks for what devices tell by themselves.
    pub(super) fn hear_devices<S: Sink>(&mut self, sink: &mut S) {
        for at in 0..self.ports.len() {
            while let Some(event) = self.ports.get(at).and_then(|port| port.device().event()) {
                self.urgent = true;
                match event {
                    Event::QueuePairFailed { number } => match self.owner(at, number) {
                        Some((_, Owner { role: Role::Outlet { lane }, .. })) => {
                            self.break_lane(lane)
                        }
                        Some((nic, Owner { session, role: Role::Line })) => {
                            self.break_line(session, nic);
                        }
                        // Whoever writes there will notice.
                        Some((
                            _,
                            Owner { role: Role::Inlet { .. } | Role::OldLine { .. }, .. },
                        ))
                        | None => {}
                    },
                    Event::PeerFailed { number } => {
                        let Some((_, Owner { session: index, .. })) = self.owner(at, number) else {
                            continue;
                        };
                        for nic in 0..self.ports.len() {
                            self.cut_inlets(index, nic_at(nic));
                            self.poll_nic(nic, self.last_rounds, sink);
                        }
                        let now = self.now;
                        if let Some(session) = self.session(index) {
                            // There is nothing to wait for.
                            session.life.leave(now, Notice::Untold, Some(DownReason::Disconnected));
                        }
                    }
                    Event::Drained { number } => {
                        if let Some((nic, owner)) = self.owner(at, number) {
                            if let Some(port) = self.ports.get_mut(usize::from(nic)) {
                                port.draining.hear();
                            }
                            self.drained(nic, owner, number);
                        }
                    }
                    Event::Port { is_up } => self.port_changed(at, is_up),
                    // Handles name entries by their places.
                    Event::Gids => {
                        for nic in self.sharing(at) {
                            self.resolver.forget_nic(nic.into());
                        }
                    }
                    Event::DeviceFailed { kind } => {
                        tracing::error!(kind, "a device failed");
                        for nic in self.sharing(at) {
                            self.give_up_nic(nic, sink);
                        }
                    }
                    Event::Other { kind } => tracing::debug!(kind, "an event of a device's"),
                }
            }
        }
    }

    /// The NICs that share the device of this one.
    fn sharing(&self, at: usize) -> Vec<NicIndex> {
        let device = self.ports.get(at).map(|port| Arc::as_ptr(port.device()));
        let ports = self.ports.iter().enumerate();
        let same = ports.filter(|(_, port)| Some(Arc::as_ptr(port.device())) == device);
        same.map(|(at, _)| nic_at(at)).collect()
    }

    /// Whose a queue pair is that the device of this NIC has told of, and on which of those that share it.
    fn owner(&self, at: usize, number: u32) -> Option<(NicIndex, Owner)> {
        self.sharing(at).into_iter().find_map(|nic| {
            let port = self.ports.get(usize::from(nic))?;
            port.owners.get(number).map(|owner| (nic, owner))
        })
    }

    /// A queue pair takes no more from its shared receive queue.
    pub(super) fn drained(&mut self, nic: NicIndex, owner: Owner, number: u32) {
        let nics = self.ports.len();
        let Owner { session: index, role } = owner;
        match role {
            Role::Outlet { lane } => {
                if let Some(lane) = self.lanes.get(lane) {
                    lane.is_drained = true;
                }
            }
            Role::Line => {
                let session = self.session(index);
                if let Some(line) = session.and_then(|it| it.lines.get_mut(usize::from(nic))) {
                    line.is_drained = true;
                }
            }
            Role::OldLine { .. } => {
                let owner = Owner { session: index, role: Role::OldLine { is_drained: true } };
                if let Some(port) = self.ports.get_mut(usize::from(nic)) {
                    port.owners.set(number, Some(owner));
                }
            }
            Role::Inlet { from, .. } => {
                let at = usize::from(from) * nics + usize::from(nic);
                let inlet = self.session(index).and_then(|session| session.inlets.get_mut(at));
                let pairs = inlet.and_then(|inlet| inlet.pairs.as_mut()).into_iter().flatten();
                for (_, drained) in pairs.filter(|(pair, _)| pair.number() == number) {
                    *drained = true;
                }
            }
        }
    }

    /// Sees to it that nothing is lost with queue pairs of this NIC's that are cut, and are destroyed next: waits until they take no more from
    /// the shared receive queue, and reads what they had taken, which is posted again. Else it is posted nowhere any more with devices
    /// whose completions go with the queue pair (libmlx5's do). Takes no longer than `immwire_core::parting::Draining` says.
    /// What devices tell and peers say meanwhile is heard: afterwards paths and lines may be broken, and sessions about to leave.
    pub(super) fn drain<S: Sink>(&mut self, at: usize, numbers: &[u32], sink: &mut S) {
        let begun = Instant::now();
        let drained = |this: &Self| numbers.iter().all(|&number| this.is_drained(at, number));
        while !drained(self) {
            self.hear_devices(sink);
            if drained(self) {
                break;
            }
            let Some(port) = self.ports.get_mut(at).filter(|port| !port.is_mute) else { return };
            if begun.elapsed() >= port.draining.patience() {
                tracing::debug!(nic = at, "a device does not say when a queue pair has drained");
                port.draining.miss();
                break;
            }
            std::thread::yield_now();
        }
        self.poll_nic(at, self.last_rounds, sink);
    }

    /// Whether a queue pair that receives is done with the shared receive queue.
    fn is_drained(&self, at: usize, number: u32) -> bool {
        let owner = self.ports.get(at).and_then(|port| port.owners.get(number));
        let session = |index: u16| self.sessions.get(usize::from(index))?.as_deref();
        let Some((session, role)) = owner.and_then(|it| Some((session(it.session)?, it.role)))
        else {
            return true;
        };
        match role {
            Role::Outlet { .. } => true,
            Role::Line => session.lines.get(at).is_none_or(|line| line.is_drained),
            Role::OldLine { is_drained } => is_drained,
            Role::Inlet { from, .. } => {
                let inlet = session.inlets.get(usize::from(from) * self.ports.len() + at);
                let mut pairs = inlet.and_then(|it| it.pairs.as_ref()).into_iter().flatten();
                pairs.find(|(pair, _)| pair.number() == number).is_none_or(|(_, drained)| *drained)
            }
        }
    }

    /// The port of this NIC's device is down, or up again.
    fn port_changed(&mut self, at: usize, is_up: bool) {
        let now = self.now;
        for nic in self.sharing(at) {
            let port = self.ports.get_mut(usize::from(nic));
            if !port.is_some_and(|port| port.health.turn(is_up)) {
                continue;
            }
            tracing::warn!(nic, is_up, "a port has changed");
            self.resolver.forget_nic(nic.into());
            self.tidings.push(Tiding::Nic(nic, is_up));
            for session in self.sessions.iter_mut().flatten() {
                session.courier.doubt(bit(nic), !is_up);
                if is_up {
                    session.hurry(now, Some(nic), None);
                    if !session.says.back.contains(&nic) {
                        session.says.back.push(nic);
                    }
                }
            }
        }
        if !is_up {
            for nic in self.sharing(at) {
                self.live.clone().into_iter().for_each(|index| self.leave_port(index, nic));
            }
        }
    }

    /// What is in flight over a NIC whose port is down does not wait for the transport to give it up, if there is another
    /// way; else it may be up again in time.
    fn leave_port(&mut self, index: u16, nic: NicIndex) {
        let usable = |at: usize| self.ports.get(at).is_some_and(Nic::is_usable);
        let session = self.sessions.get(usize::from(index)).and_then(Option::as_deref);
        let Some(session) = session else { return };
        let theirs = session.ports.len().max(1);
        let usable = (0..8).filter(|&at| usable(usize::from(at)));
        let has_line = session.courier.is_led(usable.fold(0, |lines, at| lines | bit(at)));
        let has_path = is_led(leads(session, &self.ports));
        let ways = session.outlets.iter().skip(usize::from(nic) * theirs).take(theirs);
        let lanes: Vec<_> = ways.filter_map(|it| it.lanes.filter(|_| it.way.is_open())).collect();
        if has_line {
            self.break_line(index, nic);
        }
        for id in lanes.into_iter().filter(|_| has_path).flatten() {
            if self.lanes.get(id).is_some_and(|lane| lane.unread() > 0) {
                self.break_lane(id);
            }
        }
    }

    /// A device that is gone has its descriptors in error for good (`ib_uverbs_event_poll` of Linux): whoever sleeps on them
    /// would not.
    fn watch_no_more(&self, nic: NicIndex) {
        let at = usize::from(nic);
        let Some(port) = self.ports.get(at) else { return };
        let _ = epoll::delete(&self.epoll, port.completed.fd());
        let is_lost =
            |nic: NicIndex| self.ports.get(usize::from(nic)).is_none_or(|it| it.health.is_lost());
        if self.sharing(at).into_iter().all(is_lost) {
            // The device's own, for all of its NICs.
            let door = self.doors.fd_of(at);
            for fd in door.into_iter().chain([port.device().event_fd()]) {
                let _ = epoll::delete(&self.epoll, fd);
            }
        }
    }

    /// A NIC is lost for good. What it has acknowledged is read and counted before anything is given up for that: a peer that is reached by no
    /// other is left then, and nothing of its is counted any more.
    fn give_up_nic<S: Sink>(&mut self, nic: NicIndex, sink: &mut S) {
        for index in self.live.clone() {
            self.cut_inlets(index, nic);
        }
        self.poll_nic(usize::from(nic), self.last_rounds, sink);
        self.lose_nic(nic);
    }

    /// A NIC is lost for good, and with it all paths and lines from there.
    pub(super) fn lose_nic(&mut self, nic: NicIndex) {
        let Some(port) = self.ports.get_mut(usize::from(nic)) else { return };
        if !port.health.lose() {
            return;
        }
        port.device().lose();
        self.urgent = true;
        tracing::error!(nic, "a NIC is lost");
        self.watch_no_more(nic);
        self.tidings.push(Tiding::Nic(nic, false));
        for index in self.live.clone() {
            let theirs = self.session(index).map_or(0, |session| session.ports.len());
            (0..theirs).for_each(|remote| self.break_path(index, nic, nic_at(remote)));
            self.break_line(index, nic);
            self.cut_inlets(index, nic);
        }
    }
}
