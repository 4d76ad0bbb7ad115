//! Loss curves as SVG.

use std::fmt::Write;

const W: f64 = 800.0;
const H: f64 = 400.0;
const M: f64 = 50.0;

/// A line chart of `values` over the steps from `first` on, as a complete SVG document.
pub fn line_chart(title: &str, y_label: &str, first: usize, values: &[f64]) -> String {
    let finite: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
    let low = finite.iter().copied().fold(f64::INFINITY, f64::min);
    let high = finite.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (low, high) = if low < high { (low, high) } else { (low.min(0.0), low.max(1.0)) };
    let x = |i: usize| M + (W - 2.0 * M) * i as f64 / (values.len().max(2) - 1) as f64;
    let y = |v: f64| H - M - (H - 2.0 * M) * (v - low) / (high - low);
    let mut points = String::new();
    for (i, &v) in values.iter().enumerate().filter(|(_, v)| v.is_finite()) {
        write!(points, "{:.1},{:.1} ", x(i), y(v)).ok();
    }
    let mut grid = String::new();
    for t in 0..=4 {
        let v = low + (high - low) * f64::from(t) / 4.0;
        write!(
            grid,
            "<line x1='{M}' x2='{}' y1='{1:.1}' y2='{1:.1}' stroke='#ddd'/>\
             <text x='{2}' y='{1:.1}' text-anchor='end' dy='4'>{v:.2}</text>",
            W - M,
            y(v),
            M - 6.0
        )
        .ok();
    }
    let last = first + values.len().saturating_sub(1);
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {W} {H}' font-family='sans-serif' font-size='12'>\
         <rect width='100%' height='100%' fill='white'/>{grid}\
         <text x='{}' y='24' text-anchor='middle' font-size='15'>{}</text>\
         <text x='{M}' y='{}'>{first}</text><text x='{}' y='{}' text-anchor='end'>step {last}</text>\
         <text x='14' y='{}' transform='rotate(-90 14 {})' text-anchor='middle'>{}</text>\
         <polyline points='{points}' fill='none' stroke='#0a62c4' stroke-width='2'/></svg>\n",
        W / 2.0,
        escape(title),
        H - M + 18.0,
        W - M,
        H - M + 18.0,
        H / 2.0,
        H / 2.0,
        escape(y_label)
    )
}

fn escape(s: &str) -> String {
    s.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_value_is_a_point() {
        let svg = line_chart("a < b", "loss", 3, &[3.0, f64::NAN, 1.0]);
        assert!(
            svg.starts_with("<svg")
                && svg.trim_end().ends_with("</svg>")
                && svg.contains("a &lt; b")
        );
        let points = svg.split("points='").nth(1).unwrap().split('\'').next().unwrap();
        assert_eq!(points.split_whitespace().count(), 2);
        assert!(svg.contains(">3</text>") && svg.contains("step 5"), "those of a resumed run");
        assert!(line_chart("t", "y", 0, &[]).contains("polyline"));
        assert!(!line_chart("t", "y", 0, &[2.0]).contains("NaN"));
    }
}
