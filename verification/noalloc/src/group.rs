//! Planning and scheduling.

use immwire_core::group::{
    Answer, AskError, ConfigError, DomainGroup, Event, GroupConfig, LostSlot, NicConfig, Options,
    PeerSlot, PeersFull, Receipts, Rejected, Token, TransferSlot, WorkError, WorkRequest,
};
use immwire_core::id::{EngineId, NicIndex, PeerId, Time, TransferId};
use immwire_core::nic::{NicState, Routes};
use immwire_core::peer::DownReason;
use immwire_core::plan::{
    Checked, PeerTable, Piece, Plan, PlanError, PlanLimits, Request, RequestError, RunLayout,
    SingleWrite, Target,
};
use immwire_core::receipt::{Epoch, Settlement, SettlementError};
use immwire_core::region::MrDesc;

type Pages = &'static [u32];
type Targets = &'static [Target];
type Transfers = &'static mut [TransferSlot<Pages, Targets>];
type Lost = &'static mut [LostSlot];
type Group = DomainGroup<Pages, Targets, Transfers, &'static mut [PeerSlot], Lost>;

/// The peers of a plan that belongs to no group.
struct Table {
    routes: Option<Routes>,
    control: Option<MrDesc>,
}

impl PeerTable for Table {
    fn routes(&self, _: PeerId) -> Option<Routes> {
        self.routes
    }
    fn control(&self, _: PeerId) -> Option<MrDesc> {
        self.control
    }
}

// ---- plans ----

#[unsafe(no_mangle)]
extern "C" fn hp_plan_check(
    request: &Request<Pages, Targets>,
    out: &mut Result<Checked<Pages, Targets>, RequestError>,
) {
    *out = request.check();
}

#[unsafe(no_mangle)]
extern "C" fn hp_plan_new(
    request: &Checked<Pages, Targets>,
    limits: &PlanLimits,
    table: &Table,
    turn: u32,
    out: &mut Result<Plan<Pages, Targets>, PlanError>,
) {
    *out = Plan::new(*request, *limits, table, turn);
}

#[unsafe(no_mangle)]
extern "C" fn hp_plan_next(
    plan: &mut Plan<Pages, Targets>,
    nic: u8,
    table: &Table,
    out: &mut Option<Piece>,
) {
    *out = plan.next(nic, table);
}

#[unsafe(no_mangle)]
extern "C" fn hp_plan_reroute(plan: &mut Plan<Pages, Targets>, from: u8, to: u8) -> bool {
    plan.reroute(from, to)
}

#[unsafe(no_mangle)]
extern "C" fn hp_plan_drained(plan: &mut Plan<Pages, Targets>) -> bool {
    plan.drained()
}

// ---- the group ----

