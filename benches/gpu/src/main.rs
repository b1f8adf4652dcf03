//! Checks the kernels on the GPUs of this machine, and measures them.
//!
//!     immwire-bench-gpu check | check-few | captures | joined | time | ends FROM TO SMS | signals FROM TO
//!     immwire-bench-gpu gpus | exchange RANKS SMS MIB
//!     immwire-bench-gpu moe-check | moe-check-few | moe-replay | moe-time [TOKENS] | moe-processes N | moe-turns JSON
//!
//! `joined` writes between two processes from and to regions over several allocations. `ends` measures from end to end between two processes,
//! from a GPU, by number, or `host`, to another; `exchange` among a process for each rank, all to all at once, with pools of so many MiB.
//! `signals` measures how long a watcher's callback and a waiting stream take to hear of something. `moe-turns` measures whenever it is
//! told to. `gpus` says how many there are. What is of experts takes all GPUs, as does `exchange`, the rest two.
//!
//! Writes one JSON object to the standard output, progress to the standard error. `benches/gpu/run` runs it all. Exit
//! status 0 if everything that was run was right; slow is not wrong.

mod captures;
mod check;
mod direct;
mod ends;
mod exchange;
mod graph;
mod joined;
mod moe;
mod processes;
mod rig;
mod row;
mod signals;
mod standby;
mod time;

use immwire_cuda::Device;
use serde_json::{Map, Value, json};
use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

/// However many there are.
const ALL: u32 = u32::MAX;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["gpus"] => count(),
        ["receive", place] => ends::receive(place).map(|()| Value::Null),
        ["hold", gpu] => joined::hold(gpu).map(|()| Value::Null),
        ["ends", from, to, sms] => {
            sms.parse().map_err(Into::into).and_then(|sms| ends::measure(from, to, sms))
        }
        ["exchange", ranks, sms, mib] => numbers([ranks, sms, mib])
            .and_then(|[ranks, sms, mib]| exchange::measure(ranks, sms, u64::from(mib) << 20)),
        ["exchange-rank", rank, ranks, sms, pool] => pool
            .parse()
            .map_err(Into::into)
            .and_then(|pool| Ok((numbers([rank, ranks, sms])?, pool)))
            .and_then(|([rank, ranks, sms], pool)| exchange::rank(rank, ranks, sms, pool))
            .map(|()| Value::Null),
        ["signals", from, to] => match (from.parse(), to.parse()) {
            (Ok(from), Ok(to)) => signals::measure(from, to),
            _ => Err("GPUs are numbers".into()),
        },
        ["moe-processes", count] => count.parse().map_err(Into::into).and_then(moe::processes),
        ["moe-time", tokens] => tokens
            .parse()
            .map_err(Into::into)
            .and_then(|tokens| moe::time(&rig::gpus(ALL)?, Some(tokens))),
        ["moe-turns", asked] => rig::gpus(ALL)
            .map_err(Into::into)
            .and_then(|gpus| moe::turns(&gpus, asked))
            .map(|()| Value::Null),
        ["moe-process", world, rank, case] => match (world.parse(), rank.parse(), case.parse()) {
            (Ok(world), Ok(rank), Ok(case)) => process(world, rank, case),
            _ => Err("ranks are numbers".into()),
        },
        [what] => run(what),
        _ => Err("gpus, check, check-few, captures, joined, time, ends FROM TO SMS, exchange RANKS SMS MIB, signals FROM TO, or moe-check, moe-replay, \
                  moe-time, moe-processes N, moe-turns JSON"
            .into()),
    };
    match done {
        Ok(Value::Null) => ExitCode::SUCCESS,
        Ok(result) => {
            println!("{result}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("immwire-bench-gpu: {why}");
            ExitCode::FAILURE
        }
    }
}

fn numbers<const N: usize>(words: [&str; N]) -> Result<[u32; N], Box<dyn Error>> {
    let mut numbers = [0; N];
    for (number, word) in numbers.iter_mut().zip(words) {
        *number = word.parse()?;
    }
    Ok(numbers)
}

fn count() -> Result<Value, Box<dyn Error>> {
    match Device::count()? {
        0 => Err("no GPU here".into()),
        count => Ok(json!({ "gpus": count })),
    }
}

fn process(world: u32, rank: u32, case: u32) -> Result<Value, Box<dyn Error>> {
    moe::process(&rig::gpus(ALL)?, world, rank, case).map(|()| Value::Null)
}

fn run(what: &str) -> Result<Value, Box<dyn Error>> {
    let gpus = rig::gpus(if what.starts_with("moe") { ALL } else { 2 })?;
    if gpus.is_empty() {
        return Err("no GPU here".into());
    }
    let mut result = Map::new();
    let names = gpus.iter().map(|g| g.device.name()).collect::<Result<Vec<_>, _>>()?;
    result.insert("gpus".into(), json!(names));
    result.insert("sms".into(), json!(gpus[0].device.gpu().sms));
    result.insert("host_atomics".into(), json!(gpus[0].device.host_atomics()));
    match what {
        "check" | "check-few" => {
            result.insert("direct".into(), direct::run(&gpus)?);
            result.insert("checked".into(), check::run(&gpus, what == "check-few")?);
            let rounds = if what == "check-few" { 100 } else { 2000 };
            result.insert("standby".into(), standby::run(&gpus, rounds)?);
        }
        "captures" => {
            result.insert("captures".into(), captures::run(&gpus)?);
        }
        "joined" => {
            result.insert("bounds".into(), joined::bounds(&gpus[0])?);
            result.insert("joined".into(), joined::run(gpus.len())?);
        }
        "moe-check" | "moe-check-few" => {
            result.insert("moe".into(), moe::check(&gpus, what == "moe-check-few")?);
        }
        "moe-replay" => {
            result.insert("moe".into(), moe::replay(&gpus, 100_000)?);
        }
        "moe-time" => {
            result.insert("moe".into(), moe::time(&gpus, None)?);
        }
        "time" => {
            let mut bench = time::Bench::new(&gpus)?;
            type Part<'a> = fn(&mut time::Bench<'a>) -> Result<Value, Box<dyn Error>>;
            let parts: [(&str, Part<'_>); 7] = [
                ("contiguous", time::Bench::contiguous),
                ("pages", time::Bench::pages),
                ("turns", time::Bench::turns),
                ("rings", time::Bench::rings),
                ("others", time::Bench::others),
                ("streams", time::Bench::streams),
                ("hand_over", time::Bench::hand_over),
            ];
            for (name, part) in parts {
                let started = Instant::now();
                result.insert(name.into(), part(&mut bench)?);
                eprintln!("{name}: {:.1} s", started.elapsed().as_secs_f64());
            }
        }
        _ => {
            return Err(
                "gpus, check, check-few, captures, joined, time, moe-check, moe-check-few, moe-replay or moe-time".into()
            );
        }
    }
    Ok(Value::Object(result))
}
