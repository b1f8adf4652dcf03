//! Kernels for mixtures of experts: launches that are right, and each way in which one is not. What comes of exchanges is compared
//! elsewhere (`benches/gpu`).

use crate::rig::*;
use crate::{call, got, ok};
use cudarc::driver::sys::{self as cu, CUresult};
use immwire_cuda::moe::args::{self, MoeArgs, MoeControl, MoeReport};
use immwire_cuda::moe::geometry::{Geometry, Number, Payload, Shape};
use std::ffi::{CStr, c_void};
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::Duration;

const TOKENS: u32 = 6;
const VALUES: u32 = 64;
const TOKEN_BYTES: u32 = 48;
const HOUR_NS: u64 = 3_600_000_000_000;

/// A rank with all its memory, of a world whose inboxes are all on its GPU.
struct Rank {
    gpu: Gpu,
    geometry: Geometry,
    args: MoeArgs,
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    depth: u32,
}

impl Rank {
    /// One expert each, that every token chooses: with `world` of them.
    fn new(world: u32) -> Self {
        Self::on(Gpu::open(0), world)
    }

    fn on(gpu: Gpu, world: u32) -> Self {
        let shape = Shape {
            firsts: (0..=world).collect(),
            top_k: 2,
            max_tokens: TOKENS,
            payload: Payload::Raw { token_bytes: TOKEN_BYTES, scale_bytes: 8 },
            values: VALUES,
            results: Number::Bf16,
            padding: 1,
            exact: false,
        };
        let geometry = Geometry::new(&shape).unwrap();
        let rows = geometry.max_rows as u32;
        let report = pinned(size_of::<MoeReport>());
        report.bytes(size_of::<MoeReport>()).fill(0);
        let mut args = MoeArgs {
            control: gpu.alloc(size_of::<MoeControl>()),
            report: report.0,
            plan: gpu.alloc(geometry.plan_bytes as usize),
            masks: gpu.alloc(8 * TOKENS as usize),
            x: gpu.alloc((TOKENS * TOKEN_BYTES) as usize),
            scales: gpu.alloc((TOKENS * 8) as usize),
            indices: gpu.alloc((TOKENS * 2 * 4) as usize),
            weights: gpu.alloc((TOKENS * 2 * 4) as usize),
            rows_x: gpu.alloc((rows * TOKEN_BYTES) as usize),
            rows_scales: gpu.alloc((rows * 8) as usize),
            counts: gpu.alloc(4),
            offsets: gpu.alloc(8),
            y: gpu.alloc((rows * VALUES * 2) as usize),
            out: gpu.alloc((TOKENS * VALUES * 2) as usize),
            timeout_ns: HOUR_NS,
            table_bytes: geometry.table_bytes,
            dispatch_at: geometry.dispatch_at,
            combine_at: geometry.combine_at,
            dispatch_stride: geometry.dispatch_stride,
            combine_stride: geometry.combine_stride,
            plan_stride: geometry.plan_stride,
            world,
            top_k: 2,
            max_tokens: TOKENS,
            tokens: TOKENS,
            token_bytes: TOKEN_BYTES,
            scale_bytes: 8,
            values: VALUES,
            padding: 1,
            rows,
            flags: args::SEND | args::RECEIVE,
            results_each: 1,
            ..MoeArgs::default()
        };
        for (place, first) in args.firsts.as_flattened_mut().iter_mut().zip(&shape.firsts) {
            *place = *first;
        }
        for inbox in &mut args.inbox[..world as usize] {
            *inbox = gpu.alloc(geometry.inbox_bytes as usize);
            let slots = (geometry.inbox_bytes - geometry.dispatch_at) as usize;
            ok!(cuMemsetD8Async(*inbox + geometry.dispatch_at, 0xff, slots, gpu.stream));
        }
        ok!(cuMemsetD8Async(args.control, 1, 1, gpu.stream));
        // Of each token the first choice is expert 0, with weight 1, and the second is none.
        let choices: Vec<u8> = [0_i32, -1].map(i32::to_ne_bytes).concat().repeat(TOKENS as usize);
        let weights = [1_f32, 0.0].map(f32::to_ne_bytes).concat().repeat(TOKENS as usize);
        for (to, bytes) in [(args.indices, choices), (args.weights, weights)] {
            put(&gpu, to, &bytes);
        }
        let shared_bytes = geometry.dispatch_shared_bytes;
        Self { gpu, geometry, args, blocks: 2, threads: args::THREADS, shared_bytes, depth: 1 }
    }

