//! What a NIC does to a message, and what may go wrong on the fabric: numbers only.
//!
//! But for what is said to be measured or assumed, each parameter of the models comes from a published figure
//! that its comment names (the paper is arXiv 2510.27656, with its repository's README).

use std::time::Duration;

/// In what order messages of one path arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// As they were posted: reliable connections, streams. What arrived before a path broke is a prefix
    /// of what was posted, so a receipt can say which.
    Fifo,
    /// In any order: reliable datagrams. After a path broke nobody can say what arrived.
    Any,
}

/// How one NIC behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicModel {
    /// For people.
    pub name: &'static str,
    /// Nominal speed, by which transfers are shared out.
    pub speed_gbps: u32,
    /// Payload that the NIC carries in each direction, in Mbit/s.
    pub goodput_mbps: u32,
    /// From the sender's NIC to the receiver's poll, for a message without bytes.
    pub latency: Duration,
    /// Time of the NIC, in each direction, for a message besides its bytes.
    pub per_message: Duration,
    /// Time of the posting processor for a message.
    pub post: Duration,
    /// Time of the polling processor for a completion or an immediate.
    pub poll: Duration,
    /// Messages in flight.
    pub queue_depth: u16,
    /// The largest message.
    pub max_message_bytes: u64,
    /// The smallest piece worth a NIC of its own.
    pub min_piece_bytes: u64,
    /// Pages that one message may carry without being adjacent; 1 for none but adjacent ones.
    pub pages_per_piece: u16,
    /// Short messages that it is told of together while as many are under way; 1: of each at once.
    pub together: u16,
    /// Order on a path.
    pub order: Order,
    /// How long a sender takes at most to see that the far end of a path is gone.
    pub detect: Duration,
    /// How long it takes at least until a path that broke can be used again.
    pub reconnect: Duration,
}

/// What our own core and driver cost for a completion: 35 ns to plan, post and complete a page were
/// measured (`cargo bench -p immwire-benches --bench core`), and a look at a completion queue is assumed
/// to be hidden among them.
const POLL: Duration = Duration::from_nanos(35);

const GIB: u64 = 1 << 30;

impl NicModel {
    /// ConnectX-7, 400 Gbit/s, reliable connections.
    ///
    /// | parameter | from |
    /// |---|---|
    /// | goodput 378 Gbit/s | single writes of 32 MiB (paper, table 2) |
    /// | 20 ns a message | 64 KiB pages at 370 Gbit/s (table 2): 1,408 ns each, 1,387 of them for the bytes |
    /// | 136 ns to post | slope of the time to post one scatter at EP8 to EP64 (table 9) |
    /// | latency 2.4 µs | half of a tuned proxy's 5.2 µs round trip of 8 bytes (measured on ConnectX-7 by others, unpublished), less posting and polling |
    /// | depth 1024, largest message 1 GiB | the published engine's send queue; the smaller of the two port limits seen |
    /// | told of 16 messages together | as our providers do, by libibverbs and libfabric |
    /// | loss seen after 470 ms | its 67 ms time-out, seven retries |
    /// | reconnected in 1 ms | assumed |
    pub const CONNECTX7: Self = Self {
        name: "cx7",
        speed_gbps: 400,
        goodput_mbps: 378_000,
        latency: Duration::from_nanos(2_400),
        per_message: Duration::from_nanos(20),
        post: Duration::from_nanos(136),
        poll: POLL,
        queue_depth: 1024,
        max_message_bytes: GIB,
        min_piece_bytes: 64 << 10,
        pages_per_piece: 1,
        together: 16,
        order: Order::Fifo,
        detect: Duration::from_millis(470),
        reconnect: Duration::from_millis(1),
    };

    /// One of the two 200 Gbit/s EFA NICs that an H200 has, scalable reliable datagrams.
    ///
    /// | parameter | from |
    /// |---|---|
    /// | goodput 182 Gbit/s | 64 KiB pages at 364 Gbit/s over two (paper, table 2) |
    /// | 440 ns to post | slope of the time to post one scatter at EP8 to EP64 (table 9) |
    /// | latency 12.8 µs | half of what a single write of 64 KiB takes (33 µs, table 2) without its bytes and the 5.8 µs of software that the same row leaves for ConnectX-7 |
    /// | 20 ns a message, depth, largest message | assumed as for ConnectX-7: the processor limits the published rates |
    /// | loss seen after 100 ms, reconnected in 1 ms | assumed |
    pub const EFA_200: Self = Self {
        name: "efa200",
        speed_gbps: 200,
        goodput_mbps: 182_000,
        latency: Duration::from_nanos(12_800),
        post: Duration::from_nanos(440),
        order: Order::Any,
        detect: Duration::from_millis(100),
        ..Self::CONNECTX7
    };

    /// One of the four 100 Gbit/s EFA NICs that an H100 has: as [`NicModel::EFA_200`], at half the speed.
    pub const EFA_100: Self =
        Self { name: "efa100", speed_gbps: 100, goodput_mbps: 91_000, ..Self::EFA_200 };

