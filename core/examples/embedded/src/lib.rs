//! The embedding story: a transfer engine on `immwire-core`, in a program without std, heap or threads.
//!
//! `embedded.h` is its contract; `main.c` uses it. The core plans, schedules, counts and says how each
//! transfer ended. What is left to the embedder is this file, which lends storage and carries calls, and
//! [`provider`], which moves the bytes.
#![no_std]

mod provider;

use core::ffi::c_void;
use core::mem::{align_of, size_of};
use core::num::{NonZeroU16, NonZeroU64};
use core::slice;
use core::time::Duration;

use immwire_core::group::{
    Answer, DomainGroup, End, Event, GroupConfig, NicConfig, Options, PeerSlot, PieceLimits,
    SubmitError, TransferSlot, WorkError,
};
use immwire_core::id::{EngineId, MAX_NICS, PeerId, Time};
use immwire_core::imm::{CounterSlot, CounterTable, ImmTag};
use immwire_core::nic::{NicState, SplitRule};
use immwire_core::peer::LivenessConfig;
use immwire_core::plan::{PagedWrite, Pages, PlanLimits, Request, SingleWrite, Target};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use provider::{Counters, DEPTH, Memory};

const TRANSFERS: usize = 16;
const COUNTERS: usize = 16;
const ENGINE_BYTES: usize = 16384;
const ENGINE_ALIGN: usize = 64;

/// The only NIC there is, on either side.
const NIC: u8 = 0;
const NIC_STATE: NicState = NicState { speed: 1, healthy: true };

/// Memory does not go away: no peer is ever suspected, and time stands still.
const FOR_EVER: LivenessConfig = LivenessConfig {
    heartbeat: Duration::MAX,
    suspect_after: Duration::MAX,
    down_after: Duration::MAX,
    connect_deadline: Duration::MAX,
    idle_after: Duration::MAX,
};
const CONFIG: GroupConfig = GroupConfig {
    limits: PlanLimits {
        max_message_bytes: NonZeroU64::new(1 << 20).unwrap(),
        pages_per_piece: NonZeroU16::MIN,
        rule: SplitRule { min_piece_bytes: NonZeroU64::MIN, granule_bytes: NonZeroU64::MIN },
    },
    unreached: [0; MAX_NICS],
    peer_depth: DEPTH,
    latency_bytes: 4096,
    latency_reserve: 4,
    turn_bytes: 64 << 10,
    drain: Duration::ZERO,
    liveness: FOR_EVER,
};

type PageNumbers = &'static [u32];
type Group = DomainGroup<
    PageNumbers,
    &'static [Target],
    [TransferSlot<PageNumbers, &'static [Target]>; TRANSFERS],
    [PeerSlot; 1],
>;
type Asked = Request<PageNumbers, &'static [Target]>;

/// `iw_status` of `embedded.h`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Ok = 0,
    Null = 1,
    BadArgument = 2,
    Full = 3,
    NotYet = 4,
    NotConnected = 5,
    Connected = 6,
}

/// `iw_end` of `embedded.h`.
#[repr(C)]
pub struct Ended {
    user: u64,
    done: u32,
}

/// The engine at the other end.
struct Other {
    id: PeerId,
    arena: MrDesc,
    way: Memory,
}

/// `iw_engine` of `embedded.h`.
pub struct Engine {
    id: EngineId,
    group: Group,
    arena: LocalMr,
    other: Option<Other>,
    /// Shared with the other engine; `iw_poll` of that one adds to it.
    counters: Counters,
}

const _: () = assert!(size_of::<Engine>() <= ENGINE_BYTES && align_of::<Engine>() <= ENGINE_ALIGN);

impl Engine {
    fn new(id: EngineId, base: u64, len: u64) -> Option<Self> {
        let nics = [NicConfig { state: NIC_STATE, queue_depth: DEPTH, takes: PieceLimits::ANY }];
        let transfers = [const { TransferSlot::new() }; TRANSFERS];
        let group = DomainGroup::new(CONFIG, &nics, transfers, [PeerSlot::new()]).ok()?;
        let arena = LocalMr { base, len, generation: 0, keys: Keys::new(&[id.0])? };
        let counters = CounterTable::new([const { CounterSlot::new() }; COUNTERS]);
        Some(Self { id, group, arena, other: None, counters })
    }

