//! Tenancies of transfer cells: the engine's end and the caller's handle, in every order.

use std::time::Duration;

use immwire_core::wake::Ticket;
use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::sync::Arc;

use crate::callback::Callbacks;
use crate::cells::Cells;
use crate::sync::park;
use crate::{Calls, my_waker};

struct Engine {
    cells: Cells<u32>,
    callbacks: Callbacks,
}

impl Engine {
    fn new(cells: u16) -> Arc<Self> {
        let (cells, callbacks) = (Cells::new(cells), Callbacks::new(2).unwrap());
        Arc::new(Self { cells, callbacks })
    }

    fn finish(&self, (cell, ticket): (u16, Ticket), end: Result<(), u32>) {
        self.cells.finish(cell, ticket, end, &self.callbacks);
    }

    fn let_go(&self, (cell, ticket): (u16, Ticket)) {
        self.cells.let_go(cell, ticket);
    }

    fn poll(&self, (cell, ticket): (u16, Ticket)) -> Option<Result<(), u32>> {
        self.cells.poll(cell, ticket)
    }
}

/// Spawns the engine's side of an end.
fn finish(
    engine: &Arc<Engine>,
    taken: (u16, Ticket),
    end: Result<(), u32>,
) -> thread::JoinHandle<()> {
    let engine = engine.clone();
    thread::spawn(move || engine.finish(taken, end))
}

/// The handle is dropped, with a waker left, while the engine ends the transfer.
///
/// *Fails if* both or neither of the two think that they are the last (the cell comes back twice, or
/// never), or if the first of them gives it back.
#[test]
fn a_cell_comes_back_once_whoever_lets_go_last() {
    explore(clause::ENDS, Bound::None, 400, || {
        let engine = Engine::new(1);
        let taken = engine.cells.take().unwrap();
        let ending = finish(&engine, taken, Err(7));
        let seen = engine.cells.watch(taken.0, taken.1, &my_waker());
        assert!(seen.is_none() || seen == Some(Err(7)));
        assert!(engine.cells.take().is_none(), "the cell is free while its handle is held");
        engine.let_go(taken);
        ending.join().unwrap();
        assert!(engine.poll(taken).is_none());
        let next = engine.cells.take().unwrap();
        assert!(engine.cells.take().is_none(), "the cell is free twice");
        assert_ne!(next, taken);
        assert_eq!(engine.poll(next), None);
    });
}

/// A future waits for its transfer, and its waker is all that it has.
///
/// *Fails if* the end is published before how the transfer failed, or the waker is not found.
#[test]
fn a_future_is_woken_and_told_how_it_failed() {
    explore(clause::TIME, Bound::None, 70, || {
        let engine = Engine::new(1);
        let taken = engine.cells.take().unwrap();
        let ending = finish(&engine, taken, Err(7));
        let end = loop {
            match engine.cells.watch(taken.0, taken.1, &my_waker()) {
                Some(end) => break end,
                None => park(),
            }
        };
        assert_eq!(end, Err(7));
        engine.let_go(taken);
        ending.join().unwrap();
        assert!(engine.cells.take().is_some());
    });
}

/// Whoever has a handle has an end, and then the place of it for the next transfer.
///
/// *Fails if* the end is told while the engine still holds the cell.
#[test]
fn who_has_seen_the_end_may_take_the_cell_again() {
    explore(clause::ENDS, Bound::None, 70, || {
        let engine = Engine::new(1);
        let taken = engine.cells.take().unwrap();
        let ending = finish(&engine, taken, Ok(()));
        let end = loop {
            match engine.cells.watch(taken.0, taken.1, &my_waker()) {
                Some(end) => break end,
                None => park(),
            }
        };
        assert_eq!(end, Ok(()));
        engine.let_go(taken);
        let next = engine.cells.take();
        // Its waker is left alone by who is slow to wake the last one's.
        if let Some(next) = next {
            assert_eq!(engine.cells.watch(next.0, next.1, &my_waker()), None);
        }
        ending.join().unwrap();
        assert!(next.is_some_and(|next| next != taken && engine.poll(next).is_none()));
        assert!(engine.cells.take().is_none(), "the cell is free twice");
    });
}

/// A task waits by a waker for a transfer whose handle another has, who looks, and drops it.
///
/// *Fails if* that one takes the waker with it: nobody is woken any more (deadlock).
#[test]
fn who_has_seen_the_end_first_does_not_keep_it_from_who_waits() {
    explore(clause::TIME, Bound::None, 100, || {
        let engine = Engine::new(1);
        let taken = engine.cells.take().unwrap();
        assert_eq!(engine.cells.watch(taken.0, taken.1, &my_waker()), None);
        let ending = finish(&engine, taken, Ok(()));
        let looking = {
            let engine = engine.clone();
            thread::spawn(move || {
                let is_over = engine.poll(taken).is_some();
                if is_over {
                    engine.let_go(taken);
                }
                is_over
            })
        };
        park();
        if !looking.join().unwrap() {
            engine.let_go(taken);
        }
        ending.join().unwrap();
        assert!(engine.cells.take().is_some());
    });
}

