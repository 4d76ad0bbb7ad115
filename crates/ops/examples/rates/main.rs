//! Rates of single operations on one GPU: `layers`, `gemm`, `grouped` or
//! `attention`.
//!
//! `cargo run --release -p tilewire-ops --example rates layers|gemm|grouped|attention [SHAPE ...]`

#![expect(clippy::print_stdout, reason = "a program that prints its results")]

mod attention;
mod gemm;
mod grouped;
mod layers;

use tilewire_core::{Error, Result};

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("layers") => layers::main(),
        Some("gemm") => gemm::main(),
        Some("grouped") => grouped::main(),
        Some("attention") => attention::main(),
        other => Err(Error::invalid("which rates?")
            .expected("`layers`, `gemm`, `grouped` or `attention`")
            .seen(other.unwrap_or("nothing"))),
    }
}
