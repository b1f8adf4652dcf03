//! What the kernel says of users to this process: see `immwire_core::user`.

use immwire_core::user::Users;

/// Where the kernel does not say otherwise (`DEFAULT_OVERFLOWUID` in `linux/highuid.h`).
const OVERFLOW: u32 = 65_534;

/// As of now. What is not said is taken for the worse.
pub(super) fn users() -> Users {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    Users {
        ours: rustix::process::geteuid().as_raw(),
        overflow: read("/proc/sys/kernel/overflowuid").trim().parse().unwrap_or(OVERFLOW),
        maps_all: maps_all(&read("/proc/self/uid_map")),
    }
}

/// Whether a namespace with this map has numbers for all users: there are as many as numbers, less the one that stands for none.
/// Each line is of a range: its first number inside, the one outside, and how many there are (user_namespaces(7)). No two
/// ranges have a user in common.
fn maps_all(map: &str) -> bool {
    let count = |line: &str| line.split_whitespace().nth(2)?.parse::<u32>().ok();
    map.lines().filter_map(count).map(u64::from).sum::<u64>() >= u64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_of_all_users_or_not() {
        for (map, all) in [
            ("         0          0 4294967295\n", true),
            ("0 0 65534\n65534 65534 4294901761\n", true),
            ("0 0 65534\n65534 65534 4294901760\n", false),
            ("         0       1000          1\n         1     100000      65536\n", false),
            ("", false),
            ("0 0\n", false),
            ("0 0 x\n", false),
        ] {
            assert_eq!(maps_all(map), all, "{map}");
        }
    }

    #[test]
    fn the_kernel_says_who_we_are() {
        let found = users();
        assert_eq!(found.ours, rustix::process::geteuid().as_raw());
        assert_ne!(found.overflow, 0);
    }
}
