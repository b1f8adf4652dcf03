//! The command line: raw flags here, checked by those who use them.

use crate::bench::plan::{What, parse_bytes};
use crate::motor::Mode;
use crate::sim::WORLD_MAX;
use clap::{Args, Parser, Subcommand, ValueEnum};
use immwire::sim::NicModel;
use immwire::{NetAddr, Place};
use std::num::NonZeroU32;
use std::path::PathBuf;

/// Moves memory between processes by one-sided writes with immediate: measures it, moves files with
/// it, and explains which path is taken.
#[derive(Debug, Parser)]
#[command(name = "immwire", version, max_term_width = 100, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  immwire bench                      everything, in under 30 seconds
  immwire doctor                     what this machine has, and which path each pair takes
  immwire recv --dir inbox           prints an address; then, in another terminal:
  immwire push model.safetensors iw1:...
  immwire bench --provider libfabric over TCP on this host; --listen and --connect for two hosts
  immwire bench --provider nvlink --gpus 0,1      between the memory of two GPUs
  immwire sim ep --sweep             what 8 to 512 ranks would take on ConnectX-7

IMMWIRE_LOG=debug (or a filter such as immwire=trace) writes a log to standard error.";

/// A subcommand.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure what is reached, beside what the machine reaches without the engine
    Bench(BenchArgs),
    /// Send files and folders to `immwire recv`
    Push(Box<PushArgs>),
    /// Receive files and folders from `immwire push`
    Recv(RecvArgs),
    /// Say what was found, which path each pair takes, why not a faster one, and what to do about it
    #[command(after_help = DOCTOR_HELP)]
    Doctor(DoctorArgs),
    /// Run engines on a simulated fabric: predictions without the hardware
    Sim(SimArgs),
    /// A benchmark's peer process.
    #[command(name = "__peer", hide = true)]
    Peer(PeerArgs),
    /// The child that `doctor` tries to write to.
    #[command(name = "__probe-target", hide = true)]
    ProbeTarget,
    /// The child that loads libfabric for `doctor`.
    #[command(name = "__probe-libfabric", hide = true)]
    ProbeLibfabric,
    /// The child that loads libibverbs for `doctor`.
    #[command(name = "__probe-verbs", hide = true)]
    ProbeVerbs,
    /// The child that loads the CUDA driver for `doctor`.
    #[command(name = "__probe-cuda", hide = true)]
    ProbeCuda,
}

/// Which transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Provider {
    /// Shared memory, between processes of this host
    Shm,
    /// libfabric: TCP to any host, AWS EFA
    Libfabric,
    /// libibverbs: RDMA NICs, RoCE and InfiniBand
    Verbs,
    /// Shared memory with GPUs' memory, over NVLink or PCIe; for `bench`
    Nvlink,
}

/// Whose memory a benchmark writes from and to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct GpuArgs {
    /// Source and destination, with --provider nvlink, or NICs that reach GPUs: numbers of GPUs, or host; one GPU for both
    #[arg(long, value_delimiter = ',', value_parser = place, value_name = "GPU|host")]
    pub gpus: Vec<Place>,
    /// SMs of a GPU that one copy takes [default: 10]
    #[arg(long, value_name = "N")]
    pub sms: Option<NonZeroU32>,
    /// With NICs that do not reach GPUs, or TCP: their memory goes by way of so much pinned memory of the host; the other side
    /// does the same
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES")]
    pub staging: Option<u64>,
    /// Which NICs are whose
    #[command(flatten)]
    pub pairing: PairingArgs,
}

/// Which NICs belong to which GPU, where somebody knows better.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct PairingArgs {
    /// NICs of GPUs, numbered as by `doctor`: "gpu0=mlx5_0,mlx5_1 gpu1=mlx5_2:2" [default: the nearest]
    #[arg(long, value_name = "PAIRS")]
    pub pairing: Option<String>,
    /// The table of the machine's devices, as `doctor --json` gives it [default: what sysfs says]
    #[arg(long, value_name = "FILE")]
    pub topology: Option<PathBuf>,
}