#[unsafe(no_mangle)]
extern "C" fn hp_group_new(
    config: &GroupConfig,
    nics: &&[NicConfig],
    storage: &mut Option<(Transfers, &'static mut [PeerSlot], Lost)>,
    out: &mut Option<Result<Group, ConfigError>>,
) {
    *out = storage.take().map(|(transfers, peers, lost)| {
        DomainGroup::with_failover(*config, nics, transfers, peers, lost)
    });
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_submit(
    group: &mut Group,
    request: &Checked<Pages, Targets>,
    options: &Options,
    out: &mut Result<TransferId, Rejected<Pages, Targets>>,
) {
    *out = group.submit(*request, *options);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_express(
    group: &mut Group,
    write: &SingleWrite,
    options: &Options,
    out: &mut Option<WorkRequest>,
) {
    *out = group.express(&write.by_ref(), *options);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_unhindered(
    group: &Group,
    write: &SingleWrite,
    out: &mut Option<(NicIndex, Piece)>,
) {
    *out = group.unhindered(&write.by_ref());
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_wrote(group: &mut Group, now: &Time, nic: u8, piece: &Piece) {
    group.wrote(*now, nic, piece);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_poll_work(group: &mut Group, nic: u8, out: &mut Option<WorkRequest>) {
    *out = group.poll_work(nic);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_poll_batch(group: &mut Group, nic: u8, pieces: usize, bytes: u64) -> u64 {
    let mut sum = 0_u64;
    group.poll_batch(nic, pieces, bytes, |work| sum = sum.wrapping_add(work.len));
    sum
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_page_run(
    group: &Group,
    work: &WorkRequest,
    src: &mut &mut [u32],
    dst: &mut &mut [u32],
    out: &mut Option<RunLayout>,
) {
    *out = group.page_run(work, src, dst);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_completion(
    group: &mut Group,
    now: &Time,
    nic: u8,
    token: u64,
    outcome: &Result<(), WorkError>,
) -> bool {
    group.handle_completion(*now, nic, Token::from_bits(token), *outcome)
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_poll_event(group: &mut Group, out: &mut Option<Event>) {
    *out = group.poll_event();
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_cancel(group: &mut Group, now: &Time, id: &TransferId) -> bool {
    group.cancel(*now, *id)
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_timeout(group: &mut Group, now: &Time) {
    group.handle_timeout(*now);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_nic_health(group: &mut Group, now: &Time, nic: u8, healthy: bool) {
    group.set_nic_health(*now, nic, healthy);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_beat(group: &mut Group, peer: &PeerId) {
    group.beat(*peer);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_has_work(group: &Group, nic: u8) -> bool {
    group.has_work(nic)
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_in_flight(group: &Group, peer: &PeerId, nic: u8) -> u16 {
    group.in_flight(*peer, nic)
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_add_peer(
    group: &mut Group,
    now: &Time,
    engine: u64,
    nics: &&[NicState],
    out: &mut Result<PeerId, PeersFull>,
) {
    *out = group.add_peer(*now, EngineId(engine), nics);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_accept_peer(
    group: &mut Group,
    now: &Time,
    engine: u64,
    answer: &Answer<'_>,
    out: &mut Result<PeerId, PeersFull>,
) {
    *out = group.accept_peer(*now, EngineId(engine), answer);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_connected(
    group: &mut Group,
    now: &Time,
    peer: &PeerId,
    answer: &Answer<'_>,
) {
    group.handle_connected(*now, *peer, answer);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_disconnected(
    group: &mut Group,
    now: &Time,
    peer: &PeerId,
    reason: &DownReason,
) {
    group.handle_disconnected(*now, *peer, *reason);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_heard(group: &mut Group, now: &Time, peer: &PeerId, used: bool) {
    group.handle_heard(*now, *peer, used);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_remove_peer(
    group: &mut Group,
    now: &Time,
    peer: &PeerId,
    reason: &DownReason,
) {
    group.remove_peer(*now, *peer, *reason);
}

// ---- paths that break ----

#[unsafe(no_mangle)]
extern "C" fn hp_group_path_broken(group: &mut Group, now: &Time, peer: &PeerId, nic: u8, to: u8) {
    group.handle_path_broken(*now, *peer, nic, to);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_path_restored(
    group: &mut Group,
    now: &Time,
    peer: &PeerId,
    nic: u8,
    to: u8,
) {
    group.handle_path_restored(*now, *peer, nic, to);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_undelivered(group: &mut Group, now: &Time, work: &WorkRequest) -> bool {
    group.handle_undelivered(*now, work)
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_answer(group: &mut Group, peer: &PeerId, nic: u8) {
    group.handle_answer(*peer, nic);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_settled(group: &mut Group, now: &Time, peer: &PeerId, nic: u8, to: u8) {
    group.handle_settled(*now, *peer, nic, to);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_unsettled(group: &mut Group, now: &Time, peer: &PeerId, nic: u8) {
    group.handle_unsettled(*now, *peer, nic);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_ask(
    group: &mut Group,
    peer: &PeerId,
    from: u8,
    to: u8,
    epoch: &Epoch,
    out: &mut Result<(), AskError>,
) {
    *out = group.handle_ask(*peer, from, to, *epoch);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_fenced(group: &mut Group, peer: &PeerId, from: u8) {
    group.handle_fenced(*peer, from);
}

#[unsafe(no_mangle)]
extern "C" fn hp_group_receipts(group: &mut Group, peer: &PeerId, receipts: &Receipts) {
    group.set_receipts(*peer, *receipts);
}

#[unsafe(no_mangle)]
extern "C" fn hp_receipt_encode(settlement: &Settlement, out: &mut [u8; 64]) {
    *out = settlement.to_bytes();
}

#[unsafe(no_mangle)]
extern "C" fn hp_receipt_decode(bytes: &&[u8], out: &mut Result<Settlement, SettlementError>) {
    *out = Settlement::from_bytes(bytes);
}
