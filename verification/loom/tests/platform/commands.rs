//! Callers and the driver: commands, questions, sleep, and the end.

use std::sync::Mutex as Notes;

use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::sync::{Arc, Condvar, Mutex};

use crate::intake::{Intake, Wake};
use crate::sync::{Thread, current, park};

/// As an eventfd: once written to, readable until it is read.
struct Event(Mutex<bool>, Condvar);

impl Event {
    fn new() -> Self {
        Self(Mutex::new(false), Condvar::new())
    }

    fn sleep(&self) {
        let mut readable = self.0.lock().unwrap();
        while !*readable {
            readable = self.1.wait(readable).unwrap();
        }
        *readable = false;
    }
}

impl Wake for Event {
    fn wake(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }
}

struct Shared {
    intake: Intake<u32, u32, Event>,
    /// What the driver took, in order: commands as they are, questions from 100 on. No part of the
    /// model: nothing is ordered or published by it.
    taken: Notes<Vec<u32>>,
    refused: Notes<Vec<u32>>,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            intake: Intake::new(2, Event::new()).unwrap(),
            taken: Notes::default(),
            refused: Notes::default(),
        })
    }

    fn send(&self, command: u32) {
        self.intake.send(command, |command| self.refused.lock().unwrap().push(command));
    }

    fn step(&self) -> bool {
        let mut any = false;
        if let Some(command) = self.intake.next() {
            any = true;
            self.answer();
            self.taken.lock().unwrap().push(command);
        }
        any | self.answer()
    }

    fn answer(&self) -> bool {
        let asked = self.intake.is_asked();
        if asked {
            for question in self.intake.questions() {
                self.taken.lock().unwrap().push(question);
            }
        }
        asked
    }

    fn stop(&self) {
        self.intake.stop(|command| self.refused.lock().unwrap().push(command));
    }

    /// The driver, as the engine's thread runs it: `caller` is told of each step that did something.
    fn drive(&self, caller: &Thread) {
        while !self.intake.is_stopping() {
            if self.step() {
                caller.unpark();
                continue;
            }
            if self.intake.may_sleep() {
                self.intake.sleeper.sleep();
            }
            self.intake.awake();
        }
        self.stop();
    }

    fn taken(&self) -> Vec<u32> {
        self.taken.lock().unwrap().clone()
    }

    /// Everything that was sent, taken or refused.
    fn all(&self) -> Vec<u32> {
        let mut all = self.taken();
        all.extend(&*self.refused.lock().unwrap());
        all.sort_unstable();
        all
    }
}

/// Starts a driver, has `ask` ask it for `things`, waits until they are done, and has it end.
fn driver_model(things: usize, ask: fn(&Shared)) {
    let (shared, caller) = (Shared::new(), current());
    let driver = {
        let shared = shared.clone();
        thread::spawn(move || shared.drive(&caller))
    };
    ask(&shared);
    while shared.taken().len() < things {
        park();
    }
    shared.intake.request_stop();
    driver.join().unwrap();
    assert_eq!(shared.taken().len(), things);
    assert!(shared.refused.lock().unwrap().is_empty());
}

/// A command comes while the driver looks, announces its sleep, sleeps; then it is asked to end.
///
/// *Fails if* the driver does not look at the commands, or at the request to end, after it has
/// announced its sleep, or if a sender does not ring (deadlock).
#[test]
fn a_sleeping_driver_is_woken_by_a_command_and_by_the_request_to_end() {
    explore(clause::TIME, Bound::Preemptions(3), 780, || driver_model(1, |shared| shared.send(1)));
}

/// The same with two questions, the second while the first is looked at.
///
/// *Fails if* the driver takes the sign of questions down after it has looked at them, if it does not
/// look at the sign before it sleeps, or if the sign is put up before there is a question.
#[test]
fn a_sleeping_driver_is_woken_by_each_question() {
    explore(clause::TIME, Bound::Preemptions(3), 8800, || {
        driver_model(2, |shared| {
            shared.intake.ask(100);
            shared.intake.ask(101);
        });
    });
}

/// Two callers send while the driver ends, which it does at any moment.
///
/// *Fails if* either fence is missing, or if a sender does not look whether the driver has ended: the
/// command stays where it is, and its transfer never ends.
#[test]
fn a_command_sent_while_the_driver_ends_is_taken_or_refused() {
    explore(clause::ENDS, Bound::Preemptions(3), 12_000, || {
        let shared = Shared::new();
        let senders = [1, 2].map(|command| {
            let shared = shared.clone();
            thread::spawn(move || shared.send(command))
        });
        shared.step();
        shared.stop();
        for sender in senders {
            sender.join().unwrap();
        }
        assert_eq!(shared.all(), [1, 2]);
        assert_eq!(shared.intake.next(), None);
    });
}

/// The ring is full when a caller sends, and the driver ends instead of emptying it.
///
/// *Fails if* a sender that waits for room does not look whether the driver has ended.
#[test]
fn a_command_that_found_the_ring_full_is_refused_in_the_end() {
    explore(clause::ENDS, Bound::Preemptions(3), 1900, || {
        let shared = Shared::new();
        shared.send(1);
        shared.send(2);
        let sender = {
            let shared = shared.clone();
            thread::spawn(move || shared.send(3))
        };
        shared.stop();
        sender.join().unwrap();
        assert_eq!(shared.all(), [1, 2, 3]);
        assert_eq!(shared.intake.next(), None);
    });
}

/// A question is asked while the driver ends: nobody is left waiting for the answer.
///
/// *Fails if* either fence is missing, or if whoever asks does not look whether the driver has ended.
#[test]
fn a_question_asked_while_the_driver_ends_is_answered_or_dropped() {
    explore(clause::TIME, Bound::None, 60, || {
        let shared = Shared::new();
        let caller = {
            let shared = shared.clone();
            thread::spawn(move || shared.intake.ask(100))
        };
        shared.step();
        shared.stop();
        caller.join().unwrap();
        assert_eq!(shared.intake.questions().next(), None);
    });
}

/// A caller asks, then sends: the driver that takes the command has answered before.
///
/// *Fails if* the sign of questions is put up after the bell was rung, or not at all.
#[test]
fn what_was_asked_before_a_command_is_done_before_it() {
    explore(clause::ENDS, Bound::None, 34, || {
        let shared = Shared::new();
        let caller = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.intake.ask(100);
                shared.send(1);
            })
        };
        shared.step();
        shared.step();
        caller.join().unwrap();
        shared.step();
        shared.step();
        assert_eq!(shared.taken(), [100, 1]);
    });
}