fn place(text: &str) -> Result<Place, String> {
    if text == "host" {
        return Ok(Place::Host);
    }
    let number = text.parse().map_err(|_| format!("\"{text}\" is neither a GPU's number nor host"));
    number.map(Place::Gpu)
}

/// What carries the writes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct TransportArgs {
    /// Which transport [default: the address's, or shm]
    #[arg(long, value_enum)]
    pub provider: Option<Provider>,
    /// Beside libfabric or verbs: shared memory to peers on this host; the other side does the same
    #[arg(long)]
    pub shm_on_host: bool,
    /// libfabric's provider: efa, tcp, net or tcp;ofi_rxm [default: the first of these with a device]
    #[arg(long, value_name = "PROVIDER")]
    pub fabric: Option<String>,
    /// Network interface or device of libfabric's: eth0, lo, an EFA device [default: all but lo]
    #[arg(long, value_name = "NAME")]
    pub interface: Option<String>,
    /// RDMA devices of libibverbs', or ports of them, separated by commas: mlx5_0,mlx5_1:2 [default: all that fit]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub device: Vec<String>,
    /// Entry of the RDMA ports' tables of global names [default: RoCE v2 before v1, IPv4 before IPv6]
    #[arg(long, value_name = "INDEX")]
    pub gid_index: Option<u8>,
    /// Traffic class of packets of RDMA devices: the DSCP of RoCE v2 in its upper six bits
    #[arg(long, value_name = "CLASS")]
    pub traffic_class: Option<u8>,
    /// Service level of packets of RDMA devices, 0 to 15: the priority where the traffic class does not decide
    #[arg(long, value_name = "LEVEL")]
    pub service_level: Option<u8>,
    /// How long an RDMA device waits for an acknowledgement: 4.096 us times two to this power, 1 to 31 [default: 14, 67 ms]
    #[arg(long, value_name = "POWER")]
    pub ack_timeout: Option<u8>,
    /// How often an RDMA device sends again what was not acknowledged, 0 to 7 [default: 7]
    #[arg(long, value_name = "TIMES")]
    pub retry_count: Option<u8>,
    /// Have RDMA devices ask for pages when they need them, instead of pinning memory; where they offer it
    #[arg(long)]
    pub on_demand: bool,
    /// Use RDMA devices by the calls that all drivers have, also where they offer the extended ones
    #[arg(long)]
    pub classic: bool,
}

const BENCH_HELP: &str = "\
What is measured:
  write    contiguous writes, --depth in flight
  pages    shuffled pages of a region to shuffled places of another: --pages of --page-size
  latency  one small write with immediate each way, in turns; half of the round trip
  rate     small writes with immediate, --depth in flight
  scatter  one write to each of --peers processes
  barrier  a barrier among this process and --peers others

Rates are timed at the sender, over a window with --depth transfers in flight, until all are done. After
each window the receiver checks its counter and every byte; the bytes change each time. Latency ends at
the receiver: its counter has fired, and it has read the bytes and answered.

Between GPUs (nvlink) the source is this process's memory of the first, the destination the peer's of the
second; write, pages and rate are measured. The baseline is the driver's own copy (cuMemcpyAsync) of the same bytes, to
memory of the second GPU's that this process has; of pages, of as many bytes in one piece.

The baseline is measured in turns with ours, in the same processes and over the same memory. For shm it is
memcpy into the receiver's mapping; the same pages in a bare loop; a flag and a payload in shared memory.
For libfabric and verbs it is a loop over fi_writedata or ibv_post_send on an endpoint of its own, with
the same library, device, sizes, depth and immediates, polled on both sides; of write, rate, pages and
latency. It uses the first NIC alone: with --nics N the ratio may come near N. A software provider would call a write done when the kernel has its bytes; the engine, and so the baseline,
asks that it be done when they are there (FI_DELIVERY_COMPLETE). The loop that does not ask is measured
too, and shown if it differs by more than 5 %. A ratio above 1 is better than the baseline. p99 is the
slow end: of turns, of barriers, or of the mean transfer of a round.

By default this process and its peers poll, where there is a processor for each, and have threads that
sleep otherwise. A peer that it starts itself is reached over lo, if libfabric carries the writes and
--interface does not say otherwise.

