//! The layout in memory of structures that kernels take by value.

use std::fmt::Write as _;

/// A field of a [`Layout`]: its name and its offset in bytes.
pub type Field = (&'static str, usize);

/// The layout of a structure in memory.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Its name, in both languages.
    pub name: &'static str,
    /// The file below `kernels/src` that declares it.
    pub file: &'static str,
    /// Its size in bytes.
    pub size: usize,
    /// Its fields.
    pub fields: &'static [Field],
}

impl Layout {
    /// C++ that does not compile unless the declaration before it has this layout.
    pub fn asserts(&self) -> String {
        let Self { name, size, .. } = self;
        // NVRTC has no header, and so no `offsetof`, but the operator that it is made of.
        let mut text =
            "#ifdef __CUDACC__\n#define TW_OFFSETOF(t, f) __INTADDR__(&((t*)0)->f)\n#else\n\
             #define TW_OFFSETOF(t, f) __builtin_offsetof(t, f)\n#endif\n"
                .to_owned();
        text += &format!("static_assert(sizeof({name}) == {size}, \"size of {name}\");\n");
        for (field, offset) in self.fields.iter().filter(|(field, _)| *field != "pad") {
            let what = format!("{name}::{field}");
            let at = format!("TW_OFFSETOF({name}, {field})");
            // Writing to a string does not fail.
            writeln!(text, "static_assert({at} == {offset}, \"offset of {what}\");").ok();
        }
        text
    }
}
