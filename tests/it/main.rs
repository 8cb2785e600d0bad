//! One integration binary, so that it links once.

mod capture_format;
mod capture_reference;
mod index_reference;
mod wire;
