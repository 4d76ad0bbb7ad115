//! Errors of tilewire as exceptions of `tilewire._errors`.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tilewire::prelude::*;

/// The exception of `e`: a class for each kind, with the error's fields as attributes.
pub fn exception(py: Python<'_>, e: &Error) -> PyErr {
    match raise(py, e) {
        Ok(err) | Err(err) => err,
    }
}

fn raise(py: Python<'_>, e: &Error) -> PyResult<PyErr> {
    let fields = PyDict::new(py);
    fields.set_item("message", e.message())?;
    fields.set_item("op", e.get_op())?;
    fields.set_item("phase", e.get_phase())?;
    fields.set_item("team", e.get_team())?;
    fields.set_item("rank", e.get_rank().map(Rank::get))?;
    fields.set_item("peer", e.get_peer().map(Rank::get))?;
    for (name, rank) in [
        ("world_rank", e.get_world_rank()),
        ("world_peer", e.get_world_peer()),
        ("culprit", e.get_culprit()),
    ] {
        fields.set_item(name, rank.map(Rank::get))?;
    }
    fields.set_item("hint", e.get_hint())?;
    let json = e.to_json();
    fields.set_item("seq", json["seq"].as_u64())?;
    for name in ["expected", "seen", "cause"] {
        fields.set_item(name, json[name].as_str())?;
    }
    fields.set_item("elapsed_ms", json["elapsed_ms"].as_f64())?;
    let kind = json["kind"].as_str().unwrap_or("internal");
    let make = py.import("tilewire._errors")?.getattr("make")?;
    Ok(PyErr::from_value(make.call1((kind, e.to_string(), fields))?))
}

/// `Result`s of tilewire in functions that Python calls.
pub trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|e| exception(py, &e))
    }
}
