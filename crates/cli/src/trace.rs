//! Timelines: Perfetto (Chrome trace event) JSON, one process per rank, one thread per stream.

use std::path::Path;

use serde_json::{Value, json};
use tilewire::core::{Error, Result};
use tilewire::device::Span;

/// Spans of one rank as JSON values, for sending to rank 0.
pub fn to_json(spans: &[Span]) -> Value {
    spans.iter().map(|s| json!([s.name, s.lane, s.start_us, s.len_us])).collect()
}

/// The trace file of all ranks; `ranks[r]` is what [`to_json`] gave on rank `r`.
pub fn chrome(ranks: &[Value]) -> Value {
    let mut events = Vec::new();
    for (pid, spans) in ranks.iter().enumerate() {
        events.push(json!({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": format!("rank {pid}")}}));
        let mut lanes: Vec<&str> = Vec::new();
        for s in spans.as_array().into_iter().flatten() {
            let lane = s[1].as_str().unwrap_or("?");
            let tid = lanes.iter().position(|l| *l == lane).unwrap_or_else(|| {
                lanes.push(lane);
                events.push(json!({"ph": "M", "pid": pid, "tid": lanes.len() - 1, "name": "thread_name", "args": {"name": lane}}));
                lanes.len() - 1
            });
            events.push(json!({"ph": "X", "pid": pid, "tid": tid, "name": s[0], "ts": s[2], "dur": s[3]}));
        }
    }
    json!({"traceEvents": events, "displayTimeUnit": "ms"})
}

/// Writes the trace file.
///
/// # Errors
/// `Io` if it cannot be written.
pub fn write(path: &Path, ranks: &[Value]) -> Result<()> {
    std::fs::write(path, chrome(ranks).to_string()).map_err(|e| Error::io(path.display(), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_processes_and_streams_are_threads() {
        let span = |name: &str, lane: &str| Span { name: name.into(), lane: lane.into(), start_us: 1.0, len_us: 2.0 };
        let t = chrome(&[to_json(&[span("gemm", "main"), span("push", "copy"), span("gemm", "main")]), to_json(&[])]);
        let events = t["traceEvents"].as_array().unwrap();
        let work: Vec<_> = events.iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(work.len(), 3);
        assert_eq!((&work[0]["tid"], &work[1]["tid"], &work[2]["tid"]), (&json!(0), &json!(1), &json!(0)));
        assert_eq!(events.iter().filter(|e| e["name"] == "process_name").count(), 2);
    }
}
