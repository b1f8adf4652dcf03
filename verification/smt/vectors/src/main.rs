//! Evaluates the shipped arithmetic on pseudo-random, edge-heavy numbers, and prints questions and answers.
//!
//! A line is a vector: `kind | what went in | what came out`, numbers separated by spaces. It knows no right
//! answers: `verification/smt/compare.py` computes those from the transcription that is proved correct. A
//! count is brought into its state by calls of the public API alone, as any caller could.

use std::io::{BufWriter, Write};
use std::num::{NonZeroU16, NonZeroU64};

use immwire_core::id::{EngineId, PeerId};
use immwire_core::imm::{
    Added, Armed, CounterError, CounterSlot, CounterTable, Disarmed, Imm, ImmTag, MAX_UNITS,
};
use immwire_core::nic::{NicState, Routes, Split, SplitRule};
use immwire_core::plan::{
    PagedWrite, Pages, PeerTable, Piece, Plan, PlanLimits, Request, RequestError, Side,
    SingleWrite, Target,
};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};

/// Vectors of each kind, of a hundred.
const SHARES: [(Kind, u64); 7] =
    [(range, 20), (tag, 10), (count, 30), (routes, 6), (split, 18), (single, 10), (paged, 6)];

type Kind = fn(&mut Numbers) -> Vector;

/// Kind, what went in, what came out.
type Vector = (&'static str, Vec<u64>, Vec<u64>);

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let (Some(Ok(seed)), Some(Ok(vectors)), None) =
        (arguments.next(), arguments.next(), arguments.next())
    else {
        eprintln!("usage: immwire-vectors SEED COUNT");
        std::process::exit(2);
    };
    let mut numbers = Numbers(seed);
    let mut out = BufWriter::new(std::io::stdout().lock());
    for number in 0..vectors {
        let mut place = number % 100;
        let kind = SHARES.iter().find(|(_, share)| {
            let here = place < *share;
            place = place.wrapping_sub(*share);
            here
        });
        let (name, question, answer) = kind.expect("the shares add up to 100").0(&mut numbers);
        let text = |numbers: &[u64]| numbers.iter().map(|n| format!(" {n}")).collect::<String>();
        writeln!(out, "{name}|{}|{}", text(&question), text(&answer)).expect("standard output");
    }
}

/// A source of numbers that look for trouble (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `end`, evenly.
    fn below(&mut self, end: u64) -> u64 {
        self.any() % end
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }

    /// Small, near a power of two, near the end, or of any number of bits.
    fn edge(&mut self) -> u64 {
        let near = self.below(7).wrapping_sub(3);
        match self.below(5) {
            0 => self.below(40),
            1 => (1_u64 << self.below(64)).wrapping_add(near),
            2 => u64::MAX - self.below(40),
            _ => self.any() >> self.below(64),
        }
    }

    /// An edge that is at most `most`.
    fn edge_to(&mut self, most: u64) -> u64 {
        match self.below(4) {
            0 => most - self.below(most.saturating_add(1).min(4)),
            _ => {
                let edge = self.edge();
                most.checked_add(1).map_or(edge, |end| edge % end)
            }
        }
    }
}

fn positive(number: u64) -> NonZeroU64 {
    NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN)
}

const PEER: PeerId = PeerId { index: 0, generation: 0 };

fn keys() -> Keys {
    Keys::new(&[0, 1, 2, 3, 4, 5, 6, 7]).expect("eight keys")
}

fn desc(base: u64, len: u64) -> MrDesc {
    let (owner, rights) = (EngineId(1), Rights::REMOTE_WRITE);
    MrDesc { owner, base, len, generation: 0, rights, keys: keys() }
}

fn local(base: u64, len: u64) -> LocalMr {
    LocalMr { base, len, generation: 0, keys: keys() }
}

fn range(numbers: &mut Numbers) -> Vector {
    let (base, len) = (numbers.edge(), numbers.edge());
    let offset = if numbers.one_in(2) { numbers.edge() } else { numbers.edge_to(len) };
    let bytes = if numbers.one_in(2) {
        numbers.edge()
    } else {
        len.wrapping_sub(offset).wrapping_add(numbers.below(3)).wrapping_sub(1)
    };
    let there = desc(base, len).range(offset, bytes);
    let here = local(base, len).range(offset, bytes);
    let text = |range: Result<u64, _>| range.map_or([0, 0], |address| [1, address]);
    let answer = [text(there), text(here)].concat();
    ("range", vec![base, len, offset, bytes], answer)
}

