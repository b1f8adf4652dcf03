//! How the models in `tests/` are explored: the core's own state machines, in every reachable state.
//!
//! ```sh
//! cargo nextest run -p immwire-verification-protocol
//! IMMWIRE_FULL=1 cargo nextest run -p immwire-verification-protocol
//! ```
//!
//! A state of a model holds `DomainGroup`s and counters as they ship; a step calls them. The network, the
//! provider below and the application above are modelled, and do whatever their contracts allow, in any
//! order. Knows nothing of one protocol: each model is a file of its own in `tests/`.
//!
//! | proves | does not prove |
//! |---|---|
//! | no state that the model reaches, within the bound it prints, breaks its properties | larger bounds; weak memory (that is loom's); that a real provider keeps its contract |
//! | a state without a next step is one where everything has ended | that a real clock moves |
//!
//! # What a search must be
//!
//! 1. It ends because no state is left, or at a failure; never by a limit: [`explore`] sets none.
//! 2. It visits at least the states that are known: a model that lost its subject fails.
//! 3. It sees what it claims to be about: every `sometimes` property must be found.
//!
//! States are told apart by 64-bit fingerprints, of the whole and of its parts ([`Kept`]): among a few
//! million of them, two that agree by chance have odds of about one in a million, and would hide one.
//!
//! Variables: `IMMWIRE_FULL=1` for the larger bounds; `IMMWIRE_MODEL_ANY_COUNT=1` accepts a search of any
//! size, for mutants, which are to be caught by what a model states, not by how large it is;
//! `IMMWIRE_REPORT=FILE` appends a line of JSON for each claim that held.

use std::fmt::Debug;
use std::fs::OpenOptions;
use std::hash::{Hash, Hasher};
use std::io::Write as _;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use stateright::{Checker, Expectation, HasDiscoveries, Model, Path};

pub mod counter;
pub mod fixture;

/// Whether the larger bounds are asked for.
#[must_use]
pub fn full() -> bool {
    std::env::var_os("IMMWIRE_FULL").is_some_and(|value| value == "1")
}

/// What a search establishes.
#[derive(Debug, Clone)]
pub struct Claim {
    /// Number and name of the clause of the contract: `3 Ends`.
    pub clause: &'static str,
    /// What holds, as a sentence.
    pub claim: &'static str,
    /// What the model is made of: peers, pieces, rounds.
    pub bound: String,
    /// How many states are known: fewer is a failure.
    pub at_least: usize,
}

/// Visits every state of `model`, prints how many there were, and reports the claim.
///
/// # Panics
///
/// If an `always` property is broken anywhere (the shortest way there is printed), if a `sometimes` property
/// is found nowhere, or if fewer states were found than are known.
#[expect(clippy::panic, reason = "a broken property is a failed test")]
pub fn explore<M>(claim: Claim, model: M)
where
    M: Model + Clone + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send + Sync + 'static,
{
    let started = Instant::now();
    let properties = model.properties();
    let always = |expectation: &Expectation| matches!(expectation, Expectation::Always);
    // The search stops early once every property has been decided by a state: one that holds never is.
    assert!(properties.iter().any(|property| always(&property.expectation)), "nothing is claimed");
    let broken = HasDiscoveries::AnyFailures;
    let checker = model.clone().checker().finish_when(broken).spawn_bfs().join();
    assert!(checker.is_done(), "the search did not end");
    let (states, depth) = (checker.unique_state_count(), checker.max_depth());
    let bound = format!("{}; {states} states, {depth} deep", claim.bound);
    println!("{}: {bound}, {:.2} s", claim.claim, started.elapsed().as_secs_f64());
    for property in properties {
        let name = property.name;
        match (property.expectation, checker.discovery(name)) {
            (Expectation::Always, Some(path)) => {
                panic!("not so: {name}, in {bound}{}", told(shortest(&model, name, path)))
            }
            (Expectation::Sometimes, None) => panic!("never seen: {name}"),
            (Expectation::Eventually, _) => panic!("not to be trusted where paths meet: {name}"),
            (Expectation::Always, None) | (Expectation::Sometimes, Some(_)) => {}
        }
    }
    if std::env::var_os("IMMWIRE_MODEL_ANY_COUNT").is_none() {
        assert!(states >= claim.at_least, "{states} states, but {} are known", claim.at_least);
    }
    report(&claim, &bound, started.elapsed().as_secs_f64());
}