Examples:
  immwire bench
  immwire bench write --size 64K,1M,64M --nics 4
  immwire bench pages --pages 40000 --page-size 4K --json
  immwire bench latency --mode thread
  immwire bench write --plot write.svg
  immwire bench --provider libfabric --fabric tcp
  immwire bench --listen                     in one terminal, and in another:
  immwire bench write --connect iw1:...
  immwire bench --listen --provider libfabric --interface eth0     on one host, and on another:
  immwire bench latency --connect iw1:... --interface eth0
  immwire bench write --provider verbs --device mlx5_0
  immwire bench --provider nvlink --gpus 0,1
  immwire bench write --provider nvlink --gpus host,1 --size 1M,64M --sms 16
  immwire bench --listen --provider verbs --gpus 0                 on one host, and on another:
  immwire bench pages --connect iw1:... --gpus 0 --nics 2 --pairing gpu0=mlx5_4,mlx5_5
  immwire bench write --provider libfabric --fabric tcp --gpus 0 --staging 64M";

/// `immwire bench`.
#[derive(Debug, Args)]
#[command(after_help = BENCH_HELP, args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    /// What is measured with arguments of its own
    #[command(subcommand)]
    pub apart: Option<BenchCommand>,
    /// What to measure; without it, a summary of all
    #[arg(value_enum)]
    pub what: Option<What>,
    /// Be the peer: print an address, and serve until Ctrl-C
    #[arg(long, conflicts_with_all = ["what", "connect", "json", "plot"])]
    pub listen: bool,
    /// Use the peer at this address instead of starting one; for several peers, give it again
    #[arg(long, value_name = "ADDR", requires = "what")]
    pub connect: Vec<NetAddr>,
    /// What carries the writes
    #[command(flatten)]
    pub transport: TransportArgs,
    /// Whose memory is written from and to
    #[command(flatten)]
    pub gpus: GpuArgs,
    /// NICs of each engine: 1 to 8
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub nics: u8,
    /// Bytes of a write; several separated by commas (64K,1M)
    #[arg(long, value_delimiter = ',', value_parser = parse_bytes, value_name = "BYTES")]
    pub size: Vec<u64>,
    /// Transfers in flight
    #[arg(long)]
    pub depth: Option<u32>,
    /// Pages of a paged write
    #[arg(long)]
    pub pages: Option<u32>,
    /// Bytes of a page
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES")]
    pub page_size: Option<u64>,
    /// Peer processes of scatter (4) and barrier (3)
    #[arg(long)]
    pub peers: Option<u32>,
    /// Who makes the engines move
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Seconds to measure each row
    #[arg(long)]
    pub seconds: Option<f64>,
    /// Measure the machine without the engine too (the default)
    #[arg(long, overrides_with = "no_baseline")]
    pub baseline: bool,
    /// Do not measure the machine without the engine
    #[arg(long)]
    pub no_baseline: bool,
    /// One JSON object a row, as soon as it is measured
    #[arg(long)]
    pub json: bool,
    /// Draw the rows into an SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// What is measured with arguments of its own.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Dispatch and combine of a mixture of experts, among ranks of this host, in host memory or among GPUs
    #[command(after_help = BENCH_MOE_HELP)]
    Moe(Box<MoeBenchArgs>),
}

const BENCH_MOE_HELP: &str = "\
Each rank is a thread of this process with an engine of its own; they write to each other through shared memory, or by --provider
libfabric or verbs, over lo by the former unless --interface says otherwise. Tokens are bf16 both ways, routed uniformly. Times are
those of each round's slowest rank. GB/s counts what leaves any rank for another one, once; the last column is how long one thread
takes to copy as much. Every result is checked.

With --gpus, or --provider nvlink for all of them, ranks have GPUs in turn, and kernels do it: bf16 becomes e4m3 with float scales on
the way out, bf16 comes back. Times are the GPUs', taken between launches, without what the CPU needs to launch; results are checked
before, and after every 16th round.
GB/s is what the busiest GPU gets from others; the last columns are how long the wire takes for it, at the rate at which the
driver copies 64 MiB from GPU to GPU just before, and the share of the time that this is.

