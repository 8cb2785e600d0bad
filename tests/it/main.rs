//! One integration binary, so that it links once.
mod capture_format;
mod index_reference;
