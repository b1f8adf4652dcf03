//! Whether a process runs as our user, as far as the kernel can say.
//!
//! A kernel with user namespaces gives each process numbers of users of its own. All users that have none in ours go by one
//! number there, the overflow uid, which a user of ours may have as well. Whoever goes by it may be anybody, then, unless all
//! users have numbers.
//!
//! Knows no system call: what the kernel says comes in.
//!
//! # Invariants
//!
//! 1. Whoever is taken for our user is.
//! 2. Our user is, unless it goes by the number of those that have none, and there may be such.
//!
//! The test enumerates small namespaces, and who may be behind a number there.

/// What the kernel says of users, to this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Users {
    /// The number of the one that it runs as,
    pub ours: u32,
    /// of all that have no other in its namespace,
    pub overflow: u32,
    /// and whether there are none, since its namespace has numbers for all.
    pub maps_all: bool,
}

impl Users {
    /// Whether whoever goes by that number is the user that this process runs as.
    #[must_use]
    pub const fn is_ours(&self, uid: u32) -> bool {
        uid == self.ours && (uid != self.overflow || self.maps_all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three users, and a namespace that has numbers for some of them: which user has which number.
    type Namespace = [Option<u32>; 3];

    const OVERFLOW: u32 = 2;

    fn seen(namespace: &Namespace, user: usize) -> u32 {
        namespace[user].unwrap_or(OVERFLOW)
    }

    #[test]
    fn nobody_else_is_taken_for_our_user() {
        let numbers = [None, Some(0), Some(1), Some(2)];
        let mut told_apart = 0;
        for namespace in numbers
            .into_iter()
            .flat_map(|a| numbers.map(|b| (a, b)))
            .flat_map(|(a, b)| numbers.map(|c| [a, b, c]))
        {
            let is_one_to_one = (0..3)
                .all(|a| (0..a).all(|b| namespace[a].is_none() || namespace[a] != namespace[b]));
            if !is_one_to_one {
                continue;
            }
            let maps_all = namespace.iter().all(Option::is_some);
            for us in 0..3 {
                let users = Users { ours: seen(&namespace, us), overflow: OVERFLOW, maps_all };
                for them in 0..3 {
                    let is_ours = users.is_ours(seen(&namespace, them));
                    assert!(us == them || !is_ours, "{namespace:?}: {them} is taken for {us}");
                    if us == them {
                        let may_be_anybody = users.ours == OVERFLOW && !maps_all;
                        assert_eq!(is_ours, !may_be_anybody, "{namespace:?}: {us}");
                        told_apart += u32::from(is_ours);
                    }
                }
            }
        }
        assert!(told_apart > 0);
    }
}