    /// The arena, as the other engine may write to it.
    const fn shown(&self) -> MrDesc {
        let LocalMr { base, len, generation, keys } = self.arena;
        MrDesc { owner: self.id, base, len, generation, rights: Rights::REMOTE_WRITE, keys }
    }

    fn connect(&mut self, engine: EngineId, arena: MrDesc, way: Memory) -> Status {
        let answer = Answer { nics: &[NIC_STATE], control: arena, heartbeat: Duration::MAX };
        match self.group.accept_peer(Time::ZERO, engine, &answer) {
            Ok(id) => {
                self.other = Some(Other { id, arena, way });
                Status::Ok
            }
            Err(_) => Status::Connected,
        }
    }

    fn submit(&mut self, request: Asked, user: u64) -> Status {
        let Ok(checked) = request.check() else {
            return Status::BadArgument;
        };
        let rejected = self.group.submit(checked, Options { deadline: Time::NEVER, user }).err();
        rejected.map_or(Status::Ok, |rejected| match rejected.error {
            SubmitError::Full { .. } => Status::Full,
            _ => Status::BadArgument,
        })
    }

    fn poll(&mut self) -> Option<Ended> {
        let other = self.other.as_mut()?;
        while let Some(work) = self.group.poll_work(NIC) {
            // SAFETY: the group only yields ranges that lie in the two arenas, which `iw_init`'s callers
            // keep where they are.
            if !unsafe { other.way.post(&work) } {
                // Not with as much room as the group has credits; but what was polled must be reported.
                self.group.handle_completion(
                    Time::ZERO,
                    NIC,
                    work.token,
                    Err(WorkError::Device(0)),
                );
            }
        }
        while let Some((token, outcome)) = other.way.poll() {
            self.group.handle_completion(Time::ZERO, NIC, token, outcome);
        }
        loop {
            // Of a peer that is up for ever, nothing else is to be done.
            if let Event::Ended { user, end, .. } = self.group.poll_event()? {
                return Some(Ended { user, done: u32::from(matches!(end, End::Done)) });
            }
        }
    }
}

/// Makes an engine in the caller's memory. See `embedded.h`.
///
/// # Safety
///
/// `storage` is NULL or `storage_bytes` bytes, `arena` is NULL or `arena_bytes` bytes; `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iw_init(
    storage: *mut c_void,
    storage_bytes: usize,
    id: u64,
    arena: *mut c_void,
    arena_bytes: usize,
    out: *mut *mut Engine,
) -> Status {
    if storage.is_null() || arena.is_null() || out.is_null() {
        return Status::Null;
    }
    let engine = storage.cast::<Engine>();
    if storage_bytes < ENGINE_BYTES || !(storage as usize).is_multiple_of(ENGINE_ALIGN) {
        return Status::BadArgument;
    }
    let Some(made) = Engine::new(EngineId(id), arena as u64, arena_bytes as u64) else {
        return Status::BadArgument;
    };
    // SAFETY: `storage` is large enough and aligned (checked above), and the caller's to lend; so is `out`.
    unsafe {
        engine.write(made);
        out.write(engine);
    }
    Status::Ok
}

/// Connects two engines. See `embedded.h`.
///
/// # Safety
///
/// Each is NULL or an engine that nobody else uses now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iw_connect(a: *mut Engine, b: *mut Engine) -> Status {
    if a.is_null() || b.is_null() {
        return Status::Null;
    }
    if a == b {
        return Status::BadArgument;
    }
    // SAFETY: both are engines, by the caller's promise, and not the same one. The pointers to the counters
    // are made from `a` and `b` themselves, so that they outlive these references; counters are only ever
    // shared, and stay where they are (`iw_init`).
    let (one, two, to_one, to_two) = unsafe {
        let ways = (&raw const (*a).counters, &raw const (*b).counters);
        (&mut *a, &mut *b, Memory::new(ways.0, (*a).id.0), Memory::new(ways.1, (*b).id.0))
    };
    if one.id == two.id {
        return Status::BadArgument;
    }
    if one.other.is_some() || two.other.is_some() {
        return Status::Connected;
    }
    let (id, arena) = (one.id, one.shown());
    match one.connect(two.id, two.shown(), to_two) {
        Status::Ok => two.connect(id, arena, to_one),
        refused => refused,
    }
}

