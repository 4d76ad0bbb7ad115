//! The judge: a harm, what was seen, and what has to follow from it.
//!
//! It knows nothing of the job but its number of ranks, and nothing of what the driver expects.

use serde_json::Value;

/// Longest end behind a kill on the host, in seconds: three times that on an idle machine.
const KILLED: f64 = 1.0;
/// Longest end behind another harm, beside what the harm itself takes; behind all on devices.
const AT_ONCE: f64 = 3.0;
/// The launcher gives ranks this time between SIGTERM and SIGKILL.
const GRACE: f64 = 3.0;

/// `right`, `void`, or `wrong: why`.
pub fn judge(harm: &Value, seen: &Value) -> String {
    let is_void = seen["void"] == true;
    let early = (seen["early"] == true).then(|| "it ended before the harm".to_owned());
    let found = early.or_else(|| if is_void { None } else { wrong(harm, seen) });
    match found.or_else(|| left_over(seen)) {
        None if is_void => "void".to_owned(),
        None => "right".to_owned(),
        Some(why) => format!("wrong: {why}"),
    }
}

fn wrong(harm: &Value, seen: &Value) -> Option<String> {
    let err = seen["err"].as_str().unwrap_or_default();
    let code = seen["code"].as_i64();
    let seconds = seen["seconds"].as_f64().unwrap_or(f64::MAX);
    let expect = |want: i64| (code != Some(want)).then(|| format!("code {code:?}, not {want}"));
    let within = |limit: f64| (seconds > limit).then(|| format!("{seconds:.2} s, not {limit}"));
    let says = |words: &str| (!err.contains(words)).then(|| format!("nothing says `{words}`"));
    if err.contains("panicked at") || err.contains("this is a bug") {
        return Some("a panic, or an error that is a bug".to_owned());
    }
    let rank = harm["rank"].as_i64().unwrap_or(-1);
    // Of jobs that end by themselves, or when they are asked to.
    let in_time = || within(harm["takes"].as_f64().unwrap_or(0.0) + AT_ONCE);
    match harm["kind"].as_str().unwrap_or_default() {
        "kill" => {
            let signal = harm["signal"].as_i64().unwrap_or(0);
            let words = format!("rank {rank} failed first (Signaled({signal}))");
            let limit = if harm["devices"] == true { AT_ONCE } else { KILLED };
            expect(128 + signal).or_else(|| says(&words)).or_else(|| within(limit))
        }
        "stop" => {
            let deadline = harm["deadline"].as_f64().unwrap_or(0.0);
            let limit = deadline + GRACE + AT_ONCE;
            expect(2).or_else(|| names(err, rank)).or_else(|| within(limit))
        }
        "meeting" => {
            let limit = harm["deadline"].as_f64().unwrap_or(0.0) + GRACE + AT_ONCE;
            let stuck = format!("rank {rank} did not end when asked to, and was killed");
            let missing = format!("did not arrive: r{rank} (");
            let mut all = err.lines().filter(|l| l.contains("did not arrive: "));
            let other = all.find(|l| !l.contains(&missing));
            expect(2)
                .or_else(|| says(&missing).or_else(|| says(&stuck)).or_else(|| within(limit)))
                .or_else(|| other.map(|l| format!("r{rank} was missing, and an error says: {l}")))
        }
        "launcher" => (seen["signal"] != 9)
            .then(|| "the launcher was not killed".to_owned())
            .or_else(|| within(1.0)),
        "stalled" => {
            // The time limit, the grace time, and a second without a reader.
            let limit = harm["limit"].as_f64().unwrap_or(0.0) + GRACE + 1.0 + AT_ONCE;
            expect(124).or_else(|| says("bytes of output were dropped")).or_else(|| within(limit))
        }
        "full" => {
            let begin = harm["begin"].as_f64().unwrap_or(0.0);
            expect(2).or_else(|| says("No space left")).or_else(|| within(begin + AT_ONCE + GRACE))
        }
        "fds" | "memory" | "files" => limited(seen, code, err).or_else(in_time),
        "stranger" | "pause" => expect(0).or_else(|| differs(seen)).or_else(in_time),
        "damage" => {
            let file = seen["file"].as_str().unwrap_or("?");
            expect(0)
                .or_else(|| says(file))
                .or_else(|| says("is damaged"))
                .or_else(|| differs(seen))
                .or_else(in_time)
        }
        "restart" | "steady" => restarted(harm, seen, err, code).or_else(in_time),
        other => Some(format!("an unknown harm `{other}`")),
    }
}

/// A job goes on behind each kill, and ends well.
fn restarted(harm: &Value, seen: &Value, err: &str, code: Option<i64>) -> Option<String> {
    let kills = harm["kills"].as_u64().unwrap_or(0) as usize;
    let notes = err.lines().filter(|l| l.contains("ranks are started anew")).count();
    let unseen = harm["kind"] == "restart" && !seen["fds"].is_array();
    (code != Some(0))
        .then(|| format!("code {code:?}, not 0"))
        .or_else(|| (notes != kills).then(|| format!("{notes} restarts for {kills} kills")))
        .or_else(|| differs(seen))
        .or_else(|| unseen.then(|| "nobody has counted descriptors".to_owned()))
}

