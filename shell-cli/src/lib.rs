//! The immwire command: raw flags, checked arguments, run, an exit code.
//!
//! Thin by intent: what moves bytes is the crate `immwire`. Here are the measurements beside their
//! baselines, the file protocol of `push` and `recv`, and the words of `doctor`.
//!
//! | module | what |
//! |---|---|
//! | [`again`] | how this program starts itself |
//! | [`args`] | the command line |
//! | [`baseline`] | bare loops that do a benchmark's work without an engine |
//! | [`mod@bench`] | the benchmarks |
//! | [`doctor`] | what the machine has, and which path each pair takes |
//! | [`motor`] | an engine that is polled, or moves by itself |
//! | [`push`] | names, manifest, resumption and storage of transferred files |
//! | [`replay`] | a fault program once more |
//! | [`report`] | rows, statistics, table, JSON, SVG |
//! | [`shared`] | memory that two processes map |
//! | [`signals`] | Ctrl-C |
//! | [`sim`] | predictions on a simulated fabric |
//! | [`transport`] | which transport an engine gets, and what to do when it fails |

// By `say`: `eprintln!` panics where nobody reads.
#![deny(clippy::print_stderr)]

pub mod again;
pub mod args;
pub mod baseline;
pub mod bench;
pub mod doctor;
pub mod motor;
pub mod push;
pub mod replay;
pub mod report;
pub mod shared;
pub mod signals;
pub mod sim;
pub mod transport;

use args::{BenchCommand, Cli, Command, DoctorArgs, MoeBenchArgs, SimArgs, SimCommand};
use clap::Parser;
use std::ffi::OsString;
use std::fmt;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// A failure as the user meets it.
struct Failure {
    code: u8,
    message: String,
}

const FAILED: u8 = 1;
/// The command line makes no sense, as clap has it.
const NONSENSE: u8 = 2;
/// Of a doctor that failed itself: 0 to 2 are what it says of the machine.
const NO_DIAGNOSIS: u8 = 3;

/// Runs the command line of this process to its exit code: 0, or 1 with the reason on standard error;
/// 2 for a command line that makes no sense; 130 after Ctrl-C. `doctor` has its own: 0 to 2, and 3 with the reason on
/// standard error if it fails itself, or if its command line makes no sense.
#[must_use]
pub fn run() -> ExitCode {
    run_line(&std::env::args_os().collect::<Vec<_>>()).into()
}

/// As [`run`], for a program of which the command is a part: runs the command line `args`, whose first is the
/// name of the command. `program` is how the command is started once more ([`again`]). Call once: it listens for signals.
#[must_use]
pub fn run_as(args: Vec<OsString>, program: Vec<OsString>) -> u8 {
    again::started_by(program);
    run_line(&args)
}

fn run_line(args: &[OsString]) -> u8 {
    match Cli::try_parse_from(args) {
        Ok(cli) => start(&cli),
        Err(error) => {
            // A reader that has gone away is told nothing more.
            let _ = error.print();
            let of_doctor = args.get(1).is_some_and(|name| name == "doctor");
            match error.exit_code() {
                0 => 0, // Help was asked for.
                _ if of_doctor => NO_DIAGNOSIS,
                _ => NONSENSE,
            }
        }
    }
}

