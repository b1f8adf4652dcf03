//! How callers reach the driver: a ring of commands, a list of questions, a bell; and how that ends.
//!
//! ```text
//!   caller                                   driver
//!   send: push, ring the bell                poll: next, next_question
//!   ask:  append, set a flag, ring           sleep: may_sleep (announce, look again), sleep, awake
//!   has it ended? refuse what is there       stop: say so, fence, refuse what is there
//! ```
//!
//! What a command or a question is, and how a sleeping driver is woken, are the platform's.
//!
//! # Invariants
//!
//! 1. Each command that is sent is taken once: by the driver, or, when that has ended, by whoever
//!    refuses it. None is left in the ring.
//! 2. After a command, a question or a request to end, a driver that sleeps is woken, and one that is
//!    about to does not.
//! 3. Whoever takes a command finds the questions that its sender asked before.
//!
//! The loom models of `verification/loom` check them on this text.

use std::collections::VecDeque;

use immwire_core::wake::Doorbell;

use crate::ring::{self, Boxed};
use crate::sync::{AtomicBool, Mutex, Ordering, fence, lock, yield_now};

/// What makes a sleeping driver look.
pub(crate) trait Wake {
    /// Wakes it; if it is not asleep yet, its next sleep ends at once.
    fn wake(&self);

    /// Tells whoever steps a driver that never sleeps; `false` if it is no such driver.
    fn step(&self) -> bool {
        false
    }
}

/// See the [module](self).
pub(crate) struct Intake<C, Q, W> {
    commands: Boxed<C>,
    questions: Mutex<VecDeque<Q>>,
    /// Something is among the questions.
    asked: AtomicBool,
    /// Rung after anything was put into either.
    bell: Doorbell,
    pub(crate) sleeper: W,
    /// No more is taken; the driver is to end.
    stopping: AtomicBool,
    /// The driver has ended.
    stopped: AtomicBool,
}

impl<C, Q, W: Wake> Intake<C, Q, W> {
    /// Room for `capacity` commands; [`None`] if a ring cannot be so large.
    pub(crate) fn new(capacity: usize, sleeper: W) -> Option<Self> {
        Some(Self {
            commands: ring::boxed(capacity)?,
            questions: Mutex::new(VecDeque::new()),
            asked: AtomicBool::new(false),
            bell: Doorbell::new(),
            sleeper,
            stopping: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        })
    }

    // ---- callers ----

    /// Hands a command to the driver; if that has ended, `refuse` gets it, and any other there is.
    /// With a full ring it is tried until there is room.
    pub(crate) fn send(&self, command: C, refuse: impl Fn(C)) {
        if let Err(command) = self.commands.try_push(command) {
            self.send_late(command, &refuse);
        }
        self.ring();
        if self.is_stopped() {
            self.refuse_all(&refuse);
        }
    }

    #[cold]
    fn send_late(&self, mut command: C, refuse: &impl Fn(C)) {
        while let Err(back) = self.commands.try_push(command) {
            if self.is_stopped() {
                self.refuse_all(refuse);
            }
            command = back;
            yield_now();
        }
    }

    fn refuse_all(&self, refuse: &impl Fn(C)) {
        while let Some(command) = self.commands.try_pop() {
            refuse(command);
        }
    }

    /// Asks the driver for something off the way of writes. If it has ended the question is dropped,
    /// which whoever waits for the answer notices.
    pub(crate) fn ask(&self, question: Q) {
        lock(&self.questions).push_back(question);
        self.asked.store(true, Ordering::Release);
        self.ring();
        if self.is_stopped() {
            self.drop_questions();
        }
    }

    /// Drops them after the lock: a question's drop may run code of others.
    fn drop_questions(&self) {
        let dropped = std::mem::take(&mut *lock(&self.questions));
        drop(dropped);
    }

    /// Asks the driver to end.
    pub(crate) fn request_stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.ring();
    }

    /// Whether no more is taken.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Whether the driver has ended.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Wakes the driver if it sleeps: the caller has made something visible that it looks for.
    pub(crate) fn ring(&self) {
        if !self.sleeper.step() && self.bell.ring() {
            self.sleeper.wake();
        }
    }

    // ---- the driver ----

    /// Commands there are at most.
    pub(crate) fn capacity(&self) -> usize {
        self.commands.capacity()
    }

    /// Whether there is no command.
    pub(crate) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// The next command.
    pub(crate) fn next(&self) -> Option<C> {
        self.commands.try_pop()
    }

    /// Whether there are questions. After [`Intake::next`], those count that were asked before the
    /// command was sent: popping it has made the flag visible.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// The questions, each taken as the iterator comes to it; more may be asked meanwhile.
    pub(crate) fn questions(&self) -> impl Iterator<Item = Q> {
        // Before the first look: a question that comes after it sets the flag again.
        self.asked.store(false, Ordering::Relaxed);
        std::iter::from_fn(|| lock(&self.questions).pop_front())
    }

    /// Announces that the driver is about to sleep; returns whether nothing has come for it. It then
    /// looks at what else it waits for, sleeps or does not, and calls [`Intake::awake`].
    pub(crate) fn may_sleep(&self) -> bool {
        self.bell.prepare_sleep();
        self.commands.is_empty() && !self.is_asked() && !self.is_stopping()
    }

    /// Withdraws the announcement.
    pub(crate) fn awake(&self) {
        self.bell.awake();
    }

    /// The driver has begun to end by itself, or as asked: nothing new is taken.
    pub(crate) fn close(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// The driver has ended: `refuse` gets what it has not taken.
    pub(crate) fn stop(&self, refuse: impl Fn(C)) {
        self.close();
        self.stopped.store(true, Ordering::Release);
        // With the fence in `Doorbell::ring`, between a push and the look in `send`: whoever pushes
        // after this has emptied the ring sees `stopped`, and empties it again.
        fence(Ordering::SeqCst);
        self.refuse_all(&refuse);
        self.drop_questions();
    }
}
