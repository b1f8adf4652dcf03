//! `golden.txt`: worlds, and what follows from them, for whoever implements the same elsewhere.
//!
//! The file is what [`World`]'s sorted lists say, and what the shipped code is compared with here by parsing it. With
//! `IMMWIRE_WRITE_GOLDEN` set the test writes it, which only a changed format calls for.

use std::fmt::Write;

use super::*;

const TEXT: &str = include_str!("../golden.txt");
const HEAD: &str = "\
# Routing of small worlds. A case is a line `case NAME`, then a line for each fact; numbers in decimal, -1 a dropped choice.
#   firsts     first expert of each rank, and the number of experts
#   top_k, padding
#   indices S  choices of rank S, token after token
#   tokens S R tokens of rank S that go to rank R, in the order of their rows
#   counts R   tokens for each expert of rank R
#   offsets R  first row of each of its experts, and the number of rows
#   rows S R   row at R of each choice of S, -1 where it goes elsewhere
";

fn worlds() -> Vec<(&'static str, World)> {
    let mut random = Random(7);
    let even = |world: u32, experts: u32| (0..=world).map(|rank| rank * experts / world).collect();
    let world =
        |firsts: Vec<u32>, top_k, padding, sources| World { firsts, top_k, padding, sources };
    let mut uniform = |ranks: u32, tokens: u32, top_k, experts| -> Vec<_> {
        (0..ranks).map(|_| random.choices(tokens, top_k, experts)).collect()
    };
    vec![
        ("alone", world(vec![0, 4], 2, 4, uniform(1, 3, 2, 4))),
        ("two", world(even(2, 8), 3, 1, uniform(2, 4, 3, 8))),
        ("four", world(even(4, 16), 4, 8, uniform(4, 5, 4, 16))),
        ("uneven", world(vec![0, 1, 1, 7, 9], 3, 2, uniform(4, 3, 3, 9))),
        ("all-to-one", world(even(3, 6), 1, 16, vec![vec![5; 4]; 3])),
        ("none", world(even(2, 4), 2, 4, vec![vec![DROPPED; 6], vec![]])),
        ("silent-rank", world(even(3, 12), 4, 4, [uniform(2, 3, 4, 12), vec![vec![]]].concat())),
        ("wide", world(vec![0, 512, 1024], 32, 128, uniform(2, 1, 32, 1024))),
    ]
}

fn line<T: ToString>(text: &mut String, name: &str, numbers: impl IntoIterator<Item = T>) {
    text.push_str(name);
    for number in numbers {
        write!(text, " {}", number.to_string()).unwrap();
    }
    text.push('\n');
}

/// The choices' rows at a rank, by a world's sorted lists.
fn rows_at(world: &World, source: u32, rank: u32) -> Vec<i64> {
    let mut rows = vec![-1; world.sources[source as usize].len()];
    for ((_, from, token, choice), row) in world.rows(rank).1 {
        if from == source {
            rows[(token * world.top_k + choice) as usize] = row.into();
        }
    }
    rows
}

fn write() -> String {
    let mut text = String::from(HEAD);
    for (name, world) in worlds() {
        line(&mut text, "case", [name]);
        line(&mut text, "firsts", &world.firsts);
        line(&mut text, "top_k", [world.top_k]);
        line(&mut text, "padding", [world.padding]);
        for (source, indices) in world.sources.iter().enumerate() {
            line(&mut text, &format!("indices {source}:"), indices);
        }
        for rank in 0..world.world() {
            for source in 0..world.world() {
                line(&mut text, &format!("tokens {source} {rank}:"), world.tokens(source, rank));
            }
            let experts = world.firsts[rank as usize]..world.firsts[rank as usize + 1];
            line(&mut text, &format!("counts {rank}:"), experts.map(|expert| world.count(expert)));
            line(&mut text, &format!("offsets {rank}:"), world.rows(rank).0);
            for source in 0..world.world() {
                line(&mut text, &format!("rows {source} {rank}:"), rows_at(&world, source, rank));
            }
        }
    }
    text
}

fn numbers(text: &str) -> Vec<i64> {
    text.split_whitespace().map(|word| word.parse().unwrap()).collect()
}

/// One case, as read from the file; facts by the words before their numbers.
fn facts<'a>(case: &'a str) -> impl Fn(&str) -> Vec<i64> + use<'a> {
    move |name| {
        let line = case.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        numbers(line.unwrap_or_else(|| panic!("no {name}")))
    }
}

#[test]
fn the_golden_file_is_what_the_sorted_lists_say() {
    let text = write();
    if std::env::var_os("IMMWIRE_WRITE_GOLDEN").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/moe/golden.txt");
        std::fs::write(path, &text).unwrap();
    } else {
        assert!(text == TEXT, "golden.txt is not of this format");
    }
}

#[test]
fn the_golden_file_is_what_the_routing_says() {
    let (mut cases, mut rows_seen) = (0, 0);
    for case in TEXT.split("\ncase ").skip(1) {
        // The first lines have no colon.
        let simple = |name: &str| {
            let line = case.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            numbers(line.unwrap())
        };
        let fact = facts(case);
        let firsts: Vec<_> = simple("firsts").iter().map(|first| *first as u32).collect();
        let (top_k, padding) = (simple("top_k")[0] as u32, simple("padding")[0] as u32);
        let placement = Placement::new(&firsts).unwrap();
        let (world, experts) = (placement.world(), placement.experts());
        let indices =
            |source| fact(&format!("indices {source}")).iter().map(|i| *i as i32).collect();
        let indices: Vec<Vec<_>> = (0..world).map(indices).collect();
        let routing =
            |source: u32| Routing::new(&indices[source as usize], top_k, experts).unwrap();
        for rank in 0..world {
            let mine = placement.experts_of(rank);
            let mut counts = vec![0; mine.len()];
            for source in 0..world {
                routing(source).count_experts(mine.clone(), &mut counts).unwrap();
                let tokens = routing(source).tokens_at(mine.clone()).map(i64::from);
                assert_eq!(tokens.collect::<Vec<_>>(), fact(&format!("tokens {source} {rank}")));
            }
            let wide = |list: &[u32]| list.iter().copied().map(i64::from).collect::<Vec<_>>();
            assert_eq!(wide(&counts), fact(&format!("counts {rank}")));
            let (mut offsets, mut given) = (vec![0; mine.len() + 1], vec![0; mine.len()]);
            let mut layout =
                Layout::new(mine, &counts, some(padding), &mut offsets, &mut given).unwrap();
            assert_eq!(wide(layout.offsets()), fact(&format!("offsets {rank}")));
            for source in 0..world {
                let mut rows = vec![-1; indices[source as usize].len()];
                let visit = |arrival: Arrival| {
                    rows[(arrival.token * top_k + arrival.choice) as usize] = arrival.row.into();
                    rows_seen += 1;
                };
                layout.place(&routing(source), visit).unwrap();
                assert_eq!(rows, fact(&format!("rows {source} {rank}")));
            }
        }
        cases += 1;
    }
    assert!(cases == worlds().len() && rows_seen > 150, "{cases} cases, {rows_seen} rows");
}
