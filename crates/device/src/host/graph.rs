//! Graphs of the host device: lanes of nodes with record/wait edges between them.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use tilewire_core::{Error, Result};

use super::stream::{HostStream, Job, Node};

/// An operation on one lane of a graph.
pub(super) enum LaneOp {
    Node(Node),
    /// Sets the edge with this number.
    Record(usize),
    /// Waits for the edge with this number.
    Wait(usize),
}

/// The place of a captured event.
#[derive(Clone)]
pub(super) struct CaptureMark {
    pub session: Arc<Session>,
    pub id: usize,
}

/// A capture in progress, shared by all streams that joined it.
pub(super) struct Session {
    inner: Mutex<SessionInner>,
}

#[derive(Default)]
struct SessionInner {
    lanes: Vec<Vec<LaneOp>>,
    num_edges: usize,
    /// Streams that joined by waiting for a captured event.
    enrolled: Vec<HostStream>,
    ended: bool,
}

impl Session {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { inner: Mutex::default() })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, SessionInner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add_lane(&self) -> usize {
        let mut s = self.lock();
        s.lanes.push(Vec::new());
        s.lanes.len() - 1
    }

    pub fn push(&self, lane: usize, op: LaneOp) {
        self.lock().lanes[lane].push(op);
    }

    pub fn push_record(&self, lane: usize) -> usize {
        let mut s = self.lock();
        let id = s.num_edges;
        s.num_edges += 1;
        s.lanes[lane].push(LaneOp::Record(id));
        id
    }

    pub fn enroll(&self, stream: &HostStream) {
        self.lock().enrolled.push(stream.clone());
    }

    /// Nothing can be added from now on; the streams that had joined.
    pub fn end(&self) -> Vec<HostStream> {
        let mut s = self.lock();
        s.ended = true;
        std::mem::take(&mut s.enrolled)
    }

    /// True once the capture has ended on the stream where it began.
    pub fn has_ended(&self) -> bool {
        self.lock().ended
    }

    pub fn finish(&self) -> Result<HostGraph> {
        let mut s = self.lock();
        let lanes = std::mem::take(&mut s.lanes);
        let graph = HostGraph { lanes, num_edges: s.num_edges, running: Mutex::new(()) };
        drop(s);
        graph.check_joined()?;
        Ok(graph)
    }
}

/// Captured work that can be made executable and replayed many times.
pub struct HostGraph {
    lanes: Vec<Vec<LaneOp>>,
    num_edges: usize,
    /// One replay at a time: two that interleaved on the lanes would wait for each other's edges.
    running: Mutex<()>,
}

/// Edges of one replay.
struct Edges {
    set: Mutex<Vec<bool>>,
    changed: Condvar,
    /// The first error of a side lane.
    failed: Mutex<Option<Error>>,
}

impl Edges {
    fn failed(&self) -> std::sync::MutexGuard<'_, Option<Error>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostGraph {
    /// Number of nodes.
    pub fn num_nodes(&self) -> usize {
        self.lanes.iter().flatten().filter(|op| matches!(op, LaneOp::Node(_))).count()
    }

    /// Every side lane must end in a record that the origin (transitively) waits for, or the
    /// replay would be complete before its work is.
    fn check_joined(&self) -> Result<()> {
        for lane in &self.lanes[1..] {
            let tail = lane.iter().rev().take_while(|op| !matches!(op, LaneOp::Record(_))).count();
            let joined = lane.iter().rev().nth(tail).is_some_and(|op| match op {
                LaneOp::Record(id) => {
                    self.lanes.iter().flatten().any(|o| matches!(o, LaneOp::Wait(w) if w == id))
                }
                _ => false,
            });
            let dangling = lane.iter().rev().take(tail).any(|op| matches!(op, LaneOp::Node(_)));
            if dangling || !joined {
                return Err(Error::invalid("a stream that joined the capture was not joined back")
                    .hint("record an event on it and wait for that on the captured stream"));
            }
        }
        Ok(())
    }

    /// Makes the graph executable: gives each side lane a stream of its own.
    ///
    /// # Errors
    /// `Exhausted` if there is no thread for a lane.
    pub fn instantiate(self) -> Result<HostGraphExec> {
        let lanes = (1..self.lanes.len())
            .map(|i| HostStream::new(format!("graph-lane{i}")))
            .collect::<Result<Vec<_>>>()?;
        Ok(HostGraphExec { graph: Arc::new(self), lanes: Arc::new(lanes) })
    }

    /// Runs all lanes, lane 0 on this thread. Called by the stream that replays.
    pub(super) fn run(self: &Arc<Self>, lanes: &[HostStream]) -> Result<()> {
        let _alone = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let edges = Arc::new(Edges {
            set: Mutex::new(vec![false; self.num_edges]),
            changed: Condvar::new(),
            failed: Mutex::default(),
        });
        let done = super::HostEvent::new();
        for (i, stream) in lanes.iter().enumerate() {
            let (graph, edges) = (self.clone(), edges.clone());
            let lane = move || {
                // The replaying stream reports it: nobody looks at the streams of the lanes.
                if let Err(e) = graph.run_lane(i + 1, &edges) {
                    edges.failed().get_or_insert(e);
                }
                Ok(())
            };
            stream.submit(Job::Node(Node::new("graph lane", lane)))?;
        }
        let first = self.run_lane(0, &edges);
        for stream in lanes {
            stream.record(&done)?;
            done.synchronize(None)?;
        }
        first.and(edges.failed().take().map_or(Ok(()), Err))
    }

    fn run_lane(&self, lane: usize, edges: &Edges) -> Result<()> {
        let lock = || edges.set.lock().unwrap_or_else(PoisonError::into_inner);
        let mut first = Ok(());
        for op in &self.lanes[lane] {
            match op {
                // A failed node must not stop the lane: others wait for its edges.
                LaneOp::Node(n) => first = first.and(n.execute()),
                LaneOp::Record(id) => {
                    lock()[*id] = true;
                    edges.changed.notify_all();
                }
                LaneOp::Wait(id) => {
                    let mut set = lock();
                    while !set[*id] {
                        set = edges.changed.wait(set).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            }
        }
        first
    }
}

/// A graph ready for [`HostStream::replay`].
#[derive(Clone)]
pub struct HostGraphExec {
    pub(super) graph: Arc<HostGraph>,
    pub(super) lanes: Arc<Vec<HostStream>>,
}

impl HostGraphExec {
    /// Number of nodes that one replay runs.
    pub fn num_nodes(&self) -> usize {
        self.graph.num_nodes()
    }
}