/// Under a limit a job does its work, or ends with a typed error.
fn limited(seen: &Value, code: Option<i64>, err: &str) -> Option<String> {
    match code {
        Some(0) => differs(seen),
        Some(2) if err.contains("error: ") => None,
        // The dynamic loader and the shell come before us.
        Some(126 | 127) => None,
        _ => Some(format!("code {code:?}, signal {}: no typed end", seen["signal"])),
    }
}

/// Every error that blames a rank blames the one that was stopped, and so does the launcher.
fn names(err: &str, rank: i64) -> Option<String> {
    let blamed = |words: &str| -> Vec<i64> {
        let digits = |t: &str| t.chars().take_while(char::is_ascii_digit).collect::<String>();
        err.split(words).skip(1).filter_map(|rest| digits(rest).parse().ok()).collect()
    };
    let verdict = blamed("failed because of rank ");
    if verdict != [rank] {
        return Some(format!("it was rank {rank}, and the launcher blames {verdict:?}"));
    }
    let other = blamed("culprit ").into_iter().find(|r| *r != rank);
    other.map(|r| format!("it was rank {rank}, and an error blames rank {r}"))
}

fn differs(seen: &Value) -> Option<String> {
    seen["differs"].as_str().map(|why| format!("the curve is another: {why}"))
}