/// Writes a range. See `embedded.h`.
///
/// # Safety
///
/// `engine` is NULL or an engine that nobody else uses now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iw_write(
    engine: *mut Engine,
    src: u64,
    dst: u64,
    bytes: u64,
    counter: u16,
    user: u64,
) -> Status {
    // SAFETY: the caller's promise.
    let Some(engine) = (unsafe { engine.as_mut() }) else {
        return Status::Null;
    };
    let Some(other) = &engine.other else {
        return Status::NotConnected;
    };
    let Some(imm) = tag(counter) else {
        return Status::BadArgument;
    };
    let write = SingleWrite {
        peer: other.id,
        src: engine.arena,
        src_offset: src,
        dst: other.arena,
        dst_offset: dst,
        len: bytes,
        imm: Some(imm),
    };
    engine.submit(Request::Single(write), user)
}

/// Writes pages. See `embedded.h`.
///
/// # Safety
///
/// `engine` is NULL or an engine that nobody else uses now; `src` and `dst` are NULL or `pages` numbers
/// each, which stay and do not change before the transfer has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iw_write_pages(
    engine: *mut Engine,
    src: *const u32,
    dst: *const u32,
    pages: usize,
    page_bytes: u64,
    counter: u16,
    user: u64,
) -> Status {
    if src.is_null() || dst.is_null() {
        return Status::Null;
    }
    // SAFETY: the caller's promise.
    let Some(engine) = (unsafe { engine.as_mut() }) else {
        return Status::Null;
    };
    let Some(other) = &engine.other else {
        return Status::NotConnected;
    };
    let Some(imm) = tag(counter) else {
        return Status::BadArgument;
    };
    // SAFETY: the caller's promise; the lists are not looked at after the end of the transfer, so that
    // `'static` is as long as they are needed.
    let (src, dst) =
        unsafe { (slice::from_raw_parts(src, pages), slice::from_raw_parts(dst, pages)) };
    let at = |indices| Pages { indices, stride: page_bytes, offset: 0 };
    let write = PagedWrite {
        peer: other.id,
        page_bytes,
        src: engine.arena,
        src_pages: at(src),
        dst: other.arena,
        dst_pages: at(dst),
        imm: Some(imm),
    };
    engine.submit(Request::Paged(write), user)
}

/// Makes progress. See `embedded.h`.
///
/// # Safety
///
/// `engine` is NULL or an engine that nobody else uses now, `out` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iw_poll(engine: *mut Engine, out: *mut Ended) -> Status {
    // SAFETY: the caller's promise.
    let (Some(engine), false) = (unsafe { engine.as_mut() }, out.is_null()) else {
        return Status::Null;
    };
    if engine.other.is_none() {
        return Status::NotConnected;
    }
    match engine.poll() {
        // SAFETY: the caller's promise, and not NULL.
        Some(ended) => unsafe { out.write(ended) },
        None => return Status::NotYet,
    }
    Status::Ok
}

/// Takes writes that have arrived. See `embedded.h`.
///
/// # Safety
///
/// `engine` is NULL or an engine that nobody else uses now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iw_consume(engine: *mut Engine, counter: u16, writes: u64) -> Status {
    // SAFETY: the caller's promise.
    let Some(engine) = (unsafe { engine.as_ref() }) else {
        return Status::Null;
    };
    let taken = tag(counter).map(|tag| engine.counters.consume(tag, writes));
    match taken {
        Some(Ok(true)) => Status::Ok,
        Some(Ok(false)) => Status::NotYet,
        _ => Status::BadArgument,
    }
}

/// The tag of one of our counters; they have one tenant for ever.
fn tag(counter: u16) -> Option<ImmTag> {
    ImmTag::new(counter, 0).filter(|tag| usize::from(tag.slot()) < COUNTERS)
}

unsafe extern "C" {
    /// Defined nowhere, so that an engine that could panic would not link.
    safe fn embedded_engine_can_panic() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    embedded_engine_can_panic()
}