Examples:
  immwire bench moe --ep 4 --tokens 128
  immwire bench moe --ep 4 --tokens 128 --exact
  immwire bench moe --ep 2 --tokens 4096 --chunk 512 --rounds 10 --json
  immwire bench moe --provider libfabric --fabric tcp
  immwire bench moe --provider nvlink --tokens 1            a rank on each GPU
  immwire bench moe --gpus 0,1 --ep 4 --tokens 4096         two ranks on each of two";

/// `immwire bench moe`.
#[derive(Debug, Args)]
pub struct MoeBenchArgs {
    /// Ranks, with GPUs 32 at most [default: 2, or as many as GPUs]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub ep: Option<u32>,
    /// What carries the writes; nvlink with --gpus, unless told
    #[command(flatten)]
    pub transport: TransportArgs,
    /// The ranks' GPUs [default with --provider nvlink: all]
    #[arg(long, value_delimiter = ',', value_name = "GPU")]
    pub gpus: Vec<u32>,
    /// Tokens of each rank
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(0..=65_536))]
    pub tokens: u32,
    /// Values of a token; a multiple of 8, with GPUs of 16
    #[arg(long, default_value_t = 7168, value_parser = clap::value_parser!(u32).range(8..=65_536))]
    pub hidden: u32,
    /// Experts of all ranks
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub experts: u32,
    /// Experts of each token
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=32))]
    pub top_k: u32,
    /// Tokens that travel together, in host memory [default: 512]
    #[arg(long)]
    pub chunk: Option<NonZeroU32>,
    /// Let each expert's result come back by itself, to be summed where the token is from
    #[arg(long)]
    pub exact: bool,
    /// Rounds that are timed
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub rounds: u32,
    /// Seed of tokens and routes
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// One JSON object for each operation
    #[arg(long)]
    pub json: bool,
}

/// `immwire push`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each file or folder arrives under its own name. A transfer that was broken off goes on where it stopped
when it is started again; every file is checked by its BLAKE3 digest before it gets its name.

Examples:
  immwire push model.safetensors iw1:...
  immwire push checkpoint/ tokenizer.json iw1:...
  immwire push --interface eth0 checkpoint/ iw1:...      to a receiver with --provider libfabric")]
pub struct PushArgs {
    /// Files and folders, each by its own name; symbolic links are followed here, and skipped below
    #[arg(required = true, value_name = "FILE|DIR")]
    pub paths: Vec<PathBuf>,
    /// The address that `immwire recv` printed
    #[arg(value_name = "ADDR")]
    pub address: NetAddr,
    /// What carries the writes
    #[command(flatten)]
    pub transport: TransportArgs,
    /// NICs of the engine: 1 to 8
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub nics: u8,
    /// Seconds the receiver may be silent
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub patience: u64,
}

/// `immwire recv`.
#[derive(Debug, Args)]
#[command(after_help = "\
The address goes to standard output, everything else to standard error. Over shared memory only processes
of the same user are let in; over a network whoever reaches the port: if others share it, use a tunnel,
and no RDMA. A file grows as NAME.immwire-partial, and gets its name when its BLAKE3 digest is right.

Examples:
  immwire recv --dir inbox
  immwire recv --dir inbox --once > address
  immwire recv --dir inbox --provider libfabric --interface eth0     from another host
  immwire recv --dir inbox --provider verbs --device mlx5_0")]
pub struct RecvArgs {
    /// Where files go; made if it is not there. Nothing is written outside
    #[arg(long)]
    pub dir: PathBuf,
    /// End after one push; the exit code says whether it was complete
    #[arg(long)]
    pub once: bool,
    /// Replace files that are there with other contents
    #[arg(long)]
    pub overwrite: bool,
    /// What carries the writes
    #[command(flatten)]
    pub transport: TransportArgs,
    /// NICs of the engine: 1 to 8
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub nics: u8,
    /// Seconds the sender may be silent
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub patience: u64,
}

