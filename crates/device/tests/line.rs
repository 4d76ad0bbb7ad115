//! The queue of a stream under every interleaving of its threads (loom): the file that streams use.
//! A job that nobody runs, two at once or one in the wrong place end in a deadlock or an assertion.

use loom::model::Builder;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{self, Arc, Condvar, Mutex};
use loom::thread;

#[path = "../src/host/line.rs"]
mod line;

use line::Line;

/// A number that rises, and that threads wait for.
struct Event(Mutex<usize>, Condvar);

impl Event {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(0), Condvar::new()))
    }

    fn reach(&self, n: usize) {
        *self.0.lock().unwrap() = n;
        self.1.notify_all();
    }

    fn reached(&self) -> usize {
        *self.0.lock().unwrap()
    }

    fn wait(&self, n: usize) {
        let mut now = self.0.lock().unwrap();
        while *now < n {
            now = self.1.wait(now).unwrap();
        }
    }
}

type Job = Box<dyn FnOnce() + Send>;
type Jobs = Arc<Line<Job>>;

fn run(job: Job) {
    job();
}

fn stream() -> (Jobs, thread::JoinHandle<()>) {
    let line: Jobs = Arc::new(Line::new());
    let mine = line.clone();
    (line, thread::spawn(move || mine.work(run)))
}

/// As a thread waits for a record: it runs what is in front of it, then it sleeps.
fn wait(line: &Jobs, event: &Event, n: usize) {
    line.help(|| event.reached() >= n, run);
    event.wait(n);
}

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut b = Builder::new();
    // More switches than these, each at every place, take minutes.
    b.preemption_bound = Some(3);
    b.check(f);
}

#[test]
fn each_job_runs_once_in_order_and_alone() {
    model(|| {
        let (line, worker) = stream();
        let (event, inside) = (Event::new(), Arc::new(AtomicUsize::new(0)));
        for n in 1..=3 {
            let (e, inside) = (event.clone(), inside.clone());
            line.push(Box::new(move || {
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two jobs at once");
                assert_eq!(e.reached() + 1, n, "in order");
                e.reach(n);
                inside.fetch_sub(1, Ordering::SeqCst);
            }));
            if n == 2 {
                wait(&line, &event, n);
            }
        }
        line.close();
        worker.join().unwrap();
        assert!(event.reached() == 3 && !line.is_mine());
    });
}

#[test]
fn two_threads_that_wait_leave_no_job_behind() {
    model(|| {
        let (line, worker) = stream();
        let (event, theirs, other) = (Event::new(), line.clone(), Event::new());
        let reach = |e: &Arc<Event>| -> Job {
            let e = e.clone();
            Box::new(move || e.reach(1))
        };
        let (job, seen) = (reach(&other), other.clone());
        let second = thread::spawn(move || {
            theirs.push(job);
            wait(&theirs, &seen, 1);
        });
        line.push(reach(&event));
        wait(&line, &event, 1);
        second.join().unwrap();
        line.close();
        worker.join().unwrap();
        assert_eq!((event.reached(), other.reached()), (1, 1));
    });
}

/// The shape of a launch of two lanes: `side` waits for a record on `main`, and the job behind that
/// record waits for one of `side`.
#[test]
fn who_waits_for_a_stream_never_runs_what_waits_for_itself() {
    model(|| {
        let (main, worker) = stream();
        let side: Jobs = Arc::new(Line::new());
        let [fork, copied, done] = [(); 3].map(|()| Event::new());
        let reach = |e: &Arc<Event>| -> Job {
            let e = e.clone();
            Box::new(move || e.reach(1))
        };
        main.push(reach(&fork));
        let (first, of) = (main.clone(), fork.clone());
        side.push(Box::new(move || wait(&first, &of, 1)));
        side.push(reach(&copied));
        let compute = copied.clone();
        main.push(Box::new(move || compute.wait(1)));
        main.push(reach(&done));
        side.close();
        // The thread of `side`.
        let copies = thread::spawn(move || side.work(run));
        done.wait(1);
        main.close();
        worker.join().unwrap();
        copies.join().unwrap();
    });
}

/// All threads of a model have one number, so that no push of any wakes while the queue is held.
#[test]
fn a_held_queue_leaves_no_job_behind() {
    model(|| {
        let (line, worker) = stream();
        let (first, last) = (Event::new(), Event::new());
        let reach = |e: &Arc<Event>| -> Job {
            let e = e.clone();
            Box::new(move || e.reach(1))
        };
        line.hold();
        line.push(reach(&first));
        wait(&line, &first, 1);
        line.push(reach(&last));
        line.let_go();
        last.wait(1);
        line.close();
        worker.join().unwrap();
    });
}

/// Another thread waits for what the holder has pushed and not begun.
#[test]
fn who_waits_for_a_held_job_runs_it() {
    model(|| {
        let line: Jobs = Arc::new(Line::new());
        let (event, theirs) = (Event::new(), line.clone());
        let e = event.clone();
        line.hold();
        line.push(Box::new(move || e.reach(1)));
        let other = thread::spawn(move || wait(&theirs, &event, 1));
        other.join().unwrap();
        line.let_go();
    });
}
