//! Mock engines on real ports.