const DOCTOR_HELP: &str = "\
No privilege is needed. Libraries are searched for by name where the loader would look, not opened, since
that would run their code; but libfabric, libibverbs, the CUDA driver and GDRCopy, if they are there, are
loaded by child processes, and asked for their devices. IMMWIRE_LIBFABRIC, IMMWIRE_LIBIBVERBS and
IMMWIRE_GDRAPI name others.

Exit code: 0 can run; 1 can run, but some pair takes a slower path than it could; 2 cannot run; 3 doctor itself
failed (by its command line, or a file of --topology that cannot be read, say), and says nothing of the machine. What needs
a library or a device that is not there (other hosts, GPU memory) is said, and does not count; but EFA or RDMA devices that lie idle for want of one do.

Examples:
  immwire doctor
  immwire doctor --json | jq .paths
  immwire doctor --json | jq .probes.libfabric,.probes.verbs
  immwire doctor --json | jq -r .topology.table >table; immwire doctor --topology table
  immwire doctor --pairing 'gpu0=mlx5_4 gpu1=mlx5_5'";

/// `immwire doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// One JSON object: facts, probes, topology, paths, notes, exit_code
    #[arg(long)]
    pub json: bool,
    /// With either: say only which NICs belong to which GPU
    #[command(flatten)]
    pub pairing: PairingArgs,
}

/// `immwire sim`.
#[derive(Debug, Args)]
pub struct SimArgs {
    /// What to run
    #[command(subcommand)]
    pub command: SimCommand,
}

/// What is run on the simulated fabric.
#[derive(Debug, Subcommand)]
pub enum SimCommand {
    /// Predict what an expert-parallel step asks of the network: a barrier, and a scatter of all to all
    #[command(after_help = SIM_EP_HELP)]
    Ep(SimEpArgs),
    /// Run a random program under faults again, and say which rule it breaks
    #[command(after_help = SIM_REPLAY_HELP)]
    Replay(SimReplayArgs),
}

const SIM_REPLAY_HELP: &str = "\
The program of a seed is always the same, on the same version: engines that write, cancel, die and return,
on a fabric that loses NICs and links, held to an oracle. The exit status is 1 if it breaks a rule, 2 if --only
names an operation that is not there. Ctrl-C ends the shortening of a failing one; the status is 130 then.

Examples:
  immwire sim replay 4294967297                      how it goes; a failing one is made as short as it can be
  immwire sim replay 4294967297 --trace              each operation, and what the fabric did
  immwire sim replay 4294967297 --only 1,85,148 --trace";

/// `immwire sim replay`.
#[derive(Debug, Args)]
pub struct SimReplayArgs {
    /// Seed of the program, as a report names it
    pub seed: u64,
    /// Only its first operations
    #[arg(long, value_name = "N")]
    pub steps: Option<usize>,
    /// Only the operations at these places, as a shortened program lists them
    #[arg(long, value_name = "PLACES", value_delimiter = ',')]
    pub only: Vec<usize>,
    /// Print what happens, line by line
    #[arg(long)]
    pub trace: bool,
}