/// A callback keeps the handle until it has run.
///
/// *Fails if* the callback is not handed over, or the cell is emptied under it.
#[test]
fn a_callback_of_a_transfer_runs_once() {
    explore(clause::ENDS, Bound::None, 7, || {
        let engine = Engine::new(1);
        let taken = engine.cells.take().unwrap();
        let ending = finish(&engine, taken, Ok(()));
        let calls = Calls::default();
        if let Err(job) = engine.cells.leave(taken.0, taken.1, calls.job()) {
            job();
        }
        ending.join().unwrap();
        engine.callbacks.run_pending();
        assert_eq!(calls.made(), 1);
        assert_eq!(engine.poll(taken), Some(Ok(())));
        engine.let_go(taken);
        assert!(engine.cells.take().is_some());
    });
}

/// Two ends are told of one transfer, and one comes when the cell has its next tenant.
fn late_end(end: Result<(), u32>) {
    let engine = Engine::new(1);
    let old = engine.cells.take().unwrap();
    let late = finish(&engine, old, end);
    engine.finish(old, Err(1));
    // The late one may have been first, and be slow to tell.
    while engine.cells.watch(old.0, old.1, &my_waker()).is_none() {
        park();
    }
    assert!(engine.poll(old).is_some_and(|seen| seen == Err(1) || seen == end));
    engine.let_go(old);
    let new = engine.cells.take().expect("who has told of the end has let go before");
    assert_eq!(engine.poll(new), None);
    engine.finish(new, Err(2));
    assert_eq!(engine.poll(new), Some(Err(2)));
    engine.let_go(new);
    late.join().unwrap();
    assert!(engine.cells.take().is_some());
    assert!(engine.cells.take().is_none());
}

/// *Fails if* the late one ends the new tenancy, writes its failure there, or lets go of it.
#[test]
fn a_late_end_changes_nothing_of_the_next_tenancy() {
    explore(clause::ENDS, Bound::None, 310, || late_end(Err(9)));
}

/// *Fails if* the late one, which has no failure to write, ends the new tenancy or lets go of it.
#[test]
fn a_late_success_changes_nothing_of_the_next_tenancy() {
    explore(clause::ENDS, Bound::None, 300, || late_end(Ok(())));
}

/// All cells are taken; a caller sleeps until one comes back.
///
/// *Fails if* the waiter says that it waits without looking again, or not in one exchange with the
/// one who gives back, or if that one notifies without the lock (deadlock).
#[test]
fn whoever_waits_for_room_is_woken() {
    explore(clause::TIME, Bound::None, 18, || {
        let engine = Engine::new(1);
        let taken = engine.cells.take().unwrap();
        engine.let_go(taken);
        let ending = finish(&engine, taken, Ok(()));
        assert!(engine.cells.wait_room(Duration::MAX));
        assert!(engine.cells.take().is_some());
        ending.join().unwrap();
    });
}

/// Two callers sleep until there is room, two cells come back.
///
/// *Fails if* only one of them is notified: the other's word was taken with the first's.
#[test]
fn all_who_wait_for_room_are_woken() {
    explore(clause::TIME, Bound::Preemptions(2), 3500, || {
        let engine = Engine::new(2);
        let taken = [engine.cells.take().unwrap(), engine.cells.take().unwrap()];
        taken.into_iter().for_each(|taken| engine.let_go(taken));
        let waiters = [(); 2].map(|()| {
            let engine = engine.clone();
            thread::spawn(move || {
                while engine.cells.take().is_none() {
                    assert!(engine.cells.wait_room(Duration::MAX));
                }
            })
        });
        taken.into_iter().for_each(|taken| engine.finish(taken, Ok(())));
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

/// The engine ends while a caller waits for room that never comes.
///
/// *Fails if* the end is not said under the lock (deadlock).
#[test]
fn nobody_waits_for_room_beyond_the_end() {
    explore(clause::TIME, Bound::None, 8, || {
        let engine = Engine::new(1);
        let _taken = engine.cells.take().unwrap();
        let closing = {
            let engine = engine.clone();
            thread::spawn(move || engine.cells.close())
        };
        assert!(engine.cells.wait_room(Duration::MAX));
        closing.join().unwrap();
    });
}

/// A task waits for room by a waker, and looks again whenever it is woken.
///
/// *Fails if* it says that it waits after its look, or without the lock under which its waker is taken, or if that is not
/// woken (deadlock).
#[test]
fn a_task_that_waits_for_room_is_woken() {
    explore(clause::TIME, Bound::None, 18, || {
        let engine = Engine::new(1);
        let taken = engine.cells.take().unwrap();
        engine.let_go(taken);
        let ending = finish(&engine, taken, Ok(()));
        let mut id = None;
        while !engine.cells.watch_room(&mut id, &my_waker()) {
            park();
        }
        engine.cells.forget_room(id);
        assert!(engine.cells.take().is_some());
        ending.join().unwrap();
    });
}

/// The engine ends while a task waits for room that never comes.
///
/// *Fails if* the end wakes no tasks, or takes their wakers before it is said (deadlock).
#[test]
fn no_task_waits_for_room_beyond_the_end() {
    explore(clause::TIME, Bound::None, 8, || {
        let engine = Engine::new(1);
        let _taken = engine.cells.take().unwrap();
        let closing = {
            let engine = engine.clone();
            thread::spawn(move || engine.cells.close())
        };
        let mut id = None;
        while !engine.cells.watch_room(&mut id, &my_waker()) {
            park();
        }
        closing.join().unwrap();
    });
}
