//! `immwire bench`: from arguments to rows on the screen.

use super::plan::{Case, PlanError, Wish};
use super::process::{PeerProcess, ProcessError};
use super::run::{Bench, BenchError};
use super::serve::serve;
use crate::args::{BenchArgs, PeerArgs};
use crate::motor::{Mode, Motor, MotorError};
use crate::report::{PlotError, Row, plot, table};
use crate::transport::{Carrier, Peers};
use immwire::Place;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// Why the command failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// It cannot be measured as asked.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A peer process did not start.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The engine, outside of a row.
    #[error(transparent)]
    Motor(#[from] MotorError),
    /// A row could not be measured.
    #[error("{bench}: {error}")]
    Row {
        /// Which.
        bench: &'static str,
        /// Why.
        error: BenchError,
    },
    /// The bytes or counts were not right.
    #[error("{0}: what arrived is not what was sent: {1}")]
    Wrong(&'static str, String),
    /// No picture.
    #[error(transparent)]
    Plot(#[from] PlotError),
    /// The output is gone.
    #[error("cannot write the result: {0}")]
    Output(#[from] std::io::Error),
}

impl CommandError {
    /// Whether it was Ctrl-C, and no failure.
    #[must_use]
    pub const fn interrupted(&self) -> bool {
        use MotorError::Interrupted;
        matches!(
            self,
            Self::Motor(Interrupted) | Self::Row { error: BenchError::Motor(Interrupted), .. }
        )
    }

    /// What the engine said, if it was the engine.
    #[must_use]
    pub const fn motor(&self) -> Option<&MotorError> {
        match self {
            Self::Motor(error) | Self::Row { error: BenchError::Motor(error), .. } => Some(error),
            _ => None,
        }
    }
}

const CONNECT: Duration = Duration::from_secs(10);

/// Runs it. All rows are shown even if the bytes of one were wrong, and those before one that failed.
///
/// # Errors
///
/// [`CommandError`].
pub fn bench(args: &BenchArgs) -> Result<(), CommandError> {
    if args.listen {
        let carrier = args.transport.carrier(&args.gpus, Peers::Come).map_err(MotorError::from)?;
        return listen(&carrier, args.nics, args.mode.unwrap_or(Mode::Polled));
    }
    let peers = args.connect.first().map_or(Peers::Own, Peers::At);
    let carrier = args.transport.carrier(&args.gpus, peers).map_err(MotorError::from)?;
    let cases = Wish { gpus: carrier.gpus.is_some(), ..wish(args) }.plan()?;
    let bar = progress_bar(args, cases.len());
    let mut rows = Vec::new();
    let (mut wrong, mut failed) = (None, None);
    for (number, case) in cases.iter().enumerate() {
        bar.set_message(case.what.name());
        let measured = measure(args, &carrier, case, &mut |share| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "0 to 1000"
            )]
            bar.set_position(number as u64 * STEPS + (share * STEPS as f64) as u64);
        });
        let (row, found) = match measured {
            Ok(measured) => measured,
            Err(Failure::Row(error)) => {
                failed = Some(CommandError::Row { bench: case.what.name(), error });
                break;
            }
            Err(Failure::Other(error)) => {
                failed = Some(error);
                break;
            }
        };
        if args.json {
            let line = serde_json::to_string(&row).map_err(std::io::Error::from)?;
            bar.suspend(|| writeln!(std::io::stdout(), "{line}"))?;
        }
        wrong = wrong.or(found.map(|found| (case.what.name(), found)));
        rows.push(row);
    }
    bar.finish_and_clear();
    let shown = failed.is_none() || !rows.is_empty();
    if !args.json && shown {
        writeln!(std::io::stdout(), "{}", table(&rows))?;
    }
    if let Some(path) = args.plot.as_ref().filter(|_| shown) {
        plot(&rows, path)?;
    }
    if let Some(failed) = failed {
        if let Some((bench, found)) = wrong {
            tracing::error!("{}", CommandError::Wrong(bench, found));
        }
        return Err(failed);
    }
    match wrong {
        Some((bench, found)) => Err(CommandError::Wrong(bench, found)),
        None => Ok(()),
    }
}

/// The hidden peer process: says its address, serves, ends with its input.
///
/// # Errors
///
/// [`CommandError`].
pub fn peer(args: &PeerArgs) -> Result<(), CommandError> {
    super::process::end_with_input();
    let carrier = args.transport.carrier(&args.gpus, Peers::Come).map_err(MotorError::from)?;
    listen(&carrier, args.nics, args.mode)
}

fn listen(carrier: &Carrier, nics: u8, mode: Mode) -> Result<(), CommandError> {
    let mut motor = Motor::on(carrier, nics, mode)?;
    let mut out = std::io::stdout();
    writeln!(out, "{}", motor.engine().address())?;
    out.flush()?;
    if out.is_terminal() {
        let next = "in another terminal: immwire bench write --connect ADDR";
        crate::say(format_args!("serving until Ctrl-C; {next}"));
    }
    let place = carrier.gpus.map_or(Place::Host, |pair| pair.dst);
    Ok(serve(&mut motor, place)?)
}

fn wish(args: &BenchArgs) -> Wish {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let connected = u32::try_from(args.connect.len()).unwrap_or(u32::MAX);
    Wish {
        what: args.what,
        sizes: args.size.clone(),
        pages: args.pages,
        page_bytes: args.page_size,
        depth: args.depth,
        // As many peers as were named.
        peers: args.peers.or((connected > 1).then_some(connected)),
        mode: args.mode,
        seconds: args.seconds,
        gpus: false,
        processors: u32::try_from(processors).unwrap_or(u32::MAX),
    }
}

enum Failure {
    Row(BenchError),
    Other(CommandError),
}

impl<E: Into<CommandError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Other(error.into())
    }
}

/// One row, with peers of its own.
fn measure(
    args: &BenchArgs,
    carrier: &Carrier,
    case: &Case,
    progress: &mut dyn FnMut(f64),
) -> Result<(Row, Option<String>), Failure> {
    let mut motor = Motor::on(carrier, args.nics, case.mode)?;
    let mut processes = Vec::new();
    let mut addresses = args.connect.clone();
    if addresses.is_empty() {
        for _ in 0..case.peers {
            let process = PeerProcess::start(carrier, args.nics, case.mode)?;
            addresses.push(process.address().clone());
            processes.push(process);
        }
    }
    let mut peers = Vec::new();
    for address in &addresses {
        peers.push((motor.connect(address, CONNECT)?, address.to_string()));
    }
    let baseline = !args.no_baseline;
    let mut bench = Bench { motor: &mut motor, carrier, peers: &peers, baseline, progress };
    let measured = bench.run(case).map_err(Failure::Row);
    // The engine leaves before its peers do.
    drop(motor);
    drop(processes);
    measured
}

const STEPS: u64 = 1000;

fn progress_bar(args: &BenchArgs, rows: usize) -> ProgressBar {
    if args.json && std::io::stdout().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(rows as u64 * STEPS);
    let style = ProgressStyle::with_template("{msg:>8} [{wide_bar}] {elapsed} of about {duration}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar
}