const SIM_EP_HELP: &str = "\
Each rank is a real engine in this process, with the core and the driver that would run on the machine;
NICs are models made from published figures where there are some, else measured or assumed ones (see the
documentation of immwire::sim::NicModel for each number's source), and time is the fabric's own. The same
command predicts the same everywhere; the time it takes, and the memory, are this machine's.

Modelled: the NIC's goodput in both directions, so that incast shows; latency; the NIC's time for each
message; the processor's time to post a write and to take a completion or an immediate; credits, splits,
turns and counts of the real code.
Not modelled: switches and their congestion; packets (a NIC serves whole messages); the processor's time
for planning; GPU kernels, PCIe and NVLink; jitter of any kind.

What each rank writes to each other one, unless --bytes says so: --tokens rows of --token-bytes, each
routed to --top-k experts alike, once to every rank that has one of them.

NICs: cx7 (1 for each rank), efa200 (2), efa100 (4), tcp (1), nvlink (1).

Examples:
  immwire sim ep --world 64 --nic cx7
  immwire sim ep --sweep --nic efa200
  immwire sim ep --world 512 --nic efa100 --nics 4 --bytes 64K --rounds 3 --json";

/// `immwire sim ep`.
#[derive(Debug, Args)]
pub struct SimEpArgs {
    /// Ranks
    #[arg(long, default_value_t = 64, conflicts_with = "sweep",
        value_parser = clap::value_parser!(u16).range(2..=i64::from(WORLD_MAX)))]
    pub world: u16,
    /// Print a table over 8, 16, ..., 512 ranks
    #[arg(long)]
    pub sweep: bool,
    /// Model of the NICs
    #[arg(long, default_value = "cx7", value_parser = nic_model, value_name = "MODEL")]
    pub nic: NicModel,
    /// NICs of each rank: 1 to 8 [default: as many as a GPU has of them]
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub nics: Option<u8>,
    /// Bytes from each rank to each other one, instead of what tokens make
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES")]
    pub bytes: Option<u64>,
    /// Tokens of each rank
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Experts of each token
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub top_k: u32,
    /// Experts of each rank [default: 256 over all ranks, at least 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub experts_per_rank: Option<u32>,
    /// Bytes of a token on the wire
    #[arg(long, default_value = "7392", value_parser = parse_bytes, value_name = "BYTES")]
    pub token_bytes: u64,
    /// Ranks of one node, which leave each other out of the scatter
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub node_size: u16,
    /// Have all ranks write to rank 0 first, then to rank 1 and so on; else each begins behind itself
    #[arg(long)]
    pub same_order: bool,
    /// How often barrier and scatter are run; medians are printed
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Seed of the fabric
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// One JSON object for each number of ranks, as soon as it is there
    #[arg(long)]
    pub json: bool,
}

fn nic_model(name: &str) -> Result<NicModel, String> {
    NicModel::named(name).ok_or_else(|| {
        let names: Vec<_> = NicModel::ALL.iter().map(|model| model.name).collect();
        format!("there is no model \"{name}\", only {}", names.join(", "))
    })
}

/// The hidden peer process.
#[derive(Debug, Args)]
pub struct PeerArgs {
    /// NICs of the engine.
    #[arg(long, default_value_t = 1)]
    pub nics: u8,
    /// Who makes the engine move.
    #[arg(long, value_enum, default_value = "polled")]
    pub mode: Mode,
    /// What carries the writes.
    #[command(flatten)]
    pub transport: TransportArgs,
    /// Whose memory is written from and to.
    #[command(flatten)]
    pub gpus: GpuArgs,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_every_command_has_examples() {
        let mut command = Cli::command();
        command.clone().debug_assert();
        for name in ["bench", "push", "recv", "doctor"] {
            let help = command.find_subcommand_mut(name).unwrap().render_help().to_string();
            assert!(help.contains("Examples:\n  immwire "), "{name}:\n{help}");
        }
        let sim = command.find_subcommand_mut("sim").unwrap();
        let help = sim.find_subcommand_mut("ep").unwrap().render_help().to_string();
        assert!(help.contains("Not modelled:") && help.contains("  immwire sim ep "), "{help}");
        let help = command.render_help().to_string();
        assert!(help.contains("immwire bench") && !help.contains("__peer"), "{help}");
    }

    #[test]
    fn contradictions_are_refused() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' '));
        for bad in [
            "immwire",
            "immwire bench --nics 9",
            "immwire bench --nics 0",
            "immwire bench nothing",
            "immwire bench --size 1T",
            "immwire bench --listen write",
            "immwire bench write --connect nowhere",
            "immwire bench --provider infiniband",
            "immwire bench --provider nvlink --gpus 0,guest",
            "immwire bench --provider nvlink --gpus 0,1 --sms 0",
            "immwire push x",
            "immwire push x y",
            "immwire recv",
            "immwire recv --dir x --patience 0",
            "immwire sim",
            "immwire sim ep --world 1",
            "immwire sim ep --world 64 --sweep",
            "immwire sim ep --nic token-ring",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse("immwire bench write --size 64K,1M --no-baseline --json").is_ok());
        assert!(parse("immwire bench --listen --nics 4").is_ok());
    }
}