    fn launch(&self, name: &CStr, stream: cu::CUstream) {
        let function = got!(cuModuleGetFunction(self.gpu.module, name.as_ptr()));
        let mut args = self.args;
        let mut parameters = [(&raw mut args).cast::<c_void>()];
        ok!(cuLaunchKernel(
            function,
            self.blocks,
            1,
            self.depth,
            self.threads,
            1,
            1,
            self.shared_bytes,
            stream,
            parameters.as_mut_ptr(),
            null_mut(),
        ));
    }

    fn dispatch(&self) {
        self.launch(c"immwire_moe_dispatch_raw", self.gpu.stream);
    }

    fn combine(&self) {
        self.launch(c"immwire_moe_combine_bf16", self.gpu.stream);
    }

    fn report(&self) -> MoeReport {
        let bytes = Pinned(self.args.report).bytes(size_of::<MoeReport>());
        // SAFETY: as many bytes, of numbers only, and no kernel runs.
        unsafe { bytes.as_ptr().cast::<MoeReport>().read_unaligned() }
    }
}

fn put(gpu: &Gpu, to: u64, bytes: &[u8]) {
    let host = pinned(bytes.len());
    host.bytes(bytes.len()).copy_from_slice(bytes);
    gpu.copy(to, host.0, bytes.len());
}

/// A rank alone is launched that `change` has made wrong.
fn wrong(change: impl FnOnce(&mut Rank)) {
    let mut rank = Rank::new(1);
    change(&mut rank);
    rank.dispatch();
    rank.gpu.settle();
}

#[test]
fn a_rank_alone() {
    run("exchange::a_rank_alone", End::Kept, &[], || {
        let rank = Rank::new(1);
        let a = &rank.args;
        let x: Vec<u8> = (0..TOKENS * TOKEN_BYTES).map(|i| (i * 7) as u8).collect();
        let y: Vec<u8> = (0..TOKENS * VALUES).flat_map(|i| (i as u16).to_ne_bytes()).collect();
        put(&rank.gpu, a.x, &x);
        put(&rank.gpu, a.y, &y);
        for _ in 0..3 {
            rank.dispatch();
            rank.combine();
            rank.gpu.settle();
            assert_eq!(rank.gpu.read(a.rows_x, x.len()), x);
            assert_eq!(rank.gpu.read(a.out, y.len()), y);
            assert_eq!(rank.gpu.read(a.offsets, 8), [0, TOKENS].map(u32::to_ne_bytes).concat());
        }
        assert_eq!(rank.report(), MoeReport::default());
    });
}

#[test]
fn a_rank_that_never_comes() {
    run("exchange::a_rank_that_never_comes", End::Kept, &[], || {
        let mut rank = Rank::new(2);
        rank.args.timeout_ns = 20_000_000;
        rank.dispatch();
        rank.combine();
        rank.gpu.settle();
        let mut report = MoeReport::default();
        report.late_table[1] = 1;
        assert_eq!(rank.report(), report);
    });
}

#[test]
fn an_abort_ends_a_launch() {
    run("exchange::an_abort_ends_a_launch", End::Kept, &[], || {
        let rank = Rank::new(2);
        rank.dispatch();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(call!(cuStreamQuery(rank.gpu.stream)), CUresult::CUDA_ERROR_NOT_READY);
        let another = got!(cuStreamCreate(1));
        let abort = rank.args.control + offset_of!(MoeControl, abort) as u64;
        ok!(cuStreamWriteValue64_v2(another, abort, 1, 0));
        rank.gpu.settle();
        assert_eq!(rank.report().late_table[1], 1);
    });
}

#[test]
fn inbox_freed_under_a_launch() {
    run("exchange::inbox_freed_under_a_launch", End::Broken("memory in use"), &[], || {
        let rank = Rank::new(2);
        // It waits for the other rank.
        rank.dispatch();
        std::thread::sleep(Duration::from_millis(50));
        call!(cuMemFree_v2(rank.args.inbox[1]));
    });
}

#[test]
fn inbox_unmapped_under_a_launch() {
    run("exchange::inbox_unmapped_under_a_launch", End::Broken("memory in use"), &[], || {
        let mut rank = Rank::new(2);
        let properties = properties(1);
        let address = map(&[got!(cuMemCreate(GRANULE, &raw const properties, 0))]);
        assert_eq!(allow(address, GRANULE, 0, WRITE), CUresult::CUDA_SUCCESS);
        rank.args.inbox[1] = address;
        rank.dispatch();
        call!(cuMemUnmap(address, GRANULE));
    });
}

#[test]
fn rows_freed_under_a_launch() {
    run("exchange::rows_freed_under_a_launch", End::Broken("memory in use"), &[], || {
        let rank = Rank::new(1);
        rank.gpu.hold();
        rank.dispatch();
        call!(cuMemFree_v2(rank.args.rows_scales));
    });
}

