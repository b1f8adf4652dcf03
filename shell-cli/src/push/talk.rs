//! Messages of this protocol over an engine: cut up, put together, waited for.

use super::message::{Assembler, MESSAGE_MAX, MessageError, fragments};
use super::path::Printable;
use crate::motor::{Motor, MotorError};
use crate::signals;
use immwire::{Message, PeerError, PeerId, PeerState, Transfer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Fits every engine's mailbox of the default size, 64 KiB with its header.
const FRAGMENT: usize = 60 << 10;
/// How often "still here" is said while a side reads its disk.
const SAY_EVERY: Duration = Duration::from_secs(1);
/// How long one look for a message waits.
const LOOK: Duration = Duration::from_millis(100);
/// How often whoever waits for an answer to be taken looks.
const TOLD_EVERY: Duration = Duration::from_millis(1);

/// Why talking ended.
#[derive(Debug, thiserror::Error)]
pub enum TalkError {
    /// The engine, or Ctrl-C.
    #[error(transparent)]
    Motor(#[from] MotorError),
    /// The other side does not speak this protocol.
    #[error("the other side sent {}", Printable(&.0.to_string()))]
    Message(#[from] MessageError),
    /// What this side has to say is no message.
    #[error("cannot say that in one message: it would be {0}; push fewer files at a time")]
    Ours(MessageError),
    /// The other side has gone.
    #[error("the other side is gone ({0})")]
    Gone(PeerError),
    /// Nothing was heard of the other side.
    #[error("nothing was heard of the other side for {0:?}")]
    Silent(Duration),
}

/// What came.
#[derive(Debug)]
pub struct Heard<M> {
    /// From whom.
    pub from: PeerId,
    /// What they say.
    pub message: Result<M, MessageError>,
}

/// What one look for messages found.
#[derive(Debug, PartialEq, Eq)]
pub enum Look<M> {
    /// No message of anybody's.
    Nothing,
    /// One of somebody else's.
    Other,
    /// A part of a long message: its sender is there, and at it.
    Part,
    /// All of one.
    Message(M),
}

/// One engine's end of all its conversations.
#[derive(Debug)]
pub struct Talk {
    motor: Motor,
    parts: HashMap<PeerId, Assembler>,
    /// Came while somebody else was listened to, who has gone.
    put_back: Option<Message>,
    /// Answers that nobody waits for, and that are not in their mailboxes yet.
    told: HashMap<PeerId, Vec<Transfer>>,
    patience: Duration,
    said: Instant,
}

impl Talk {
    /// Over `motor`; a peer may be silent for `patience`.
    #[must_use]
    pub fn new(motor: Motor, patience: Duration) -> Self {
        Self {
            motor,
            parts: HashMap::new(),
            put_back: None,
            told: HashMap::new(),
            patience,
            said: Instant::now(),
        }
    }

    /// The engine.
    pub fn motor(&mut self) -> &mut Motor {
        &mut self.motor
    }

    /// How long a peer may be silent.
    #[must_use]
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// Says `message`; returns when it lies in the peer's mailbox.
    ///
    /// # Errors
    ///
    /// [`TalkError`].
    pub fn say<M: Serialize>(&mut self, to: PeerId, message: &M) -> Result<(), TalkError> {
        for fragment in fragments(message, FRAGMENT).map_err(TalkError::Ours)? {
            if let Err(error) = self.motor.send(to, &fragment, self.patience) {
                return Err(match (error, self.there(to)) {
                    (MotorError::Interrupted, _) => MotorError::Interrupted.into(),
                    (_, Err(gone)) => gone,
                    (error, Ok(())) => error.into(),
                });
            }
        }
        self.said = Instant::now();
        Ok(())
    }

    /// Says `message` to somebody who may not listen, and waits for that no longer than `at_most`. It
    /// still arrives later, if there is room. Says nothing to whoever has not taken the last one: a peer that
    /// talks and never listens costs no time, and the memory of one answer.
    pub fn tell<M: Serialize>(&mut self, to: PeerId, message: &M, at_most: Duration) {
        let start = Instant::now();
        let under_way = |told: &mut Vec<Transfer>| {
            told.retain(|transfer| transfer.poll_end().is_none());
            !told.is_empty()
        };
        self.told.retain(|_, told| under_way(told));
        if self.told.contains_key(&to) {
            return;
        }
        // Whoever is not told will see us silent.
        let Ok(fragments) = fragments(message, FRAGMENT) else { return };
        let engine = self.motor.engine();
        // In order, or not at all: what follows one that was refused is not sent.
        let mut told: Vec<_> =
            fragments.iter().map_while(|fragment| engine.submit_send(to, fragment).ok()).collect();
        while under_way(&mut told) {
            let left = at_most.saturating_sub(start.elapsed());
            if left.is_zero() {
                self.told.insert(to, told);
                return;
            }
            self.motor.rest(TOLD_EVERY.min(left));
        }
    }

    /// Says `message` if nothing was said for a while, and returns whether it did: for long work, after
    /// each file and each piece of one. Whoever does it listens then, too: what both sides say
    /// meanwhile must not fill their mailboxes.
    ///
    /// # Errors
    ///
    /// [`TalkError`]: among others, Ctrl-C.
    pub fn say_sometimes<M: Serialize>(
        &mut self,
        to: PeerId,
        message: &M,
    ) -> Result<bool, TalkError> {
        if signals::interrupted() {
            return Err(MotorError::Interrupted.into());
        }
        if self.said.elapsed() < SAY_EVERY {
            return Ok(false);
        }
        self.there(to)?;
        self.say(to, message)?;
        Ok(true)
    }

    /// Whether `peer` is there.
    ///
    /// # Errors
    ///
    /// [`TalkError::Gone`].
    pub fn there(&self, peer: PeerId) -> Result<(), TalkError> {
        match self.motor.engine().peer_state(peer) {
            Some(PeerState::Down(reason)) => Err(TalkError::Gone(PeerError::Down { peer, reason })),
            None => Err(TalkError::Gone(PeerError::Unknown { peer })),
            Some(_) => Ok(()),
        }
    }

    /// What anybody says within `timeout`; `None` if that is nothing, or only a part.
    ///
    /// # Errors
    ///
    /// [`TalkError::Motor`].
    pub fn hear<M: DeserializeOwned>(
        &mut self,
        timeout: Duration,
    ) -> Result<Option<Heard<M>>, TalkError> {
        let Some(fragment) = self.fragment(timeout)? else {
            let engine = self.motor.engine();
            let here = |peer: &PeerId| {
                !matches!(engine.peer_state(*peer), None | Some(PeerState::Down(_)))
            };
            self.parts.retain(|peer, _| here(peer));
            return Ok(None);
        };
        let message = self.assemble(&fragment);
        if matches!(message, Ok(None))
            && let Some(from) = self.make_room(MESSAGE_MAX)
        {
            return Ok(Some(Heard { from, message: Err(MessageError::Crowded) }));
        }
        Ok(message.transpose().map(|message| Heard { from: fragment.from, message }))
    }

    /// If what has come of all peers' messages is more than `most` bytes, forgets the longest; returns whose
    /// that was.
    fn make_room(&mut self, most: usize) -> Option<PeerId> {
        let held: usize = self.parts.values().map(Assembler::held).sum();
        let longest = self.parts.iter_mut().max_by_key(|(_, parts)| parts.held());
        let (peer, parts) = longest.filter(|_| held > most)?;
        parts.forget();
        Some(*peer)
    }

    fn fragment(&mut self, timeout: Duration) -> Result<Option<Message>, TalkError> {
        match self.put_back.take() {
            Some(fragment) => Ok(Some(fragment)),
            None => Ok(self.motor.message(timeout)?),
        }
    }

    fn assemble<M: DeserializeOwned>(
        &mut self,
        fragment: &Message,
    ) -> Result<Option<M>, MessageError> {
        self.parts.entry(fragment.from).or_default().take(&fragment.bytes)
    }

    /// The next thing that `peer` says; waits as long as patience and the peer's life last. Patience starts
    /// again with each part of a long message. Others are told `busy`.
    ///
    /// # Errors
    ///
    /// [`TalkError`].
    pub fn hear_from<M: DeserializeOwned>(
        &mut self,
        peer: PeerId,
        busy: Option<&impl Serialize>,
    ) -> Result<M, TalkError> {
        let mut quiet = Instant::now();
        while quiet.elapsed() < self.patience {
            match self.look(peer, busy, LOOK)? {
                Look::Message(message) => return Ok(message),
                Look::Part => quiet = Instant::now(),
                Look::Nothing | Look::Other => {}
            }
        }
        Err(TalkError::Silent(self.patience))
    }

    /// One look for what `peer` says, of at most `timeout`. Others are told `busy`.
    ///
    /// # Errors
    ///
    /// [`TalkError`].
    pub fn look<M: DeserializeOwned>(
        &mut self,
        peer: PeerId,
        busy: Option<&impl Serialize>,
        timeout: Duration,
    ) -> Result<Look<M>, TalkError> {
        let fragment = match self.fragment(timeout)? {
            // Whoever has gone may have said something before.
            None => match self.there(peer) {
                Ok(()) => return Ok(Look::Nothing),
                Err(gone) => self.fragment(Duration::ZERO)?.ok_or(gone)?,
            },
            Some(fragment) => fragment,
        };
        if fragment.from == peer {
            return Ok(self.assemble(&fragment)?.map_or(Look::Part, Look::Message));
        }
        if let Err(gone) = self.there(peer) {
            // Nothing is under way any more: the other one comes next.
            self.put_back = Some(fragment);
            return Err(gone);
        }
        // It need not be whole to be refused, so none of it is kept.
        if self.parts.entry(fragment.from).or_default().refuse(&fragment.bytes)
            && let Some(busy) = busy
        {
            self.tell(fragment.from, busy, Duration::ZERO);
        }
        Ok(Look::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::{FromReceiver, FromSender};
    use super::*;
    use crate::motor::Mode;

    #[test]
    fn what_the_other_side_sent_is_shown_without_control_characters() {
        let text = b"\x01{\"say\":\"\\u001b[2Jboo\"}";
        let error = Assembler::default().take::<FromSender>(text).unwrap_err();
        assert!(error.to_string().contains('\u{1b}'), "the case is none");
        let shown = TalkError::Message(error).to_string();
        assert!(shown.contains("boo") && !shown.contains('\u{1b}'), "{shown}");
    }

    #[test]
    fn what_is_too_long_to_say_is_not_the_other_sides_fault() {
        let motor = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
        let there = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
        let mut talk = Talk::new(motor, Duration::from_secs(20));
        let address = there.engine().address().clone();
        let peer = talk.motor().connect(&address, Duration::from_secs(20)).unwrap();
        let reason = "x".repeat(MESSAGE_MAX);
        let error = talk.say(peer, &FromReceiver::Failed { reason }).unwrap_err().to_string();
        assert!(!error.contains("other side") && error.contains("fewer files"), "{error}");
        talk.say(peer, &FromReceiver::Done).unwrap();
    }

    #[test]
    fn the_memory_of_all_messages_that_have_begun_is_bounded() {
        let here = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
        let address = here.engine().address().clone();
        let mut talk = Talk::new(here, Duration::from_secs(20));
        let wait = Duration::from_secs(20);
        let mut others: Vec<_> = (0..3)
            .map(|_| {
                let mut motor = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
                let peer = motor.connect(&address, wait).unwrap();
                (motor, peer)
            })
            .collect();
        for (number, (motor, peer)) in others.iter_mut().enumerate() {
            motor.send(*peer, &vec![0; 10 * (number + 1)], wait).unwrap();
            while talk.parts.len() <= number {
                assert!(talk.hear::<FromSender>(LOOK).unwrap().is_none());
            }
        }
        let held = |talk: &Talk| {
            let mut held: Vec<_> = talk.parts.values().map(Assembler::held).collect();
            held.sort_unstable();
            held
        };
        assert_eq!(held(&talk), [9, 19, 29]);
        assert_eq!(talk.make_room(57), None);
        let longest = talk.make_room(56).unwrap();
        assert_eq!(held(&talk), [0, 9, 19]);
        assert_eq!(talk.make_room(28), None);
        assert!(talk.make_room(27).is_some_and(|next| next != longest));
        // And somebody who is not to be heard out.
        let (motor, peer) = &mut others[0];
        motor.send(*peer, &[0; 10], wait).unwrap();
        let busy = FromReceiver::Failed { reason: "busy".to_owned() };
        while talk.look::<FromSender>(longest, Some(&busy), LOOK).unwrap() != Look::Other {}
        assert_eq!(held(&talk), [0, 0, 0]);
        let answer = motor.message(wait).unwrap().unwrap();
        let answer = Assembler::default().take::<FromReceiver>(&answer.bytes).unwrap();
        assert_eq!(answer, Some(busy));
    }
}
