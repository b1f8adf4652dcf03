//! What is done with an endpoint without an engine: streams and ping-pongs, the same for each transport.

use super::super::say::marks;
use super::{Done, Ends, Far, Memory, Piece, RawError};
use std::time::{Duration, Instant};

/// Reads of a queue between two looks at the clock.
const READS_PER_LOOK: u32 = 1 << 10;
/// The data of the write that says that the initiator has read all its completions.
pub(super) const BYE: u64 = 0xffff_fffe;
/// Of so many writes in a row at most, one tells that it has completed, and with it all before it.
const SIGNAL_EVERY: u64 = 16;

/// An endpoint and its queue.
pub(super) trait Wire {
    /// Posts a write. `false`: its queue is full. Where completions are in order, one is asked for only if the write is
    /// to be `signalled`.
    fn post(
        &mut self,
        to: (&Memory, &Far),
        piece: &Piece,
        how: (u64, Done),
        signalled: bool,
    ) -> Result<bool, RawError>;

    /// Makes the endpoint move, and reads what there is.
    fn read(&mut self, expected: u64) -> Result<Seen, RawError>;
}

/// What was read from the queue.
#[derive(Default)]
pub(super) struct Seen {
    /// Writes of ours that have completed.
    pub(super) own: u64,
    /// Writes of the peer's with the expected data.
    pub(super) theirs: u64,
    /// And one with [`BYE`].
    pub(super) bye: bool,
}

impl Seen {
    /// A write of the peer's with `data`.
    pub(super) const fn arrived(&mut self, data: u64, expected: u64) -> Result<(), RawError> {
        match data {
            data if data == expected => self.theirs += 1,
            BYE => self.bye = true,
            found => return Err(RawError::Wrong { expected, found }),
        }
        Ok(())
    }
}

/// A wait for the other side.
struct Patience {
    reads: u32,
    limit: Duration,
    until: Option<Instant>,
}

impl Patience {
    const fn new(limit: Duration) -> Self {
        Self { reads: 0, limit, until: None }
    }

    /// Something has happened.
    const fn renew(&mut self) {
        (self.reads, self.until) = (0, None);
    }

    /// Nothing has.
    fn lose(&mut self) -> Result<(), RawError> {
        self.reads += 1;
        if self.reads == READS_PER_LOOK {
            self.reads = 0;
            let now = Instant::now();
            if now >= *self.until.get_or_insert(now + self.limit) {
                return Err(RawError::Silent(self.limit));
            }
        }
        Ok(())
    }
}

/// Posts what was refused again, and reads, until it is accepted. Returns what was seen meanwhile.
fn post_soon<W: Wire>(
    wire: &mut W,
    limit: Duration,
    to: (&Memory, &Far),
    piece: &Piece,
    how: (u64, Done),
) -> Result<Seen, RawError> {
    let (mut all, mut patience) = (Seen::default(), Patience::new(limit));
    while !wire.post(to, piece, how, true)? {
        let seen = wire.read(how.0)?;
        all.own += seen.own;
        all.theirs += seen.theirs;
        all.bye |= seen.bye;
        patience.lose()?;
    }
    Ok(all)
}

/// See [`super::Raw::stream`].
pub(super) fn stream<W: Wire>(
    wire: &mut W,
    limit: Duration,
    to: (&Memory, &Far),
    (count, depth): (u64, u32),
    (data, done): (u64, Done),
    piece: impl Fn(u64) -> Piece,
) -> Result<Duration, RawError> {
    let depth = u64::from(depth.min(super::DEPTH_MAX));
    // Four times for each depth of the queue, so that it does not run empty meanwhile.
    let every = (depth / 4).clamp(1, SIGNAL_EVERY);
    let (mut posted, mut ended) = (0, 0);
    let mut patience = Patience::new(limit);
    let start = Instant::now();
    while ended < count {
        while posted < count && posted - ended < depth {
            // The last says when all are there, in both forms: bytes of one sender stay in order.
            let last = posted + 1 == count;
            let done = if last { Done::Delivered } else { done };
            let signalled = last || (posted + 1) % every == 0;
            if !wire.post(to, &piece(posted), (data, done), signalled)? {
                break;
            }
            posted += 1;
        }
        match wire.read(data)?.own {
            0 => patience.lose()?,
            own => {
                ended += own;
                patience.renew();
            }
        }
    }
    let took = start.elapsed();
    bye(wire, limit, to, &piece(count.saturating_sub(1)))?;
    Ok(took)
}

