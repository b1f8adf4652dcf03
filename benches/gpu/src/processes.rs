//! Other processes of this program, which are told lines and answer with lines; and the clock that all of them read.

use immwire::core::wire::Wire;
use immwire::{ImmTag, MrDesc, NetAddr};
use std::error::Error;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Nanoseconds of the clock that all processes share.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// The word at a place of a line.
pub(crate) fn ask<T: FromStr<Err: Error + 'static>>(line: &str, at: usize) -> Outcome<T> {
    Ok(line.split_whitespace().nth(at).ok_or("a word is missing")?.parse()?)
}

/// Where to write to: an engine, a region of its, and a counter.
pub(crate) struct Place {
    pub(crate) address: NetAddr,
    pub(crate) desc: MrDesc,
    pub(crate) tag: ImmTag,
}

impl Place {
    /// Three words.
    pub(crate) fn to_line(&self) -> Outcome<String> {
        let mut desc = [0; 1024];
        let bytes = self.desc.encode(&mut desc)?;
        let hex: String = desc[..bytes].iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(format!("{} {hex} {}", self.address, self.tag.bits()))
    }

    pub(crate) fn of_line(line: &str) -> Outcome<Self> {
        let hex: String = ask(line, 1)?;
        let bytes = (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16));
        Ok(Self {
            address: ask(line, 0)?,
            desc: MrDesc::decode(&bytes.collect::<Result<Vec<_>, _>>()?)?,
            tag: ImmTag::from_bits(ask(line, 2)?).ok_or("a tag that is none")?,
        })
    }
}

/// Another process, as the one that started it sees it. It is ended with this.
pub(crate) struct Process {
    /// None if a thread takes its place.
    child: Option<Child>,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(words: &[&str]) -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take().ok_or("no pipe")?;
        let answers = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        Ok(Self { child: Some(child), orders, answers })
    }

    /// A thread in its place, which is to end with the orders.
    #[cfg(test)]
    pub(crate) fn thread<T: Send + 'static>(
        run: impl FnOnce(&Orders, &mut io::PipeWriter) -> T + Send + 'static,
    ) -> Outcome<(Self, std::thread::JoinHandle<T>)> {
        use std::os::fd::OwnedFd;
        let ((heard, orders), (answers, mut said)) = (io::pipe()?, io::pipe()?);
        let thread = std::thread::spawn(move || run(&Orders::of(heard), &mut said));
        let (orders, answers) = (OwnedFd::from(orders).into(), OwnedFd::from(answers).into());
        Ok((Self { child: None, orders, answers: BufReader::new(answers) }, thread))
    }

    pub(crate) fn say(&mut self, line: &str) -> Outcome<()> {
        Ok(writeln!(self.orders, "{line}")?)
    }

    /// Its next line; an error once it has ended. Whoever must not wait for ever sees to it that the other gives up in time.
    pub(crate) fn hear(&mut self) -> Outcome<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() { Err("the other process has ended".into()) } else { Ok(line) }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // One that has ended cannot be: that is what is wanted.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What such a process is told, for one that has other things to do meanwhile. The thread that reads it ends with the input.
pub(crate) struct Orders(Receiver<String>);

impl Orders {
    pub(crate) fn new() -> Self {
        Self::of(io::stdin())
    }

    fn of(input: impl io::Read + Send + 'static) -> Self {
        let (sender, orders) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(input).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self(orders)
    }

    /// The next line, once it is there; `None` once there are no more. `meanwhile` is called until then.
    pub(crate) fn next(&self, mut meanwhile: impl FnMut()) -> Option<String> {
        loop {
            match self.0.try_recv() {
                Ok(line) => return Some(line),
                Err(TryRecvError::Empty) => meanwhile(),
                Err(TryRecvError::Disconnected) => return None,
            }
        }
    }
}