/// Fields into bits, and bits into fields.
fn tag(numbers: &mut Numbers) -> Vector {
    // In range, or in the type's.
    let wide = numbers.one_in(4);
    let mut edge = |narrow: u64, all: u64| numbers.edge_to(if wide { all } else { narrow });
    let slot = u16::try_from(edge(16_383, 65_535)).unwrap_or(0);
    let generation = u8::try_from(edge(63, 255)).unwrap_or(0);
    let units = u16::try_from(edge(4095, 65_535)).unwrap_or(0);
    let bits = u32::try_from(numbers.edge_to(u64::from(u32::MAX))).unwrap_or(0);
    let made = ImmTag::new(slot, generation).and_then(|tag| tag.with_units(units));
    let (imm, tag) = (Imm::from_bits(bits), Imm::from_bits(bits).tag());
    let question = vec![slot.into(), generation.into(), units.into(), bits.into()];
    let mut answer = made.map_or([0, 0], |imm| [1, imm.bits().into()]).to_vec();
    answer.extend::<[u64; 3]>([tag.slot().into(), tag.generation().into(), imm.units().into()]);
    answer.push(ImmTag::from_bits(bits).is_some().into());
    answer.push(tag.with_units(imm.units()).map_or(u64::MAX, |imm| imm.bits().into()));
    ("tag", question, answer)
}

/// A counter of that generation, with that much there or missing; as near as the API gets.
fn prepared(table: &CounterTable<Vec<CounterSlot>>, generation: u8, armed: bool, value: u64) {
    let tag = |table: &CounterTable<Vec<CounterSlot>>| table.tag(0).expect("slot 0");
    for _ in 0..generation {
        let _ = table.retire(tag(table));
    }
    let now = tag(table);
    let add = |units: u64| {
        let units = u16::try_from(units).unwrap_or(0);
        let _ = table.add(now.with_units(units).expect("at most 4095"));
    };
    if armed {
        // 16 n - what is there is missing.
        let writes = value.div_ceil(16);
        add(writes * 16 - value);
        let _ = table.arm(now, writes.min(MAX_UNITS / 16));
        return;
    }
    // Of a target of one write, some units have come; of a larger one, so many more.
    let rest = value % 16;
    add(rest);
    let writes = (value / 16 + 1).min(MAX_UNITS / 16);
    let _ = table.arm(now, 1);
    let _ = table.disarm(now, writes);
    let there = table.available(now).unwrap_or(0);
    add(value - there);
}

fn count(numbers: &mut Numbers) -> Vector {
    let table = CounterTable::new(vec![CounterSlot::new()]);
    let generation = u8::try_from(numbers.below(64)).unwrap_or(0);
    let value = match numbers.below(3) {
        0 => numbers.below(70),
        1 => MAX_UNITS - numbers.below(70),
        _ => numbers.edge_to(MAX_UNITS),
    };
    prepared(&table, generation, numbers.one_in(2), value);
    let state = |table: &CounterTable<Vec<CounterSlot>>| {
        let tag = table.tag(0).expect("slot 0");
        let missing = table.missing(tag).expect("its own tag");
        let value = missing.unwrap_or_else(|| table.available(tag).unwrap_or(u64::MAX));
        [tag.generation().into(), missing.is_some().into(), value]
    };
    let before = state(&table);
    let operation = numbers.below(5);
    let asked = if numbers.one_in(8) { numbers.below(64) } else { u64::from(generation) };
    let tag = ImmTag::new(0, u8::try_from(asked).unwrap_or(0)).expect("in range");
    let near = (before[2] / 16).wrapping_add(numbers.below(5)).wrapping_sub(2);
    let argument = match operation {
        0 if numbers.one_in(2) => before[2].min(4095).saturating_sub(numbers.below(3)),
        0 => numbers.edge_to(4095),
        _ if numbers.one_in(2) => near,
        _ => numbers.edge(),
    };
    let outcome = match operation {
        0 => {
            let units = u16::try_from(argument).unwrap_or(0);
            let added = table.add(tag.with_units(units).expect("at most 4095"));
            [
                [Added::Counted, Added::Fired, Added::Stale, Added::Overflow]
                    .iter()
                    .position(|outcome| *outcome == added)
                    .map_or(99, |at| at as u64),
                0,
            ]
        }
        1 => table.arm(tag, argument).map_or_else(refused, |armed| match armed {
            Armed::Ready => [4, 0],
            Armed::Waiting { missing_units } => [5, missing_units],
        }),
        2 => table.disarm(tag, argument).map_or_else(refused, |disarmed| match disarmed {
            Disarmed::AlreadyFired => [8, 0],
            Disarmed::Withdrawn { missing_units } => [9, missing_units],
        }),
        3 => table
            .consume(tag, argument)
            .map_or_else(refused, |done| [if done { 11 } else { 12 }, 0]),
        _ => table.retire(tag).map_or_else(refused, |left| [13, left]),
    };
    let question = [&before[..], &[operation, asked, argument]].concat();
    ("count", question, [&outcome[..], &state(&table)].concat())
}