/// Writes the first bytes of `piece` once more, to say that nothing is awaited any more.
fn bye<W: Wire>(
    wire: &mut W,
    limit: Duration,
    to: (&Memory, &Far),
    piece: &Piece,
) -> Result<(), RawError> {
    let piece = Piece { len: piece.len.min(8), ..*piece };
    let seen = post_soon(wire, limit, to, &piece, (BYE, Done::Early))?;
    let (mut own, mut patience) = (seen.own, Patience::new(limit));
    while own == 0 {
        own = wire.read(BYE)?.own;
        patience.lose()?;
    }
    Ok(())
}

/// See [`super::Raw::take`].
pub(super) fn take<W: Wire>(
    wire: &mut W,
    limit: Duration,
    count: u64,
    data: u64,
) -> Result<(), RawError> {
    let (mut taken, mut bye, mut patience) = (0, false, Patience::new(limit));
    while taken < count || !bye {
        let seen = wire.read(data)?;
        taken += seen.theirs;
        bye |= seen.bye;
        if seen.theirs == 0 {
            patience.lose()?;
        } else {
            patience.renew();
        }
    }
    if taken == count { Ok(()) } else { Err(RawError::Wrong { expected: count, found: taken }) }
}

/// Sends the message of `turn`, all of `out`, with its number at the [`marks`].
fn send<W: Wire>(
    wire: &mut W,
    limit: Duration,
    (out, far): (&Memory, &Far),
    turn: u64,
    how: (u64, Done),
) -> Result<Seen, RawError> {
    for at in marks(out.len()) {
        out.set_word(at, turn)?;
    }
    let piece = Piece { from: 0, to: 0, len: out.len() };
    if wire.post((out, far), &piece, how, true)? {
        return Ok(Seen::default());
    }
    post_soon(wire, limit, (out, far), &piece, how)
}

/// Waits for the message of `turn` in `inbox`, `bytes` long. `came` was seen of it before. Returns the
/// completions of ours that were read.
fn receive<W: Wire>(
    wire: &mut W,
    limit: Duration,
    (inbox, bytes): (&Memory, u64),
    (turn, data): (u64, u64),
    came: u64,
) -> Result<u64, RawError> {
    let (mut came, mut own, mut patience) = (came, 0, Patience::new(limit));
    while came == 0 {
        let seen = wire.read(data)?;
        came += seen.theirs;
        own += seen.own;
        patience.lose()?;
    }
    for offset in marks(bytes) {
        let found = inbox.word(offset)?;
        if found != turn {
            return Err(RawError::Wrong { expected: turn, found });
        }
    }
    Ok(own)
}

/// See [`super::Raw::ping`].
pub(super) fn ping<W: Wire>(
    wire: &mut W,
    limit: Duration,
    ends: &Ends<'_>,
    (turns, batch): (u64, u64),
    how: (u64, Done),
) -> Result<Vec<f64>, RawError> {
    let bytes = ends.out.len();
    let (mut own, mut times) = (0, Vec::new());
    let mut from = Instant::now();
    for turn in 1..=turns {
        let seen = send(wire, limit, (ends.out, ends.far), turn, how)?;
        own += seen.own + receive(wire, limit, (ends.inbox, bytes), (turn, how.0), seen.theirs)?;
        if turn % batch == 0 {
            let now = Instant::now();
            times.push((now - from).as_secs_f64() / batch as f64 / 2.0);
            from = now;
        }
    }
    let mut patience = Patience::new(limit);
    while own < turns {
        own += wire.read(how.0)?.own;
        patience.lose()?;
    }
    bye(wire, limit, (ends.out, ends.far), &Piece { from: 0, to: 0, len: bytes })?;
    Ok(times)
}

/// See [`super::Raw::pong`].
pub(super) fn pong<W: Wire>(
    wire: &mut W,
    limit: Duration,
    ends: &Ends<'_>,
    turns: u64,
    how: (u64, Done),
) -> Result<(), RawError> {
    let bytes = ends.out.len();
    let mut own = 0;
    for turn in 1..=turns {
        own += receive(wire, limit, (ends.inbox, bytes), (turn, how.0), 0)?;
        own += send(wire, limit, (ends.out, ends.far), turn, how)?.own;
    }
    let (mut bye, mut patience) = (false, Patience::new(limit));
    while !bye || own < turns {
        let seen = wire.read(how.0)?;
        (own, bye) = (own + seen.own, bye || seen.bye);
        patience.lose()?;
    }
    Ok(())
}
