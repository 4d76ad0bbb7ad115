//! Who am I.
