//! Prints every compilation unit as JSON lines, for compilers outside of this program.

use std::io::Write;

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for s in tilewire_kernels::ALL {
        let escape = |t: &str| {
            t.chars()
                .map(|c| match c {
                    '"' | '\\' => format!("\\{c}"),
                    c if (c as u32) < 0x20 => format!("\\u{:04x}", c as u32),
                    c => c.to_string(),
                })
                .collect::<String>()
        };
        let list = |v: &[&str]| v.iter().map(|d| format!("\"{d}\"")).collect::<Vec<_>>().join(",");
        writeln!(
            out,
            "{{\"name\":\"{}\",\"text\":\"{}\",\"defines\":[{}],\"kernels\":[{}]}}",
            s.name,
            escape(&s.text()),
            list(s.defines),
            list(s.kernels)
        )?;
    }
    Ok(())
}