    /// A TCP stream between two processes of one host: what a host costs, without a network.
    ///
    /// | parameter | from |
    /// |---|---|
    /// | goodput 43 Gbit/s | 5.4 GB/s, 1 MiB messages, 64 outstanding, libfabric 2.5.1 `tcp` between two processes |
    /// | 4.5 µs to post | 0.22 million messages of 64 bytes a second, the same |
    /// | latency 4.7 µs | half of a round trip of 64 bytes, the same, less nothing: posting is in it |
    /// | pieces of 1 MiB, depth 256 | assumed |
    /// | loss seen after 1 s, reconnected in 10 ms | assumed |
    pub const TCP: Self = Self {
        name: "tcp",
        speed_gbps: 43,
        goodput_mbps: 43_000,
        latency: Duration::from_nanos(4_700),
        per_message: Duration::ZERO,
        post: Duration::from_nanos(4_500),
        queue_depth: 256,
        max_message_bytes: 1 << 20,
        detect: Duration::from_secs(1),
        reconnect: Duration::from_millis(10),
        ..Self::CONNECTX7
    };

    /// NVLink 4 between GPUs of one host, written by copy engines.
    ///
    /// | parameter | from |
    /// |---|---|
    /// | goodput 3,000 Gbit/s | 371 to 377 GB/s, copy engines, one way |
    /// | latency 1.3 µs | 0.7 to 1.0 µs from a store to the peer's L2, 0.3 to 0.5 µs until a poll sees it (estimates) |
    /// | 2.3 µs to post | a batch copy call, per operation, on H100 |
    /// | order, depth, detection | assumed as for ConnectX-7; pieces of 16 MiB assumed |
    pub const NVLINK: Self = Self {
        name: "nvlink",
        speed_gbps: 3_600,
        goodput_mbps: 3_000_000,
        latency: Duration::from_nanos(1_300),
        per_message: Duration::ZERO,
        post: Duration::from_nanos(2_300),
        max_message_bytes: 16 << 20,
        together: 1,
        min_piece_bytes: 1 << 20,
        ..Self::CONNECTX7
    };

    /// All that there are.
    pub const ALL: [Self; 5] =
        [Self::CONNECTX7, Self::EFA_200, Self::EFA_100, Self::TCP, Self::NVLINK];

    /// The model of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|model| model.name == name)
    }

    /// How long a message of `len` bytes occupies the NIC in one direction.
    #[must_use]
    pub fn occupancy(&self, len: u64) -> Duration {
        let nanos = u128::from(len) * 8_000 / u128::from(self.goodput_mbps.max(1));
        let bytes = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.per_message.saturating_add(bytes)
    }
}

/// What the fabric does to those on it, besides what it is told call by call. All rates are "one in so
/// many", 0 for never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FabricConfig {
    /// Each message is late by up to so much; on a path without order, messages overtake each other.
    pub jitter: Duration,
    /// So many messages
    pub late_one_in: u32,
    /// are late by up to so much more; in order, those behind them too.
    pub late: Duration,
    /// Parts in which the bytes of a message arrive, each at a moment of its own and in any order: 1 to
    /// 64. The immediate comes after all of them.
    pub parts: u8,
    /// Whether bytes are moved at all. Without, times and immediates are the same, and memory is not
    /// touched.
    pub move_bytes: bool,
    /// So many posts find the queue full after some of their pieces, or before the first.
    pub queue_full_one_in: u32,
    /// What a handshake takes besides the latency.
    pub connect: Duration,
    /// So many calls are refused.
    pub refuse_one_in: u32,
    /// So many registrations fail.
    pub register_fails_one_in: u32,
    /// What a registration costs the engine that makes it.
    pub register: Duration,
    /// How long after an abort pieces may still arrive, until they are reported as flushed.
    pub flush: Duration,
}

impl FabricConfig {
    /// Nothing goes wrong, and nothing is late.
    #[must_use]
    pub const fn calm() -> Self {
        Self {
            jitter: Duration::ZERO,
            late_one_in: 0,
            late: Duration::ZERO,
            parts: 1,
            move_bytes: true,
            queue_full_one_in: 0,
            connect: Duration::from_micros(50),
            refuse_one_in: 0,
            register_fails_one_in: 0,
            register: Duration::ZERO,
            flush: Duration::from_micros(20),
        }
    }

    /// As bad as the contract of a provider allows, without a loss: messages are late, torn, out of order
    /// where there is none, and queues full when they like.
    #[must_use]
    pub const fn rough() -> Self {
        Self {
            jitter: Duration::from_micros(30),
            late_one_in: 20,
            late: Duration::from_micros(500),
            parts: 5,
            queue_full_one_in: 10,
            ..Self::calm()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_reach_the_published_figures_that_they_were_made_from() {
        let gbps = |nics: f64, model: NicModel, len: u64| {
            nics * len as f64 * 8.0 / model.occupancy(len).as_nanos() as f64
        };
        let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 0.03, "{got} {want}");
        near(gbps(1.0, NicModel::CONNECTX7, 64 << 10), 370.0);
        near(gbps(1.0, NicModel::CONNECTX7, 16 << 10), 367.0);
        near(gbps(1.0, NicModel::CONNECTX7, 32 << 20), 378.0);
        near(gbps(2.0, NicModel::EFA_200, 64 << 10), 364.0);
        for model in NicModel::ALL {
            assert_eq!(NicModel::named(model.name), Some(model));
            assert!(model.occupancy(u64::MAX) > Duration::from_secs(3600));
        }
        assert_eq!(NicModel::named("token ring"), None);
    }
}
