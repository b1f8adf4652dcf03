//! Who is waited for, and who is left out.
//!
//! Ranks go in steps, and in each one everybody sends something to everybody. Each rank decides by itself, of each other one, whether it
//! goes on with it ([`Patience::judge`]); nobody has to agree. Knows no clock and no transport: what was seen comes in as values.
//!
//! # Rules
//!
//! 1. What has arrived whole counts, whatever else is known of its sender: but of one that was written to in vain in the same step, or does
//!    not take in time what it is sent, nothing of that step does.
//! 2. Who is gone, who was written to in vain, and who has left us out, is left out at once.
//! 3. Who gives no sign within the limit is late, and left out.
//! 4. Who is kept waiting gives a sign every half of the limit, and once more when it goes on ([`Patience::sign_is_due`]); from each sign
//!    on it has the limit once more. So of a rank that is dead only that one is taken for dead, though those who had its last writes
//!    and those who had not come to the next step at different times.
//! 5. Nobody is waited for longer than [`LIMITS`] times the limit, signs or not.
//! 6. Who is left out is told, and stays out.
//!
//! 3 and 4 hold as long as ranks that live and are not kept waiting come to a step within half of the limit of each other. If not, one is
//! left out that lives, which costs what it would have sent, and nothing else: the two never read what the other writes again.
//!
//! The tests enumerate what can be seen of a rank, and run small worlds in which one dies anywhere in a step.

/// A step lasts this many limits at most.
pub const LIMITS: u64 = 4;

/// How long ranks are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Patience {
    /// For a rank that gives no sign.
    pub limit_ns: u64,
}

/// How far what was sent to a rank in this step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outgoing {
    /// All of it has arrived there.
    Ended,
    /// Some is still read.
    UnderWay,
    /// Some did not arrive.
    Failed,
}

/// What is known of a rank in this step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Seen {
    /// Whether all that it sends in this step has come.
    pub arrived: bool,
    /// What was sent to it.
    pub outgoing: Outgoing,
    /// Whether the transport has lost it.
    pub gone: bool,
    /// Whether it has said that it left us out.
    pub left_us: bool,
    /// When it last said that it is kept waiting, from the beginning of our step on.
    pub sign_ns: Option<u64>,
}

/// Why a rank is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Absence {
    /// It gave no sign in time.
    Late,
    /// It sent all, and did not take in time what was sent to it.
    Untaken,
    /// Our own caller does not want to wait any more.
    Aborted,
    /// The transport has lost it.
    Gone,
    /// It was written to in vain.
    Failed,
    /// It has left us out.
    LeftUs,
}

/// What to do about a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Nothing: the step is complete as far as it is concerned.
    Complete,
    /// Wait.
    Wait,
    /// Leave it out, from this step on.
    Leave(Absence),
}

impl Patience {
    /// What to do about a rank of which this is seen, `waited_ns` after the step began; `aborted` if our caller is tired of it.
    #[must_use]
    pub const fn judge(&self, seen: &Seen, waited_ns: u64, aborted: bool) -> Verdict {
        if seen.arrived && matches!(seen.outgoing, Outgoing::Ended) {
            return Verdict::Complete;
        }
        if matches!(seen.outgoing, Outgoing::Failed) {
            return Verdict::Leave(Absence::Failed);
        }
        if seen.gone {
            return Verdict::Leave(Absence::Gone);
        }
        if seen.left_us {
            return Verdict::Leave(Absence::LeftUs);
        }
        if aborted {
            return Verdict::Leave(Absence::Aborted);
        }
        let since = match seen.sign_ns {
            Some(sign_ns) => sign_ns,
            None => 0,
        };
        let is_late = waited_ns.saturating_sub(since) >= self.limit_ns;
        if is_late || waited_ns >= self.limit_ns.saturating_mul(LIMITS) {
            let why = if seen.arrived { Absence::Untaken } else { Absence::Late };
            return Verdict::Leave(why);
        }
        Verdict::Wait
    }

