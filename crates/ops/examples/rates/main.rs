//! Rates of single operations on one GPU: `layers`, `gemm` or `attention`.
//!
//! `cargo run --release -p tilewire-ops --example rates layers|gemm|attention [SHAPE ...]`

#![expect(clippy::print_stdout, reason = "a program that prints its results")]

mod attention;
mod gemm;
mod layers;

use tilewire_core::{Error, Result};

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("layers") => layers::main(),
        Some("gemm") => gemm::main(),
        Some("attention") => attention::main(),
        other => Err(Error::invalid("which rates?")
            .expected("`layers`, `gemm` or `attention`")
            .seen(other.unwrap_or("nothing"))),
    }
}