#[test]
fn uncounted_tokens_freed_under_a_launch() {
    run(
        "exchange::uncounted_tokens_freed_under_a_launch",
        End::Broken("memory in use"),
        &[],
        || {
            let mut rank = Rank::new(1);
            rank.args.tokens_at = rank.gpu.alloc(4);
            rank.gpu.hold();
            rank.dispatch();
            call!(cuMemFree_v2(rank.args.weights));
        },
    );
}

#[test]
fn results_freed_under_a_launch() {
    run("exchange::results_freed_under_a_launch", End::Broken("memory in use"), &[], || {
        let rank = Rank::new(1);
        rank.dispatch();
        rank.gpu.hold();
        rank.combine();
        call!(cuMemFree_v2(rank.args.y));
    });
}

#[test]
fn too_little_shared_memory() {
    run("exchange::too_little_shared_memory", End::Broken("geometry"), &[], || {
        wrong(|rank| rank.shared_bytes -= 4);
    });
}

#[test]
fn more_shared_memory_than_asked_for() {
    run("exchange::more_shared_memory_than_asked_for", End::Broken("geometry"), &[], || {
        wrong(|rank| rank.shared_bytes = 50 << 10);
    });
}

#[test]
fn half_as_many_threads_out() {
    run("exchange::half_as_many_threads_out", End::Kept, &[], || {
        wrong(|rank| rank.threads = args::FEW_THREADS);
    });
}

#[test]
fn half_as_many_threads_back() {
    run("exchange::half_as_many_threads_back", End::Broken("geometry"), &[], || {
        let mut rank = Rank::new(1);
        rank.dispatch();
        rank.threads = args::FEW_THREADS;
        rank.combine();
    });
}

#[test]
fn too_many_threads() {
    run("exchange::too_many_threads", End::Broken("geometry"), &[], || {
        wrong(|rank| rank.threads *= 2);
    });
}

#[test]
fn three_dimensions() {
    run("exchange::three_dimensions", End::Broken("geometry"), &[], || {
        wrong(|rank| rank.depth = 2);
    });
}

#[test]
fn more_blocks_than_sms() {
    run("exchange::more_blocks_than_sms", End::Broken("geometry"), &[], || {
        wrong(|rank| rank.blocks = 9);
    });
}

#[test]
fn no_room_for_two_launches() {
    run("exchange::no_room_for_two_launches", End::Broken("geometry"), &[], || {
        let one = Rank::new(2);
        let mut other = Rank::on(one.gpu, 2);
        other.blocks = 7;
        one.dispatch();
        let another = got!(cuStreamCreate(1));
        other.launch(c"immwire_moe_dispatch_raw", another);
        ok!(cuStreamSynchronize(another));
    });
}

#[test]
fn neither_sends_nor_receives() {
    run("exchange::neither_sends_nor_receives", End::Broken("geometry"), &[], || {
        wrong(|rank| rank.args.flags = args::CLEAR_PADDING);
    });
}

#[test]
fn a_rank_past_the_last() {
    run("exchange::a_rank_past_the_last", End::Broken("geometry"), &[], || {
        wrong(|rank| rank.args.rank = 1);
    });
}

#[test]
fn tokens_that_overlap_results() {
    run("exchange::tokens_that_overlap_results", End::Broken("geometry"), &[], || {
        wrong(|rank| rank.args.combine_at -= 128);
    });
}

#[test]
fn no_room_for_a_key() {
    run("exchange::no_room_for_a_key", End::Broken("geometry"), &[], || {
        wrong(|rank| {
            rank.args.token_bytes = 128;
            rank.args.scale_bytes = 0;
        });
    });
}

#[test]
fn misaligned_inbox() {
    run("exchange::misaligned_inbox", End::Broken("misaligned"), &[], || {
        wrong(|rank| rank.args.inbox[0] += 64);
    });
}

#[test]
fn misaligned_tokens() {
    run("exchange::misaligned_tokens", End::Broken("misaligned"), &[], || {
        wrong(|rank| rank.args.x += 8);
    });
}

#[test]
fn an_inbox_too_short() {
    run("exchange::an_inbox_too_short", End::Broken("not in live memory"), &[], || {
        wrong(|rank| {
            rank.args.inbox[0] = rank.gpu.alloc(rank.args.combine_at as usize - 1);
        });
    });
}

#[test]
fn an_inbox_too_short_for_results() {
    let name = "exchange::an_inbox_too_short_for_results";
    run(name, End::Broken("not in live memory"), &[], || {
        let mut rank = Rank::new(1);
        rank.dispatch();
        rank.gpu.settle();
        rank.args.inbox[0] = rank.gpu.alloc(rank.geometry.inbox_bytes as usize - 1);
        rank.combine();
        rank.gpu.settle();
    });
}

