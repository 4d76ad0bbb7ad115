//! Timelines: Perfetto (Chrome trace event) JSON, one process per rank, one thread per stream.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tilewire::core::{Error, Result};
use tilewire::device::Span;

/// Spans of one rank as JSON values, for sending to rank 0. They count from `began`: each process
/// has a beginning of its own.
pub fn to_json(spans: &[Span], began: SystemTime) -> Value {
    let began = began.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
    let spans = spans.iter().map(|s| json!([s.name, s.lane, s.start_us, s.len_us]));
    json!({"began": began, "spans": spans.collect::<Value>()})
}

/// The trace file of all ranks; `ranks[r]` is what [`to_json`] gave on rank `r`. Times count from
/// where the first rank began.
pub fn chrome(ranks: &[Value]) -> Value {
    let mut events = Vec::new();
    let first = ranks.iter().filter_map(|r| r["began"].as_u64()).min().unwrap_or(0);
    for (pid, rank) in ranks.iter().enumerate() {
        let later = rank["began"].as_u64().map_or(0.0, |us| (us - first) as f64);
        events.push(json!({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": format!("rank {pid}")}}));
        let mut lanes: Vec<&str> = Vec::new();
        for s in rank["spans"].as_array().into_iter().flatten() {
            let lane = s[1].as_str().unwrap_or("?");
            let tid = lanes.iter().position(|l| *l == lane).unwrap_or_else(|| {
                lanes.push(lane);
                events.push(json!({"ph": "M", "pid": pid, "tid": lanes.len() - 1, "name": "thread_name", "args": {"name": lane}}));
                lanes.len() - 1
            });
            let ts = s[2].as_f64().map(|us| us + later);
            events.push(
                json!({"ph": "X", "pid": pid, "tid": tid, "name": s[0], "ts": ts, "dur": s[3]}),
            );
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

/// `tilewire trace`: a self-contained HTML timeline; returns the exit code.
///
/// # Errors
/// `Io` for files that cannot be read or written, `Corrupt` if it is not a trace.
pub fn run(args: &crate::args::TraceArgs) -> Result<i32> {
    let bytes = crate::files::read(&args.file)?;
    let corrupt = |what: String| {
        Error::new(tilewire::core::ErrorKind::Corrupt, format!("{}: {what}", args.file.display()))
    };
    let (page, num) = page(&bytes).map_err(corrupt)?;
    std::fs::write(&args.html, page).map_err(|e| Error::io(args.html.display(), e))?;
    crate::say(format_args!("{}: {num} events", args.html.display()));
    Ok(0)
}

/// The page of a trace file, and its number of events; the error says what is wrong with the file.
fn page(bytes: &[u8]) -> Result<(String, usize), String> {
    let v: Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    let events = v["traceEvents"].as_array().ok_or("no traceEvents")?;
    for (i, e) in events.iter().enumerate() {
        let far = |k: &str| e[k].as_f64().is_some_and(|us| us.abs() > FAR_US);
        if far("ts") || far("dur") {
            return Err(format!(
                "event {i} has a time beyond {FAR_US} us: {} {}",
                e["ts"], e["dur"]
            ));
        }
    }
    Ok((html(events), events.len()))
}

/// Thirty thousand years: times of a trace are less, and sums of such times are numbers.
const FAR_US: f64 = 1e18;

/// The events as bars: a row per rank and stream, time from left to right, names on hover.
fn html(events: &[Value]) -> String {
    let spans: Vec<&Value> = events.iter().filter(|e| e["ph"] == "X").collect();
    let num = |e: &Value, k: &str| e[k].as_f64().unwrap_or(0.0);
    let start = spans.iter().map(|e| num(e, "ts")).fold(f64::INFINITY, f64::min);
    let end = spans.iter().map(|e| num(e, "ts") + num(e, "dur")).fold(0.0, f64::max);
    let scale = 4000.0 / (end - start).max(1.0);
    let mut lanes: Vec<(u64, u64)> = spans
        .iter()
        .map(|e| (e["pid"].as_u64().unwrap_or(0), e["tid"].as_u64().unwrap_or(0)))
        .collect();
    lanes.sort_unstable();
    lanes.dedup();
    let mut bars = String::new();
    for (row, lane) in lanes.iter().enumerate() {
        let y = 20 + row * 18;
        bars += &format!("<text x='0' y='{}'>rank {} / {}</text>", y + 12, lane.0, lane.1);
    }
    for e in &spans {
        let lane = (e["pid"].as_u64().unwrap_or(0), e["tid"].as_u64().unwrap_or(0));
        let y = 20 + lanes.binary_search(&lane).unwrap_or(0) * 18;
        let name = e["name"].as_str().unwrap_or("?").replace(['<', '>', '&'], "");
        // A colour that depends on the name alone.
        let hue = name.bytes().fold(7u32, |h, b| h.wrapping_mul(31).wrapping_add(b.into())) % 360;
        bars += &format!(
            "<rect x='{:.1}' y='{y}' width='{:.2}' height='15' fill='hsl({hue},60%,55%)'><title>{name} {:.1} us</title></rect>",
            110.0 + (num(e, "ts") - start) * scale,
            (num(e, "dur") * scale).max(0.3),
            num(e, "dur")
        );
    }
    let height = 40 + lanes.len() * 18;
    format!(
        "<!doctype html><meta charset='utf-8'><title>tilewire timeline</title>\
         <body style='font:12px sans-serif;overflow-x:auto'><p>{:.1} ms, {} pieces of work; hover for names</p>\
         <svg width='4120' height='{height}' font-size='11'>{bars}</svg></body>\n",
        (end - start).max(0.0) / 1e3,
        spans.len()
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ranks_are_processes_and_streams_are_threads() {
        let span = |name: &str, lane: &str| Span {
            name: name.into(),
            lane: lane.into(),
            start_us: 1.0,
            len_us: 2.0,
        };
        let began = SystemTime::now();
        let t = chrome(&[
            to_json(&[span("gemm", "main"), span("push", "copy"), span("gemm", "main")], began),
            to_json(&[], began),
        ]);
        let events = t["traceEvents"].as_array().unwrap();
        let work: Vec<_> = events.iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(work.len(), 3);
        assert_eq!(
            (&work[0]["tid"], &work[1]["tid"], &work[2]["tid"]),
            (&json!(0), &json!(1), &json!(0))
        );
        assert_eq!(events.iter().filter(|e| e["name"] == "process_name").count(), 2);
        let page = html(events);
        assert_eq!(page.matches("<rect").count(), 3);
        assert!(page.contains("rank 0 / 1") && page.contains("gemm 2.0 us"));
    }

    #[test]
    fn fuzz_trace() {
        let span = |name: &str, lane: &str, start_us| Span {
            name: name.into(),
            lane: lane.into(),
            start_us,
            len_us: 2.5,
        };
        let spans = [span("gemm", "main", 1.0), span("<push> & co", "copy", 2.0)];
        let ranks = [
            to_json(&spans, UNIX_EPOCH),
            to_json(&spans[..1], UNIX_EPOCH + Duration::from_secs(1)),
        ];
        let seeds = vec![chrome(&ranks).to_string().into_bytes()];
        tilewire_testing::fuzz!("trace", seeds, |b| {
            let Ok((page, num)) = page(b) else { return false };
            let (bars, rows) = (page.matches("<rect").count(), page.matches("<text").count());
            assert!(bars <= num && rows <= bars);
            // No name of a span is markup: all of it is ours.
            assert_eq!(page.matches('<').count(), 10 + 4 * bars + 2 * rows);
            let numbers =
                page.split("<rect ").skip(1).flat_map(|bar| bar.split('\'').skip(1).step_by(2));
            assert!(numbers.take(4 * bars).all(|n| n != "NaN" && !n.ends_with("inf")), "{page}");
            true
        });
    }

    /// The difference of both is no number.
    #[test]
    fn times_that_are_far_away_are_refused() {
        let of = |ts: &str| format!(r#"{{"traceEvents":[{{"ph":"X","ts":{ts}}},{{"ph":"X"}}]}}"#);
        assert!(page(of("1e18").as_bytes()).is_ok());
        let e = page(of("-1.5e308").as_bytes()).unwrap_err();
        assert!(e.contains("event 0") && e.contains("-1.5e+308"), "{e}");
    }

    /// Spans of two ranks that ran at one time have one place in the timeline, whenever the
    /// processes were started.
    #[test]
    fn ranks_of_several_processes_share_a_time() {
        let spans =
            |start_us| [Span { name: "gemm".into(), lane: "main".into(), start_us, len_us: 1.0 }];
        let early = UNIX_EPOCH + Duration::from_secs(1 << 30);
        let late = early + Duration::from_micros(500);
        let t = chrome(&[to_json(&spans(3.5), late), to_json(&spans(503.5), early)]);
        let work = t["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X");
        assert_eq!(work.map(|e| e["ts"].as_f64()).collect::<Vec<_>>(), [Some(503.5); 2]);
    }
}