/// Has what engines have to say written to standard error, as `IMMWIRE_LOG` wants it, and warnings if that is not set. Whoever listens to
/// them already goes on to, and this does nothing.
pub fn log() {
    let filter = EnvFilter::try_from_env("IMMWIRE_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // It would say with `eprintln!` that nobody reads there.
    let log = log.log_internal_errors(false);
    let _ = log.with_ansi(std::io::stderr().is_terminal()).try_init();
}

/// Says a line on standard error. A reader that has gone away is told nothing more, and that ends nothing.
pub(crate) fn say(line: fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn start(cli: &Cli) -> u8 {
    log();
    let ended = signals::listen()
        .map_err(|error| failed(format!("cannot listen for signals: {error}")))
        .and_then(|()| dispatch(&cli.command));
    match ended {
        Ok(code) => code,
        Err(Failure { code, message }) => {
            say(format_args!("immwire: {message}"));
            match cli.command {
                Command::Doctor(_) if code == FAILED => NO_DIAGNOSIS,
                _ => code,
            }
        }
    }
}

fn dispatch(command: &Command) -> Result<u8, Failure> {
    let bench_failure = |error: bench::command::CommandError| Failure {
        code: if error.interrupted() { signals::INTERRUPTED } else { FAILED },
        message: advised(error.to_string(), error.motor()),
    };
    match command {
        Command::Bench(args) => match &args.apart {
            Some(BenchCommand::Moe(args)) => measure_moe(args),
            None => bench::command::bench(args).map_err(bench_failure).map(|()| 0),
        },
        Command::Peer(args) => bench::command::peer(args).map_err(bench_failure).map(|()| 0),
        Command::Doctor(args) => diagnose(args),
        Command::Sim(args) => simulate(args),
        Command::ProbeTarget => {
            doctor::probe::target().map_err(|error| failed(error.to_string())).map(|()| 0)
        }
        Command::ProbeLibfabric => {
            doctor::fabric::tell().map_err(|error| failed(error.to_string())).map(|()| 0)
        }
        Command::ProbeCuda => {
            doctor::cuda::tell().map_err(|error| failed(error.to_string())).map(|()| 0)
        }
        Command::ProbeVerbs => {
            doctor::rdma::tell().map_err(|error| failed(error.to_string())).map(|()| 0)
        }
        Command::Push(args) => {
            let start = std::time::Instant::now();
            let sent = push::send::push(args).map_err(|error| Failure {
                code: if error.interrupted() { signals::INTERRUPTED } else { FAILED },
                message: advised(error.to_string(), error.motor()),
            })?;
            say(format_args!("{}", push::send::summary(sent, start.elapsed())));
            Ok(0)
        }
        Command::Recv(args) => push::recv::recv(args).map(|()| 0).map_err(|error| Failure {
            code: if error.interrupted() { signals::INTERRUPTED } else { FAILED },
            message: advised(error.to_string(), error.motor()),
        }),
    }
}

/// What was said, and what to do about it, if something is to be done.
fn advised(said: String, error: Option<&motor::MotorError>) -> String {
    match error.and_then(transport::advice) {
        Some(advice) => format!("{said}\n  what to do: {advice}"),
        None => said,
    }
}

fn failed(message: String) -> Failure {
    Failure { code: FAILED, message }
}

fn interrupted() -> Failure {
    Failure { code: signals::INTERRUPTED, message: "interrupted".to_owned() }
}

fn measure_moe(args: &MoeBenchArgs) -> Result<u8, Failure> {
    bench::moe::bench(args).map(|()| 0).map_err(|error| {
        let interrupted = matches!(error, bench::moe::MoeBenchError::Interrupted);
        let code = if interrupted { signals::INTERRUPTED } else { FAILED };
        Failure { code, message: advised(error.to_string(), error.motor()) }
    })
}

fn simulate(args: &SimArgs) -> Result<u8, Failure> {
    let print = |text: &str| {
        // A reader that has gone away is told nothing more.
        let _ = writeln!(std::io::stdout(), "{text}");
    };
    let ended = match &args.command {
        SimCommand::Ep(args) => sim::ep(args, print),
        SimCommand::Replay(args) => {
            let nonsense =
                |error: replay::NoOperation| Failure { code: NONSENSE, message: error.to_string() };
            let (text, kept) = replay::replay(args).map_err(nonsense)?;
            print(&text);
            if signals::interrupted() {
                return Err(interrupted());
            }
            return Ok(if kept { 0 } else { FAILED });
        }
    };
    ended.map(|()| 0).map_err(|error| {
        let interrupted = matches!(error, sim::SimError::Interrupted);
        let code = if interrupted { signals::INTERRUPTED } else { FAILED };
        Failure { code, message: error.to_string() }
    })
}

fn diagnose(args: &DoctorArgs) -> Result<u8, Failure> {
    let width = terminal_width();
    let (json, text, code) = if args.pairing != args::PairingArgs::default() {
        let pairing = args.pairing.pair().map_err(failed)?;
        (serde_json::to_string_pretty(&pairing), pairing.text(width), 0)
    } else {
        let diagnosis = doctor::examine().map_err(|error| failed(error.to_string()))?;
        if signals::interrupted() {
            // What was not waited for says nothing of this machine.
            return Err(interrupted());
        }
        let code = diagnosis.verdict.exit_code;
        (serde_json::to_string_pretty(&diagnosis), diagnosis.text(width), code)
    };
    let text = if args.json { json.map_err(|error| failed(error.to_string()))? } else { text };
    writeln!(std::io::stdout(), "{text}").map_err(|error| failed(error.to_string()))?;
    Ok(code)
}

/// Columns of the terminal; 100 where there is none.
fn terminal_width() -> u16 {
    let out = std::io::stdout();
    let size = out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok()).flatten();
    size.map_or(100, |size| size.ws_col.max(60))
}