    /// Whether to say to the others that we are kept waiting, which was said `signs` times in this step.
    #[must_use]
    pub const fn sign_is_due(&self, waited_ns: u64, signs: u32) -> bool {
        let half = self.limit_ns / 2;
        // As a cast widens it: `u64::from` is not const.
        half > 0 && waited_ns / half > signs as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::vec;
    use std::vec::Vec;

    use super::*;

    const PATIENCE: Patience = Patience { limit_ns: 10 };

    #[test]
    fn whatever_is_seen_is_judged_by_the_first_rule_that_applies() {
        let mut cases = 0;
        for bits in 0..16_u32 {
            let [arrived, gone, left_us, aborted] = [0, 1, 2, 3].map(|bit| bits >> bit & 1 == 1);
            for outgoing in [Outgoing::Ended, Outgoing::UnderWay, Outgoing::Failed] {
                for waited in 0..=45 {
                    for sign_ns in (0..=waited).map(Some).chain([None]) {
                        let seen = Seen { arrived, outgoing, gone, left_us, sign_ns };
                        let verdict = PATIENCE.judge(&seen, waited, aborted);
                        let silent = waited - sign_ns.unwrap_or(0);
                        let rules = [
                            (arrived && outgoing == Outgoing::Ended, Verdict::Complete),
                            (outgoing == Outgoing::Failed, Verdict::Leave(Absence::Failed)),
                            (gone, Verdict::Leave(Absence::Gone)),
                            (left_us, Verdict::Leave(Absence::LeftUs)),
                            (aborted, Verdict::Leave(Absence::Aborted)),
                            (
                                (silent >= 10 || waited >= 40) && arrived,
                                Verdict::Leave(Absence::Untaken),
                            ),
                            (silent >= 10 || waited >= 40, Verdict::Leave(Absence::Late)),
                            (true, Verdict::Wait),
                        ];
                        let first = rules.iter().find(|(applies, _)| *applies).unwrap().1;
                        assert_eq!(verdict, first, "{seen:?} after {waited}, aborted {aborted}");
                        cases += 1;
                    }
                }
            }
        }
        // Of 46 times, each with the signs until then or none.
        assert_eq!(cases, 16 * 3 * (46 * 47 / 2 + 46));
    }

    #[test]
    fn signs_are_due_at_each_half_of_the_limit_once() {
        let mut signs = 0;
        let due: Vec<u64> = (0..40)
            .filter(|now| {
                let due = PATIENCE.sign_is_due(*now, signs);
                signs += u32::from(due);
                due
            })
            .collect();
        assert_eq!(due, [5, 10, 15, 20, 25, 30, 35]);
        assert!(!Patience { limit_ns: 1 }.sign_is_due(u64::MAX, 0));
        assert_eq!(
            Patience { limit_ns: u64::MAX }.judge(
                &Seen {
                    arrived: false,
                    outgoing: Outgoing::Ended,
                    gone: false,
                    left_us: false,
                    sign_ns: None
                },
                u64::MAX - 1,
                false
            ),
            Verdict::Wait
        );
    }

    /// A rank of a world that is run tick by tick; what is sent arrives a tick later.
    struct Rank {
        step: usize,
        /// When it begins its step; it sends then.
        begins: u64,
        has_begun: bool,
        signs: u32,
        present: BTreeSet<usize>,
        absent: Vec<(usize, Absence)>,
    }

    /// What is under way or has come, by receiver and sender.
    #[derive(Clone, Default)]
    struct Mail {
        /// When the writes of each step come.
        writes: Vec<Option<u64>>,
        signs: Vec<u64>,
        left: Option<u64>,
    }

    const STEPS: usize = 4;

    /// The last rank dies in `step`, when only those in `reached` have its writes. Who is in `told` hears of it from the transport 7
    /// ticks later. Others begin their first step at `skew`, and work for `work` ticks, each for its own, between steps.
    fn world(step: usize, reached: u32, told: u32, skew: &[u64], work: [u64; 3]) -> Vec<Rank> {
        let (live, dead) = (skew.len(), skew.len());
        let mut mail =
            vec![vec![Mail { writes: vec![None; STEPS], ..Mail::default() }; live + 1]; live];
        let mut ranks: Vec<Rank> = (0..live)
            .map(|rank| Rank {
                step: 0,
                begins: skew[rank],
                has_begun: false,
                signs: 0,
                present: (0..=live).filter(|other| *other != rank).collect(),
                absent: vec![],
            })
            .collect();
        // It is as early as can be.
        let mut died = None;
        for now in 0..1000 {
            let is_far = |step: usize| ranks.iter().any(|rank| rank.step >= step);
            for at in 0..=step {
                let some = |to: usize| at < step || reached >> to & 1 == 1;
                for (_, mail) in
                    mail.iter_mut().enumerate().filter(|(to, _)| is_far(at) && some(*to))
                {
                    mail[dead].writes[at].get_or_insert(now + 1);
                }
            }
            if is_far(step) {
                died.get_or_insert(now);
            }
            for me in 0..live {
                let rank = &mut ranks[me];
                if rank.step == STEPS || now < rank.begins {
                    continue;
                }
                let sends: Vec<usize> =
                    rank.present.iter().copied().filter(|to| *to < live).collect();
                if !rank.has_begun {
                    rank.has_begun = true;
                    for to in &sends {
                        mail[*to][me].writes[rank.step] = Some(now + 1);
                    }
                }
                let waited = now - rank.begins;
                let mut is_complete = true;
                for other in rank.present.clone() {
                    let from = &mail[me][other];
                    let come = |at: Option<u64>| at.is_some_and(|at| at <= now);
                    let signs = from.signs.iter().filter(|at| **at <= now);
                    let seen = Seen {
                        arrived: come(from.writes[rank.step]),
                        outgoing: Outgoing::Ended,
                        gone: other == dead
                            && told >> me & 1 == 1
                            && died.is_some_and(|died| now >= died + 7),
                        left_us: come(from.left),
                        sign_ns: signs.max().map(|at| at.saturating_sub(rank.begins)),
                    };
                    match PATIENCE.judge(&seen, waited, false) {
                        Verdict::Complete => {}
                        Verdict::Wait => is_complete = false,
                        Verdict::Leave(absence) => {
                            rank.present.remove(&other);
                            rank.absent.push((other, absence));
                            if other < live {
                                mail[other][me].left = Some(now + 1);
                            }
                        }
                    }
                }
                let goes_on = is_complete && rank.signs > 0;
                if PATIENCE.sign_is_due(waited, rank.signs) || goes_on {
                    rank.signs += 1;
                    for to in sends {
                        mail[to][me].signs.push(now + 1);
                    }
                }
                if is_complete {
                    rank.step += 1;
                    rank.begins = now + work[me];
                    rank.has_begun = false;
                    rank.signs = 0;
                }
            }
        }
        ranks
    }

    /// Wherever a rank dies in a step, whoever has its last writes, whoever is told of it, and however far apart the others are: each
    /// leaves out that one, nobody else, and goes on. *Fails if signs are not heeded.*
    #[test]
    fn of_a_rank_that_dies_only_that_one_is_left_out() {
        let mut worlds = 0;
        for step in 0..STEPS {
            for sets in 0..64 {
                let (reached, told) = (sets & 7, sets >> 3);
                for skew in (0..27).map(|n| [n % 3 * 2, n / 3 % 3 * 2, n / 9 * 2]) {
                    for work in [[1, 1, 1], [4, 4, 4], [1, 4, 2], [4, 1, 2]] {
                        let ranks = world(step, reached, told, &skew, work);
                        let what = (step, reached, told, skew, work);
                        for (me, rank) in ranks.iter().enumerate() {
                            assert_eq!(rank.step, STEPS, "{me} does not end: {what:?}");
                            // Of its last writes those who have them need not learn that they were the last.
                            let may = step == STEPS - 1 && reached >> me & 1 == 1;
                            let named: Vec<_> =
                                rank.absent.iter().map(|(other, _)| *other).collect();
                            assert!(
                                named == [3] || may && named.is_empty(),
                                "{me}: {named:?} {what:?}"
                            );
                        }
                        worlds += 1;
                    }
                }
            }
        }
        assert_eq!(worlds, 4 * 64 * 27 * 4);
    }
}