fn refused(error: CounterError) -> [u64; 2] {
    match error {
        CounterError::Stale { current, .. } => [2, current.into()],
        CounterError::AlreadyArmed { missing_units } => [6, missing_units],
        CounterError::TooLarge { writes } => [7, writes],
        CounterError::WrongTarget { missing_units, .. } => [10, missing_units],
        _ => [99, 0],
    }
}

/// Any 32 bits: a speed, or whose turn it is.
fn word(numbers: &mut Numbers) -> u32 {
    u32::try_from(numbers.edge_to(u64::from(u32::MAX))).unwrap_or(0)
}

fn speeds(numbers: &mut Numbers) -> Vec<NicState> {
    let count = numbers.below(8) + 1;
    let alike = numbers.one_in(2);
    let one = word(numbers);
    let speed = |_| {
        let other = word(numbers);
        NicState { speed: if alike { one } else { other }, healthy: true }
    };
    (0..count).map(speed).collect()
}

fn routes_text(routes: Option<&Routes>) -> Vec<u64> {
    let routes = routes.map_or(&[][..], Routes::as_slice);
    let each = |route: &immwire_core::nic::Route| {
        [route.local.into(), route.remote.into(), route.weight.into()]
    };
    routes.iter().flat_map(each).collect()
}

fn routes(numbers: &mut Numbers) -> Vector {
    let (local, remote) = (speeds(numbers), speeds(numbers));
    let answer = routes_text(Routes::new(&local, &remote).as_ref());
    let speeds = |nics: &[NicState]| nics.iter().map(|nic| nic.speed.into()).collect::<Vec<u64>>();
    let question = [&[local.len() as u64][..], &speeds(&local), &speeds(&remote)].concat();
    ("routes", question, answer)
}

/// Routes that there are.
fn some_routes(numbers: &mut Numbers) -> Routes {
    loop {
        if let Some(routes) = Routes::new(&speeds(numbers), &speeds(numbers)) {
            return routes;
        }
    }
}

fn split(numbers: &mut Numbers) -> Vector {
    let (len, dst) = (numbers.edge(), numbers.edge());
    let routes = some_routes(numbers);
    let min = match numbers.below(3) {
        0 => len / (numbers.below(12) + 1),
        _ => numbers.edge_to(len),
    };
    let granule = match numbers.below(3) {
        0 => 1 << numbers.below(64),
        _ => numbers.edge(),
    };
    let (min_piece_bytes, granule_bytes) = (positive(min), positive(granule));
    let rule = SplitRule { min_piece_bytes, granule_bytes };
    let turn = word(numbers);
    let split = Split::bytes(len, dst, &routes, rule, turn);
    let answer = (0..routes.as_slice().len())
        .flat_map(|route| [split.range(route).start, split.range(route).end])
        .collect();
    let mut question = vec![len, dst, min_piece_bytes.get(), granule_bytes.get(), turn.into()];
    question.extend(routes_text(Some(&routes)));
    ("split", question, answer)
}

struct Table(Routes);

impl PeerTable for Table {
    fn routes(&self, _: PeerId) -> Option<Routes> {
        Some(self.0)
    }
    fn control(&self, _: PeerId) -> Option<MrDesc> {
        None
    }
}

const TAG_SLOT: u16 = 9;

fn limits(numbers: &mut Numbers, len: u64) -> PlanLimits {
    // At most some forty pieces: what is to be looked at is where they lie.
    let least = (len / (numbers.below(24) + 1)).saturating_add(1);
    let most = if numbers.one_in(3) { least } else { least.saturating_add(numbers.edge()) };
    let min = if numbers.one_in(2) { len / (numbers.below(12) + 1) } else { numbers.edge() };
    let granule = match numbers.below(4) {
        0 => numbers.edge(),
        1 => numbers.edge_to(most),
        _ => 1 << numbers.below(20),
    };
    let rule = SplitRule { min_piece_bytes: positive(min), granule_bytes: positive(granule) };
    // Runs are read from the lists, not planned: there is no arithmetic to compare.
    let pages_per_piece = NonZeroU16::MIN;
    PlanLimits { max_message_bytes: positive(most), pages_per_piece, rule }
}

