//! The `rankwise` program.

fn main() {}