/// Searches `model` until its `property` is broken, and prints the shortest way there.
///
/// For variants that leave out what a protocol needs: they show that it is needed, and that the model sees
/// it.
///
/// # Panics
///
/// If the property holds everywhere.
#[expect(clippy::panic, reason = "a variant that is not caught is a failed test")]
pub fn must_break<M>(model: M, property: &'static str)
where
    M: Model + Clone + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send + Sync + 'static,
{
    let Some(path) = search(&model, property, None) else {
        panic!("holds everywhere, though it must not: {property}");
    };
    let path = shortest(&model, property, path);
    println!("broken, as it must be: {property}{}", told(path));
}

/// A way to where `property` is broken, in fewer than `steps` steps.
fn search<M>(
    model: &M,
    property: &'static str,
    steps: Option<usize>,
) -> Option<Path<M::State, M::Action>>
where
    M: Model + Clone + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send + Sync + 'static,
{
    let found = HasDiscoveries::AnyOf([property].into());
    let mut checker = model.clone().checker().finish_when(found);
    if let Some(steps) = steps {
        checker = checker.target_max_depth(steps + 1);
    }
    checker.spawn_bfs().join().discovery(property)
}

/// The checker reports the last way that it came across; the shortest one tells most.
fn shortest<M>(
    model: &M,
    property: &'static str,
    mut path: Path<M::State, M::Action>,
) -> Path<M::State, M::Action>
where
    M: Model + Clone + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send + Sync + 'static,
{
    loop {
        let steps = path.clone().into_actions().len();
        match search(model, property, Some(steps)) {
            Some(shorter) => path = shorter,
            None => return path,
        }
    }
}

fn told<S: Debug, A: Debug>(path: Path<S, A>) -> String {
    let mut text = String::new();
    for (number, action) in path.into_actions().iter().enumerate() {
        text += &format!("\n  {:2}. {action:?}", number + 1);
    }
    text
}

/// Appends what was established to the file that `IMMWIRE_REPORT` names, in one write.
#[expect(clippy::expect_used, reason = "a report that cannot be written must not pass for one")]
fn report(claim: &Claim, bound: &str, seconds: f64) {
    let Some(path) = std::env::var_os("IMMWIRE_REPORT") else { return };
    // Claims and bounds are this package's own words: nothing in them needs escaping.
    let Claim { clause, claim, .. } = claim;
    let line = format!(
        "{{\"clause\":\"{clause}\",\"claim\":\"{claim}\",\"method\":\"explored\",\
         \"bound\":\"{bound}\",\"seconds\":{seconds:.2}}}\n"
    );
    let file = OpenOptions::new().append(true).create(true).open(path);
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .expect("the report cannot be written");
}

/// A large part of a state: shared by the states that did not change it, and hashed once.
#[derive(Debug, Clone)]
pub struct Kept<T> {
    value: Arc<T>,
    digest: OnceLock<u64>,
}

impl<T: Clone + Hash> Kept<T> {
    /// Keeps `value`.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self { value: Arc::new(value), digest: OnceLock::new() }
    }

    /// Whether neither was changed since they were the same.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.value, &other.value)
    }

    /// Changes the value, in this state alone.
    pub fn change<R>(&mut self, f: impl FnOnce(&mut T) -> R) -> R {
        self.digest.take();
        f(Arc::make_mut(&mut self.value))
    }
}

impl<T> Deref for Kept<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: PartialEq> PartialEq for Kept<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.value, &other.value) || self.value == other.value
    }
}

impl<T: Eq> Eq for Kept<T> {}

impl<T: Hash> Hash for Kept<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let digest = self
            .digest
            .get_or_init(|| ahash::RandomState::with_seeds(1, 2, 3, 4).hash_one(&self.value));
        digest.hash(state);
    }
}
