//! Progress of commands that go through cases, on standard error: a bar on a terminal; elsewhere a
//! line for each case that takes long, so that a log shows what is being waited for.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::complain;

/// A case is long after this; the next lines come after twice the time of the one before.
const LONG: Duration = Duration::from_secs(5);

/// The progress of a command through its cases.
pub(crate) struct Progress(Option<Way>);

enum Way {
    Bar(ProgressBar),
    Lines { cases: Sender<String>, thread: JoinHandle<()>, num: usize },
}

impl Progress {
    /// For `num` cases of `title`. On a process that does not speak, nothing.
    pub fn new(num: usize, title: &str, speaks: bool) -> Self {
        if !speaks {
            return Self(None);
        }
        if !std::io::stderr().is_terminal() {
            let (cases, next) = channel::<String>();
            let begun = std::thread::Builder::new().name("progress".to_owned());
            // Without a thread there is no progress to be seen; the command goes on.
            let thread = begun.spawn(move || {
                let mut case = next.recv().ok();
                while let Some(name) = case {
                    case = watch(&next, &name, LONG, complain);
                }
            });
            return Self(thread.ok().map(|thread| Way::Lines { cases, thread, num }));
        }
        let bar = ProgressBar::new(num as u64);
        let template = "{prefix} [{bar:30}] {pos}/{len} {elapsed_precise} {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_prefix(title.to_owned());
        bar.enable_steady_tick(Duration::from_millis(500));
        Self(Some(Way::Bar(bar)))
    }

    /// Case `i` begins.
    pub fn step(&self, i: usize, name: &str) {
        match &self.0 {
            Some(Way::Bar(bar)) => {
                bar.set_position(i as u64);
                bar.set_message(name.to_owned());
            }
            Some(Way::Lines { cases, num, .. }) => {
                // The thread ends only when the sender does.
                cases.send(format!("case {} of {num}, {name}", i + 1)).ok();
            }
            None => {}
        }
    }

    /// Everything is done: removes the bar.
    pub fn end(self) {
        match self.0 {
            Some(Way::Bar(bar)) => bar.finish_and_clear(),
            Some(Way::Lines { cases, thread, .. }) => {
                drop(cases);
                thread.join().ok();
            }
            None => {}
        }
    }
}

/// Waits for the next case while `name` runs, and writes a line when that takes long.
fn watch(
    next: &std::sync::mpsc::Receiver<String>,
    name: &str,
    long: Duration,
    mut write: impl FnMut(String),
) -> Option<String> {
    let begun = Instant::now();
    let mut after = long;
    loop {
        match next.recv_timeout(after.saturating_sub(begun.elapsed())) {
            Ok(case) => return Some(case),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {
                write(format!("{name}: {:.0} s so far", begun.elapsed().as_secs_f64()));
                after *= 2;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_a_case_that_takes_long_and_none_for_a_short_one() {
        let (send, next) = channel();
        send.send("second".to_owned()).unwrap();
        let mut lines = Vec::new();
        let long = Duration::from_millis(40);
        let case = watch(&next, "first", long, |l| lines.push(l));
        assert_eq!((case.as_deref(), lines.len()), (Some("second"), 0));
        let (got, mut sender) = (std::sync::Mutex::new(Vec::new()), Some(send));
        // The first line ends the case.
        let case = watch(&next, "second", long, |l| {
            got.lock().unwrap().push(l);
            sender.take();
        });
        let lines = got.into_inner().unwrap();
        assert!(
            case.is_none() && lines.len() == 1 && lines[0].starts_with("second: "),
            "{lines:?}"
        );
    }
}