fn left_over(seen: &Value) -> Option<String> {
    for what in ["left", "shm", "temp", "sockets", "files"] {
        if seen[what].as_array().is_none_or(|a| !a.is_empty()) {
            return Some(format!("{what}: {} stay behind", seen[what]));
        }
    }
    // Of jobs that go on behind the harm: descriptors that it has cost their processes.
    let fds = seen["fds"].as_array().is_some_and(|a| !a.is_empty());
    fds.then(|| format!("descriptors leak: {}", seen["fds"]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn killed() -> (Value, Value) {
        let harm = json!({ "kind": "kill", "rank": 2, "signal": 9, "ranks": 4 });
        let err = "tilewire run: rank 2 failed first (Signaled(9)), after 0.2 s; its last lines:";
        let seen = json!({ "code": 137, "signal": null, "seconds": 0.2, "err": err });
        (harm, nothing_left(seen))
    }

    /// The same of a case that has left nothing.
    fn nothing_left(mut seen: Value) -> Value {
        for what in ["left", "shm", "temp", "sockets", "files"] {
            seen[what] = json!([]);
        }
        seen
    }

    fn with(mut seen: Value, what: &str, value: Value) -> Value {
        seen[what] = value;
        seen
    }

    /// A judge who is lied to notices: without that a drill shows nothing.
    #[test]
    fn planted_lies_are_caught() {
        let (harm, seen) = killed();
        assert_eq!(judge(&harm, &seen), "right");
        let wrong = |what: &str, value: Value| judge(&harm, &with(seen.clone(), what, value));
        let text = "rank 1 failed first (Signaled(9))";
        for (lie, words) in [
            (wrong("err", json!(text)), "nothing says `rank 2 failed first"),
            (wrong("code", json!(1)), "code Some(1), not 137"),
            (wrong("code", Value::Null), "code None"),
            (wrong("seconds", json!(1.5)), "1.50 s, not 1"),
            (wrong("left", json!(["77 tilewire"])), "stay behind"),
            (wrong("shm", json!(["x"])), "stay behind"),
            (wrong("temp", Value::Null), "stay behind"),
            (wrong("sockets", json!(["@tilewire-x"])), "stay behind"),
            (wrong("files", json!(["c/.work-77"])), "stay behind"),
            (wrong("early", json!(true)), "ended before the harm"),
            (wrong("err", json!(format!("{}\nthread panicked at", seen["err"]))), "a panic"),
        ] {
            assert!(lie.starts_with("wrong: ") && lie.contains(words), "{lie}, not {words}");
        }
        // Ranks that share a device, or emulate one, take longer.
        let on_devices = with(harm.clone(), "devices", json!(true));
        assert_eq!(judge(&on_devices, &with(seen.clone(), "seconds", json!(1.5))), "right");
        assert_eq!(wrong("void", json!(true)), "void");
        // A case without harm shows nothing right, and what it leaves is wrong.
        let left = with(seen.clone(), "left", json!(["77 tilewire"]));
        assert!(judge(&harm, &with(left, "void", json!(true))).contains("stay behind"));
    }

    #[test]
    fn a_silent_resume_is_caught() {
        let harm = json!({ "kind": "damage", "ranks": 2 });
        let err = "warning: c/step-0000000040 is damaged: rank-00001.safetensors: tensor x";
        let file = "rank-00001.safetensors";
        let seen = nothing_left(json!({ "code": 0, "err": err, "file": file, "seconds": 1.0 }));
        assert_eq!(judge(&harm, &seen), "right");
        let lie = judge(&harm, &with(seen.clone(), "err", json!("")));
        assert!(lie.contains("nothing says `rank-00001"), "{lie}");
        let lie = judge(&harm, &with(seen.clone(), "differs", json!("step 3")));
        assert!(lie.contains("the curve is another: step 3"), "{lie}");
        let slow = with(seen, "seconds", json!(9.5));
        assert!(judge(&harm, &slow).contains("9.50 s, not 3"));
        assert_eq!(judge(&with(harm, "takes", json!(7)), &slow), "right");
    }

    #[test]
    fn a_stopped_rank_is_named_by_every_error() {
        let harm = json!({ "kind": "stop", "rank": 1, "deadline": 1, "ranks": 4 });
        let one = "error: all_reduce: no signal (culprit 1)\ntilewire run: rank 0 failed because of \
                   rank 1";
        let seen = |err: String| nothing_left(json!({ "code": 2, "err": err, "seconds": 4.5 }));
        assert_eq!(judge(&harm, &seen(one.to_owned())), "right");
        let lie = judge(&harm, &seen(format!("{one}\nerror: agree: no message (culprit 10)")));
        assert!(lie.contains("an error blames rank 10"), "{lie}");
        let lie = judge(&harm, &seen(one.replace("of rank 1", "of rank 2")));
        assert!(lie.contains("the launcher blames [2]"), "{lie}");
        assert!(judge(&harm, &seen(String::new())).contains("the launcher blames []"));
    }

    #[test]
    fn a_rank_that_is_missing_is_the_one_that_was_stopped() {
        let harm = json!({ "kind": "meeting", "rank": 1, "deadline": 1, "ranks": 3 });
        let one = "error: rendezvous: 1 of 3 ranks did not arrive: r1 (rank 0, peer 1)\ntilewire \
                   run: rank 1 did not end when asked to, and was killed";
        let seen = |err: String| nothing_left(json!({ "code": 2, "err": err, "seconds": 4.2 }));
        assert_eq!(judge(&harm, &seen(one.to_owned())), "right");
        let other = one.replace("arrive: r1", "arrive: r2");
        assert!(judge(&harm, &seen(other)).contains("nothing says"));
        let lie = judge(&harm, &seen(format!("{one}\n1 of 3 ranks did not arrive: r2 (")));
        assert!(lie.contains("r1 was missing, and an error says"), "{lie}");
    }

    #[test]
    fn a_full_disk_ends_a_job_soon_behind_its_begin() {
        let seen = json!({ "code": 2, "err": "error: No space left", "seconds": 20.0 });
        let seen = nothing_left(seen);
        let harm = |begin: f64| json!({ "kind": "full", "begin": begin });
        assert_eq!(judge(&harm(25.0), &seen), "right");
        assert!(judge(&harm(0.0), &seen).contains("20.00 s, not 6"));
        assert!(judge(&harm(25.0), &with(seen, "err", json!(""))).contains("nothing says"));
    }

    #[test]
    fn limits_end_jobs_with_types() {
        let harm = json!({ "kind": "memory", "limit": 100, "ranks": 2 });
        let seen = |code: i64, err: &str| {
            let seconds = if err == "slow" { 4.0 } else { 0.5 };
            nothing_left(json!({ "code": code, "err": err, "signal": null, "seconds": seconds }))
        };
        assert_eq!(judge(&harm, &seen(2, "error: no memory")), "right");
        assert_eq!(judge(&harm, &seen(0, "")), "right");
        assert!(judge(&harm, &seen(134, "error: ")).contains("no typed end"));
        assert!(judge(&harm, &seen(2, "")).contains("no typed end"));
        assert!(judge(&harm, &seen(0, "slow")).contains("4.00 s, not 3"));
    }

    #[test]
    fn restarts_are_counted() {
        for kind in ["restart", "steady"] {
            restarts_of(json!({ "kind": kind, "kills": 2, "ranks": 4 }));
        }
    }

    fn restarts_of(harm: Value) {
        let note = "tilewire run: rank 1 ...: 1 of 4 ranks are started anew: 1\n";
        let seen = |n: usize| {
            let err = note.repeat(n);
            nothing_left(json!({ "code": 0, "err": err, "fds": [], "seconds": 0.1 }))
        };
        assert_eq!(judge(&harm, &seen(2)), "right");
        let leak = json!(["launcher: 9, then 10"]);
        assert!(judge(&harm, &with(seen(2), "fds", leak)).contains("descriptors leak"));
        if harm["kind"] == "restart" {
            let uncounted = judge(&harm, &with(seen(2), "fds", Value::Null));
            assert!(uncounted.contains("nobody has counted"), "{uncounted}");
        }
        assert!(judge(&harm, &seen(1)).contains("1 restarts for 2 kills"));
        assert!(judge(&harm, &with(seen(2), "seconds", json!(8))).contains("8.00 s, not 3"));
    }
}
