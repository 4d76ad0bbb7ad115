//! Token embedding and rotary position embedding.

use crate::Mat;

/// `y[t] = table[ids[t]]`: `[V, H] -> [T, H]`.
///
/// # Panics
/// If an id is not a row of the table.
pub fn embedding(table: &Mat, ids: &[usize]) -> Mat {
    Mat::from_fn(ids.len(), table.cols, |t, c| table.at(ids[t], c))
}

/// Gradient of the table, `[vocab, H]`: `d[v] = sum over t with ids[t] = v of dy[t]`.
///
/// # Panics
/// If an id is not below `vocab` or there is not one for each row of `dy`.
pub fn embedding_bwd(dy: &Mat, ids: &[usize], vocab: usize) -> Mat {
    assert_eq!(ids.len(), dy.rows, "one id for each row");
    let mut d = Mat::zeros(vocab, dy.cols);
    for (t, &id) in ids.iter().enumerate() {
        for c in 0..dy.cols {
            *d.at_mut(id, c) += dy.at(t, c);
        }
    }
    d
}

/// The elements of a head that form a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RopeStyle {
    /// `i` with `i + d/2` (GPT-NeoX, Llama in Hugging Face form).
    #[default]
    HalfSplit,
    /// `2i` with `2i + 1` (GPT-J, the paper).
    Interleaved,
}

/// Rotary embedding of every head of a `[T, heads * head_dim]` matrix.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RopeSpec {
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Base of the angles, usually 10000.
    pub base: f64,
    /// Pairing.
    pub style: RopeStyle,
}

/// Rotates pair `i` of every head of token `t` by `positions[t] * base^(-2i / head_dim)`:
/// `(a, b) -> (a cos - b sin, a sin + b cos)` (Su et al. 2021). `x` is `[T, heads * head_dim]`.
///
/// Positions are those of the token in its sequence, whatever row or rank holds it.
///
/// # Panics
/// If the columns are not a multiple of an even `head_dim`, or positions do not fit the rows.
pub fn rope(x: &Mat, positions: &[usize], spec: RopeSpec) -> Mat {
    rotate(x, positions, spec, 1.0)
}

/// Gradient of [`rope`]: the rotation by the negative angle.
///
/// # Panics
/// As [`rope`].
pub fn rope_bwd(dy: &Mat, positions: &[usize], spec: RopeSpec) -> Mat {
    rotate(dy, positions, spec, -1.0)
}

fn rotate(x: &Mat, positions: &[usize], spec: RopeSpec, direction: f64) -> Mat {
    let d = spec.head_dim;
    assert!(d > 0 && d.is_multiple_of(2) && x.cols.is_multiple_of(d), "head dimension {d}");
    assert_eq!(positions.len(), x.rows, "one position for each row");
    let mut y = x.clone();
    for (t, &position) in positions.iter().enumerate() {
        for head in (0..x.cols).step_by(d) {
            for i in 0..d / 2 {
                let (ca, cb) = match spec.style {
                    RopeStyle::HalfSplit => (head + i, head + i + d / 2),
                    RopeStyle::Interleaved => (head + 2 * i, head + 2 * i + 1),
                };
                let frequency = spec.base.powf(-2.0 * i as f64 / d as f64);
                let (sin, cos) = (direction * position as f64 * frequency).sin_cos();
                let (a, b) = (x.at(t, ca), x.at(t, cb));
                *y.at_mut(t, ca) = a * cos - b * sin;
                *y.at_mut(t, cb) = a * sin + b * cos;
            }
        }
    }
    y
}
