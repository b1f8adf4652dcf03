//! What is the same for engines of one host.
//!
//! Two engines are on one host if shared memory leads from one to the other: the same kernel has booted both, sockets
//! are in one network namespace, and each lets the other in. Or if somebody says so.

use std::os::unix::fs::MetadataExt;

use immwire_core::span::Host;

use crate::shm::GroupKey;

/// What two engines must have in common, by default.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
// Of the calling thread: sockets are made in its namespaces, not in the process's.
const NETWORK: &str = "/proc/thread-self/ns/net";
const USERS: &str = "/proc/thread-self/ns/user";

/// The host of this process's engines: whatever `name` says, or what the kernel does. Engines let in who has their key,
/// or, without one, runs as their user; and write to each other only if their descriptors mean the same
/// ([`from_zero`](crate::provider::Memory::counts_from_zero)). An engine without a key that cannot tell its user from others
/// (`knows_user`) lets nobody in, and is alone on its host.
///
/// # Errors
///
/// What the kernel answers: without `/proc` there is no telling.
pub(crate) fn find(
    name: Option<&str>,
    key: Option<&GroupKey>,
    from_zero: bool,
    knows_user: bool,
) -> std::io::Result<Host> {
    // Each part has its length before it: no two hosts hash the same bytes.
    let mut hasher = match key {
        Some(key) => key.hasher(),
        None => blake3::Hasher::new(),
    };
    let mut add = |part: &[u8]| {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    };
    add(b"immwire host");
    add(&[from_zero.into()]);
    match name {
        Some(name) => add(name.as_bytes()),
        None => {
            add(&std::fs::read(BOOT_ID)?);
            let mut namespace = |path| {
                let meta = std::fs::metadata(path)?;
                add(&[meta.dev().to_le_bytes(), meta.ino().to_le_bytes()].concat());
                std::io::Result::Ok(())
            };
            namespace(NETWORK)?;
            if key.is_none() {
                namespace(USERS)?;
            }
        }
    }
    if key.is_none() {
        add(&rustix::process::geteuid().as_raw().to_le_bytes());
        if !knows_user {
            let mut own = [0_u8; 16];
            rustix::rand::getrandom(&mut own, rustix::rand::GetRandomFlags::empty())?;
            add(&own);
        }
    }
    Ok(Host(*hasher.finalize().as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_that_let_each_other_in_are_on_one_host() {
        let keys = [None, Some(GroupKey::derive(b"a")), Some(GroupKey::derive(b"b"))];
        let names = [None, Some("a"), Some("b"), Some("")];
        let find_if = |name, key: &Option<_>, from_zero, knows| {
            find(name, key.as_ref(), from_zero, knows).unwrap()
        };
        let find = |name, key: &Option<_>, from_zero| find_if(name, key, from_zero, true);
        let with =
            |name| keys.iter().flat_map(move |key| [false, true].map(|it| find(name, key, it)));
        let all: Vec<_> = names.into_iter().flat_map(with).collect();
        for (at, host) in all.iter().enumerate() {
            assert_eq!(all.iter().position(|other| other == host), Some(at), "two are the same");
        }
        assert_eq!(find(None, &None, false), all[0], "and the same is found twice");
        // Who lets nobody in is nobody's neighbour, not even by name; with a key it is asked for that.
        for name in names {
            let alone = [(); 2].map(|()| find_if(name, &None, false, false));
            assert!(alone[0] != alone[1] && !all.contains(&alone[0]), "{name:?}");
            assert_eq!(find_if(name, &keys[1], false, false), find(name, &keys[1], false));
        }
    }
}