/// All pieces of the request, as the numbers of each: NICs, addresses, length, immediate or none.
fn plan(
    request: Request<&[u64], &[Target]>,
    limits: PlanLimits,
    routes: &Routes,
    turn: u32,
) -> Vec<u64> {
    let checked = match request.check() {
        Ok(checked) => checked,
        Err(RequestError::PageOutOfRegion { side, list_index, .. }) => {
            return vec![0, u64::from(side == Side::Destination), list_index as u64];
        }
        Err(other) => panic!("refused: {other}"),
    };
    let table = Table(*routes);
    let mut plan = Plan::new(checked, limits, &table, turn).expect("there is a route");
    let mut answer = vec![1];
    loop {
        for nic in 0..8 {
            while let Some(piece) = plan.next(nic, &table) {
                let Piece { remote_nic, src, dst, len, imm, .. } = piece;
                let imm = imm.map_or(u64::MAX, |imm| imm.bits().into());
                answer.extend([nic.into(), remote_nic.into(), src, dst, len, imm]);
            }
        }
        if !plan.drained() {
            return answer;
        }
    }
}

fn limits_text(limits: PlanLimits) -> [u64; 3] {
    let PlanLimits { max_message_bytes, rule, .. } = limits;
    [max_message_bytes.get(), rule.min_piece_bytes.get(), rule.granule_bytes.get()]
}

fn announced(numbers: &mut Numbers) -> Option<ImmTag> {
    if numbers.one_in(6) { None } else { ImmTag::new(TAG_SLOT, 3) }
}

/// A base and an offset such that `len` bytes from there end below 2^64.
fn place(numbers: &mut Numbers, len: u64) -> (u64, u64) {
    let base = numbers.edge_to(u64::MAX - len);
    (base, numbers.edge_to(u64::MAX - len - base))
}

fn single(numbers: &mut Numbers) -> Vector {
    let len = if numbers.one_in(2) { numbers.edge() } else { numbers.below(5000) };
    let ((src, src_offset), (dst, dst_offset)) = (place(numbers, len), place(numbers, len));
    let (limits, routes, turn) = (limits(numbers, len), some_routes(numbers), word(numbers));
    let imm = announced(numbers);
    let write = SingleWrite {
        peer: PEER,
        src: local(src, src_offset + len),
        src_offset,
        dst: desc(dst, dst_offset + len),
        dst_offset,
        len,
        imm,
    };
    let answer = plan(Request::Single(write), limits, &routes, turn);
    let mut question =
        vec![src, src_offset, dst, dst_offset, len, turn.into(), imm.is_some().into()];
    question.extend(limits_text(limits));
    question.extend(routes_text(Some(&routes)));
    ("single", question, answer)
}

/// Page numbers with runs in them.
fn page_list(numbers: &mut Numbers, count: u64) -> Vec<u64> {
    let (far, mut page) = (numbers.one_in(3), numbers.below(5));
    let next = |_| {
        page = match numbers.below(6) {
            0 if far => numbers.edge(),
            0 | 1 => numbers.below(40),
            _ => page.wrapping_add(1),
        };
        page
    };
    (0..count).map(next).collect()
}

fn paged(numbers: &mut Numbers) -> Vector {
    let page_bytes = match numbers.below(4) {
        0 => 0,
        1 => numbers.edge(),
        _ => numbers.below(3000),
    };
    // Many only where one immediate stands for many.
    let many = page_bytes == 0 && numbers.one_in(2);
    let count = if many { numbers.below(1200) } else { numbers.below(14) + 1 };
    let pages = if numbers.one_in(2) { 1 } else { 9 };
    let limits = limits(numbers, page_bytes.saturating_mul(pages));
    let side = |numbers: &mut Numbers| {
        let stride = if numbers.one_in(4) { numbers.edge() } else { page_bytes };
        let (base, offset) = (numbers.edge(), numbers.edge_to(1 << 20));
        let len = if numbers.one_in(8) { numbers.edge() } else { u64::MAX - base };
        (stride, base, offset, len, page_list(numbers, count))
    };
    let (
        (src_stride, src, src_offset, src_len, src_pages),
        (dst_stride, dst, dst_offset, dst_len, dst_pages),
    ) = (side(numbers), side(numbers));
    let (routes, turn, imm) = (some_routes(numbers), word(numbers), announced(numbers));
    let write = PagedWrite {
        peer: PEER,
        page_bytes,
        src: local(src, src_len),
        src_pages: Pages { indices: &src_pages[..], stride: src_stride, offset: src_offset },
        dst: desc(dst, dst_len),
        dst_pages: Pages { indices: &dst_pages[..], stride: dst_stride, offset: dst_offset },
        imm,
    };
    let answer = plan(Request::Paged(write), limits, &routes, turn);
    let mut question = vec![count, page_bytes, turn.into(), imm.is_some().into()];
    question.extend(limits_text(limits));
    question.extend([src_stride, src, src_offset, src_len, dst_stride, dst, dst_offset, dst_len]);
    question.extend(src_pages.iter().chain(&dst_pages));
    question.extend(routes_text(Some(&routes)));
    ("paged", question, answer)
}
