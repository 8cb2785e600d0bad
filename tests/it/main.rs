//! One integration binary, so that it links once.

mod index_reference;
mod wire;