/// There is room for one result of each rank, and more may come.
#[test]
fn too_little_room_for_exact_sums() {
    let name = "exchange::too_little_room_for_exact_sums";
    run(name, End::Broken("results_each"), &[], || {
        let mut rank = Rank::new(1);
        rank.args.firsts[0][1] = 2;
        rank.launch(c"immwire_moe_combine_exact_bf16", rank.gpu.stream);
        rank.gpu.settle();
    });
}

#[test]
fn rows_past_the_end() {
    run("exchange::rows_past_the_end", End::Broken("not in live memory"), &[], || {
        wrong(|rank| rank.args.rows += 1);
    });
}

#[test]
fn counted_tokens_past_the_end() {
    run("exchange::counted_tokens_past_the_end", End::Broken("not in live memory"), &[], || {
        wrong(|rank| {
            rank.args.tokens_at = rank.gpu.alloc(4);
            put(&rank.gpu, rank.args.tokens_at, &TOKENS.to_ne_bytes());
            rank.args.scales = rank.gpu.alloc(TOKENS as usize * 8 - 4);
        });
    });
}

#[test]
fn results_past_the_end() {
    run("exchange::results_past_the_end", End::Broken("not in live memory"), &[], || {
        let mut rank = Rank::new(1);
        rank.dispatch();
        rank.args.y = rank.gpu.alloc((TOKENS * VALUES * 2 - 2) as usize);
        rank.combine();
        rank.gpu.settle();
    });
}

#[test]
fn inbox_of_a_peer_without_access() {
    run("exchange::inbox_of_a_peer_without_access", End::Broken("no access"), &[], || {
        let other = Gpu::open(1);
        let inbox = other.alloc(1 << 20);
        let mut rank = Rank::new(2);
        rank.args.inbox[1] = inbox;
        rank.dispatch();
    });
}

#[test]
fn control_on_another_gpu() {
    run("exchange::control_on_another_gpu", End::Broken("misplaced"), &[], || {
        let other = Gpu::open(1);
        let control = other.alloc(size_of::<MoeControl>());
        let mut rank = Rank::new(1);
        ok!(cuCtxEnablePeerAccess(other.context, 0));
        rank.args.control = control;
        rank.dispatch();
    });
}

#[test]
fn report_in_gpu_memory() {
    run("exchange::report_in_gpu_memory", End::Broken("misplaced"), &[], || {
        wrong(|rank| rank.args.report = rank.gpu.alloc(size_of::<MoeReport>()));
    });
}

#[test]
fn inbox_of_another_process() {
    run("exchange::inbox_of_another_process", End::Kept, &[], || {
        if is_peer() {
            // Rank 1, which has the inbox of rank 0 from its process, and lends its own.
            let gpu = Gpu::open(1);
            let mut rank = Rank::on(gpu, 2);
            (rank.args.rank, rank.args.inbox[0]) =
                (1, got!(cuIpcOpenMemHandle_v2(unhex(&hear()), 1)));
            let own: cu::CUipcMemHandle = got!(cuIpcGetMemHandle(rank.args.inbox[1]));
            say(&hex(&own.reserved));
            rank.dispatch();
            rank.combine();
            rank.gpu.settle();
            assert_eq!(rank.report(), MoeReport::default());
            say("done");
            assert_eq!(hear(), "done");
            return;
        }
        let mut rank = Rank::new(2);
        let own: cu::CUipcMemHandle = got!(cuIpcGetMemHandle(rank.args.inbox[0]));
        let mut peer = peer(&[]);
        peer.tell(&hex(&own.reserved));
        rank.args.inbox[1] = got!(cuIpcOpenMemHandle_v2(unhex(&peer.hear()), 1));
        rank.dispatch();
        rank.combine();
        rank.gpu.settle();
        assert_eq!(rank.report(), MoeReport::default());
        // All tokens of both chose the expert here.
        let rows = rank.gpu.read(rank.args.offsets, 8);
        assert_eq!(rows, [0, 2 * TOKENS].map(u32::to_ne_bytes).concat());
        assert_eq!(peer.hear(), "done");
        peer.tell("done");
        peer.end();
    });
}

#[test]
fn tokens_are_counted_when_a_launch_runs() {
    run("exchange::tokens_are_counted_when_a_launch_runs", End::Kept, &[], || {
        let mut rank = Rank::new(1);
        rank.args.tokens_at = rank.gpu.alloc(4);
        let number = pinned(4);
        number.bytes(4).copy_from_slice(&2_u32.to_ne_bytes());
        let held = rank.gpu.hold();
        ok!(cuMemcpyAsync(rank.args.tokens_at, number.0, 4, rank.gpu.stream));
        rank.dispatch();
        held.store(1, Ordering::Release);
        rank.gpu.settle();
        assert_eq!(rank.gpu.read(rank.args.counts, 4), 2_u32.to_ne_bytes());
    });
}
