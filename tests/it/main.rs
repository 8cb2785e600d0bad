//! One integration binary, so that it links once.

mod wire;
